"""Words of attention: which kernels ran, "SDPA flash v2", "flash_attention_3", "SDPA math (flash
disabled)", and which did not.

What a simulated model or its kernels are of is taken from the words; kernels that nothing here
times are those nearest to them, named and with a wider band; what splits sequences over GPUs is
refused. Attention over a part of a sequence is timed as over the whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from zsim.calibration.rows.checks import UNREAD, Assumed
from zsim.calibration.rows.records import Record, RowError
from zsim.calibration.vocabulary.gpu import Part

COLUMNS = ("attention", "attn_impl", "attn_implementation", "attention_implementation")
HOPPER = ("H100", "H200", "H800")
"""Models that FlashAttention 3 has kernels for."""
NEAREST = 0.1
"""How much wider a band is for kernels that are timed as others: FlexAttention has 0.85 to 0.9 of
FlashAttention 2's rate (PyTorch's post of August 2024), cuDNN on H100 up to 1.75 times it (the
notes of torch 2.5), about FlashAttention 3's, FlashAttention 1 half (its successor's paper), where
Triton's kernels have two thirds; memory-efficient attention has no rate of its own here."""
TORCH_S = ("flash", "efficient", "math")
"""Kernels of scaled_dot_product_attention in the order in which it tries them
(aten/src/ATen/native/transformers/cuda/sdp_utils.cpp)."""
_MENTIONS = re.compile(
    r"flash[-_ ]*(?:attn|attention|sdpa?)?(?:[-_ ]*v?(?P<version>\d)(?:\.\d+)*\b)?|\bfa(?:[-_ ]?v?(?P<short>\d))?\b"  # noqa: E501
    r"|(?P<kernel>triton|math\b|mem(?:ory)?[-_ ]*eff\w*|efficient\w*|cutlass|xformers|cudnn|transformer[-_ ]?engine"  # noqa: E501
    r"|flex(?:[-_ ]*(?:attn|attention))?\b"
    r"|eager|explicit|naive|vanilla|sdpa|scaled[-_ ]dot[-_ ]product(?:[-_ ]attention)?|scaled[-_ ]dot\w*)"  # noqa: E501
)
_DENIED_BEFORE = re.compile(
    r"(?:\bnot?|\bnon|\bnever|\bwithout|\bw/o|\bexcept|\binstead of|\brather than|\bdisable[sd]?)[-_ ]*(?:using |with |enable_)?$"  # noqa: E501
)
_DENIED_BEHIND = re.compile(
    r"[-_ ]*(?:attn|attention|sdpa?|kernels?|backend)?[-_ ]*(?:is |are |[=:]\s*)?"
    r"(?:disabled|off|false|0\b|unavailable|not (?:used|available|enabled))"
)
_SPLIT = re.compile(
    r"\bring\b|ulysses|context[-_ ]*parallel|sequence[-_ ]*parallel|\bcp\b|\bsp\b|striped?\b|zigzag|\busp\b"  # noqa: E501
)
_PARTLY = re.compile(r"sliding|window\w*|\blocal\b|sparse|\bchunked\b")
_NOTHING_MORE = frozenset(
    (
        *(
            "attn", "attention", "torch", "pytorch", "nn", "functional", "f", "backend", "kernel",
            "kernels", "default", "causal", "impl",
        ),
        *(
            "with", "via", "in", "the", "and", "by", "or", "of", "as", "auto", "only", "enabled",
            "true", "on", "using", "fused", "dao",
        ),
        *(
            "ailab", "hf", "transformers", "bf", "fp", "no", "not", "non", "without", "w", "o",
            "disabled", "off", "false", "sdp", "product",
        ),
        *("alibi", "library", "package", "implementation", "cuda", "version"),
    )
)
"""Words that change nothing beside those that name kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """`model`, the attention of a scenario's model, and `kernels`, those of its execution, "" where
    the model's says it all.

    `or_model` is what the words may mean of the model as well, "" for nothing; `is_torch_s` where
    torch chooses the kernel.
    """

    model: str
    kernels: str = ""
    or_model: str = ""
    is_torch_s: bool = False

    @property
    def execution(self) -> dict[str, str]:
        """What a scenario's execution has besides."""
        return {"attention_kernels": self.kernels} if self.kernels else {}

    def __str__(self) -> str:
        """What ran, alike for all words that mean it."""
        return " ".join((self.model, self.kernels)).strip()


def words_of(record: Record) -> tuple[str, str]:
    """The column that says which attention ran, and its words; the first column and "" where none
    does."""
    return next(
        ((name, words) for name in COLUMNS if (words := record.text(name, ""))), (COLUMNS[0], "")
    )


def attention_of(
    name: str, words: str, *, part: Part, assumed: Assumed, explicit: str = ""
) -> Attention:
    """What the `words` of the column `name` mean on a GPU; RowError where they name no kernel, two,
    or what splits sequences.

    `explicit` is a word that means the source's own attention of single calls where nothing else is
    named.
    """
    said = words.lower()
    if found := _SPLIT.search(said):
        splits = (
            f"{found[0]} attention splits sequences over GPUs, and only data parallelism is "
            f"simulated"
        )
        raise RowError(f"{name}: {splits}, found {words[:40]!r}")
    kept, denied = _named(said)
    kernel = _one_of(kept)
    if not kernel and explicit and re.search(rf"\b{explicit}\b", said) and "sdpa" not in kept:
        kernel = "explicit"
    if not kernel and not ("sdpa" in kept or denied & {"flash", "efficient", "cudnn"}):
        raise RowError(f"{name}: expected SDPA flash, math, efficient, cuDNN, explicit, Triton's "
                       f"or FlexAttention, found {words[:40]!r}")
    found_model = _of_kernel(
        kernel, kept, denied, name=name, words=words, part=part, assumed=assumed
    )
    outside = re.sub(r"\([^()]*\)", " ", _MENTIONS.sub(" ", said))
    rest = {word for word in re.findall(r"[a-z]+", outside) if word not in _NOTHING_MORE} | set(
        _PARTLY.findall(said)
    )
    rest -= {explicit, "v"}
    if _PARTLY.search(said):
        assumed.add(
            f"{name} = {words[:40]!r} as attention over whole sequences, causal", widens=UNREAD
        )
    elif rest:
        assumed.add(f"{name} = {words[:40]!r}, of which {', '.join(sorted(rest))[:40]} changes "
                    f"nothing: it is not known", widens=UNREAD)
    return found_model


