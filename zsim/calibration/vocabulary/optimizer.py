"""Words of optimizers: "AdamW", "torch.optim.AdamW(fused=True)", "adamw_torch_fused", "AdamW
(foreach)", "AdamW 8-bit".

AdamW is what can be simulated, in one of torch's implementations; what makes a step of it a little
cheaper or dearer is named and widens the band, and optimizers that work on the host are refused.
"""

from __future__ import annotations

import re

from zsim.calibration.rows.checks import UNREAD, UNSAID, Assumed
from zsim.calibration.rows.records import Record, RowError

NAMES = frozenset(
    (
        "adamw", "adam", "fusedadam", "fusedadamw", "decoupledadamw", "decoupled", "adamw8bit",
        "pagedadamw",
    )
)
_IMPLEMENTATION = re.compile(r"fused|for[-_ ]?each|for[-_ ]?loop|single[-_ ]tensor")
_DENIED_BEFORE = re.compile(r"(?:\bnot?|\bnon|\bwithout|\bw/o|\bun)[-_ ]*$")
_DENIED_BEHIND = re.compile(r"\s*(?:[=:]\s*|is )?(?:false|off|disabled|0\b|none)")
_CHANGES = (
    ("states of 8 bits", r"\b8[-_ ]?bits?\b|8bit|\bint8\b|\bfp8\b|\bfloat8\b|\bbnb\b|bitsandbytes"),
    ("states of 4 bits", r"\b4[-_ ]?bits?\b|4bit|\bint4\b"),
    (
        "states of 16 bits",
        r"(?:bf16|fp16|bfloat16|half|16[-_ ]?bits?)(?=.*\bstates?\b)|\bstates?\b.*(?:bf16|fp16|bfloat16|half)",  # noqa: E501
    ),
    ("an average of parameters", r"\bema\b|\bswa\b|averag"),
)
"""What is not simulated of an optimizer, and changes its step a little."""
_REST = frozenset(
    (
        *(
            "torch", "pytorch", "optim", "optimizer", "apex", "deepspeed", "composer",
            "transformer", "hf", "with", "in", "the", "and",
        ),
        *(
            "by", "true", "false", "not", "no", "non", "without", "w", "o", "off", "on", "default",
            "implementation", "kernel", "kernels",
        ),
        *(
            "bit", "bits", "bf", "fp", "bfloat", "half", "int", "states", "state", "bnb",
            "bitsandbytes", "ema", "swa", "lr", "e", "beta",
        ),
        *(
            "betas", "b", "eps", "unfused", "weight", "decay", "wd", "clip", "clipping", "gradient",
            "gradients", "float", "adamw", "un",
        ),
    )
)


def implementation_of(record: Record, *, default: str, assumed: Assumed) -> str:
    """torch's implementation of the row's AdamW, `default` where it does not say; RowError for
    other optimizers and for offload."""
    words = record.text("optimizer", "")
    said = re.sub(r"\s+", " ", words.lower())
    tokens = set(re.findall(r"[a-z]+(?:8bit)?", said.replace("_", " ")))
    if not words:
        return default
    if not tokens & NAMES:
        raise RowError(f"optimizer: expected AdamW, found {words[:40]!r}")
    if re.search(r"offload|\bcpu\b|\bpaged|\bnvme\b|\bhost\b", said):
        raise RowError(f"optimizer: expected states on the GPU, for offload is not mapped, found "
                       f"{words[:40]!r}")
    if tokens & {"sgd", "muon", "lion", "shampoo", "soap", "lamb", "adafactor", "sophia", "came"}:
        raise RowError(f"optimizer: expected AdamW alone, found {words[:40]!r}")
    for what, pattern in _CHANGES:
        if re.search(pattern, said):
            assumed.add(f"optimizer = {words[:40]!r} as AdamW with states of 32 bits, without "
                        f"{what}", widens=UNSAID)
    if "adam" in tokens and not tokens & {"adamw", "decoupled"}:
        assumed.add("Adam as AdamW")
    unknown = sorted(
        tokens
        - NAMES
        - _REST
        - {"fused", "foreach", "for", "each", "loop", "single", "tensor", "adam"}
    )
    if unknown:
        assumed.add(f"optimizer = {words[:40]!r}, of which {', '.join(unknown)[:40]} changes "
                    f"nothing: it is not known", widens=UNREAD)
    return _implementation(said, words, default=default, is_fused="fusedadam" in said)


def _implementation(said: str, words: str, *, default: str, is_fused: bool) -> str:
    kept, denied = set[str](), set[str]()
    for found in _IMPLEMENTATION.finditer(said):
        name = "fused" if found[0] == "fused" else "foreach" if "each" in found[0] else "for-loop"
        no = _DENIED_BEFORE.search(said[: found.start()]) or _DENIED_BEHIND.match(said, found.end())
        (denied if no else kept).add(name)
    kept |= {"fused"} if is_fused else set()
    if len(kept) > 1 or kept & denied:
        raise RowError(f"optimizer: expected one implementation, found {words[:40]!r}")
    if kept:
        return kept.pop()
    if default in denied or denied == {"foreach"}:
        return "for-loop" if "foreach" in denied else "foreach"
    return default