def _named(said: str) -> tuple[dict[str, str], set[str]]:
    """The kernels that the words name, each with its version or "", and those that they deny, also
    several behind one "no"."""
    kept, denied, before, ended = dict[str, str](), set[str](), False, 0
    for mention in _MENTIONS.finditer(said):
        joined = re.fullmatch(r"\s*(?:/|or|nor)\s*", said[ended : mention.start()]) is not None
        before = bool(_DENIED_BEFORE.search(said[: mention.start()])) or (before and joined)
        is_denied = before or _DENIED_BEHIND.match(said, mention.end()) is not None
        ended = mention.end()
        kernel = _canonical(mention["kernel"] or "flash")
        if is_denied:
            denied.add(kernel)
        else:
            kept[kernel] = kept.get(kernel) or mention["version"] or mention["short"] or ""
    return kept, denied


def _canonical(kernel: str) -> str:
    starts = {
        "mem": "efficient", "eff": "efficient", "transformer": "cudnn", "flex": "flex",
        "scaled": "sdpa",
    }
    starts |= dict.fromkeys(("eager", "explicit", "naive", "vanilla"), "explicit")
    return next((name for start, name in starts.items() if kernel.startswith(start)), kernel)


def _one_of(kept: dict[str, str]) -> str:
    """The kernel that is meant, "" for none; RowError for two that are not one another's parts."""
    names = set(kept) - {"sdpa"}
    for whole in ("triton", "cudnn", "flex"):
        if whole in names:
            names -= {"flash"}
    if "sdpa" in kept and names <= set(TORCH_S):  # of those that it may take, torch takes the first
        names = set([name for name in TORCH_S if name in names][:1])
    if "cutlass" in names:  # which kernels of both are written with
        names = names - {"cutlass"} or {"efficient"}
    if "xformers" in names and len(names) > 1:
        names -= {"xformers"}
    if len(names) > 1:
        raise RowError(f"attention: expected one kernel, found {' and '.join(sorted(names))}")
    return next(iter(names), "")


def _of_kernel(
    kernel: str, kept: dict[str, str], denied: set[str], *, name: str, words: str, part: Part,
    assumed: Assumed,
) -> Attention:
    if kernel == "flash":
        return _flash(kept["flash"], name=name, words=words, part=part, assumed=assumed)
    if kernel == "triton":
        return Attention(model="sdpa", kernels="triton")
    if kernel == "cudnn":
        new = part.model in HOPPER or part.model == "B200"
        assumed.add(f"cuDNN's attention as FlashAttention {3 if new else 2}", widens=NEAREST)
        return Attention(model="sdpa", kernels="flash3" if new else "flash2")
    if kernel == "flex":
        assumed.add("FlexAttention as FlashAttention 2", widens=NEAREST)
        return Attention(model="sdpa", kernels="flash2")
    if kernel in ("xformers", "efficient"):
        assumed.add(f"{kernel} attention, memory as torch's memory-efficient one and time as "
                    f"FlashAttention 2", widens=NEAREST)
        return Attention(model="efficient")
    if kernel:
        return Attention(model=kernel)
    if "flash" not in denied:
        return Attention(model="sdpa", kernels="flash2", is_torch_s=True)
    if "efficient" in denied:
        return Attention(model="math")
    assumed.add("SDPA without flash as its math kernel; the band covers its memory-efficient one")
    return Attention(model="math", or_model="efficient")


def _flash(version: str, *, name: str, words: str, part: Part, assumed: Assumed) -> Attention:
    if version == "3":
        if part.model not in HOPPER:
            raise RowError(f"{name}: FlashAttention 3 has no kernels for {part.words}, found "
                           f"{words[:40]!r}")
        return Attention(model="sdpa", kernels="flash3")
    if version == "1":
        assumed.add("FlashAttention 1 as Triton's, the nearest that is known", widens=NEAREST)
        return Attention(model="sdpa", kernels="triton")
    if version not in ("", "2"):
        raise RowError(f"{name}: expected FlashAttention 1 to 3, found {words[:40]!r}")
    return Attention(model="sdpa", kernels="flash2")


def asked_of(record: Record, *, default: Attention, part: Part, assumed: Assumed) -> Attention:
    """What the row says, and `default` where it says nothing."""
    name, words = words_of(record)
    return attention_of(name, words, part=part, assumed=assumed) if words else default


def with_attention(model: dict[str, object], attention: str) -> dict[str, object]:
    """A scenario's model table with that attention."""
    if "preset" in model:
        return model | {"attention": attention}
    return model | {"sizes": {**model["sizes"], "attention": attention}}  # type: ignore[dict-item]


def tables(
    model: dict[str, object], attention: Attention, *, grouped: bool = False
) -> Iterator[dict[str, object]]:
    """The model's table, and behind it what the words may mean as well: but not of `grouped` heads,
    for which there is no such kernel."""
    yield with_attention(model, attention.model) if attention.model != "sdpa" else model
    if attention.or_model and not grouped:
        yield with_attention(model, attention.or_model)
