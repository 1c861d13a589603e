"""Words of precision: what products are computed in, what gradients are reduced in, and whether
some products are in 8 bits.

"bf16 mixed", "bf16 compute, fp32 master/reduce", "float8 rowwise", each word of which is known.
What keeps the parameters themselves in 16 bits ("pure bf16", torchtitan's "full bf16") is refused:
sharded parameters are float32 in all that is simulated.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from zsim.calibration.rows.checks import DTYPES, Assumed
from zsim.calibration.rows.records import Record, RowError
from zsim.calibration.vocabulary import float8

WITHOUT_SCALER = 0.05
"""How much wider a band is for fp16 in a source whose rows are in bf16: gradients are scaled, and
looked at, before the optimizer."""
WORDS = frozenset(
    (
        *(
            "mixed", "precision", "amp", "autocast", "auto", "compute", "computation", "computed",
            "training", "dtype", "policy", "torch",
        ),
        *(
            "param", "params", "parameter", "parameters", "weight", "weights", "model", "master",
            "copy", "copies", "optim", "optimizer",
        ),
        *(
            "optimiser", "state", "states", "reduce", "reduced", "reduction", "reductions",
            "scatter", "reducescatter", "grad", "grads",
        ),
        *(
            "gradient", "gradients", "accum", "accumulate", "accumulated", "accumulation", "comm",
            "communication", "collectives",
        ),
        *(
            "activation", "activations", "forward", "backward", "products", "adam", "adamw", "is",
            "are", "to", "on", "over", "by", "as",
        ),
        *(
            "using", "via", "w", "main", "kept", "stored", "type", "default", "loss", "scaler",
            "gradscaler", "mixedprecision", "arithmetic",
        ),
        *(
            "mixedprecisionpolicy", "megatron", "deepspeed", "nanotron", "composer", "lightning",
            "fsdp2", "fsdp1", "ddp", "mp",
        ),
        *("true", "full", "fully", "pure", "entire", "entirely", "bfsixteen"),
    )
)
"""Those that say whose a dtype is, or nothing more, besides the words of recipes."""
_PURE = re.compile(
    r"\bpure\b|\b(?:true|full|fully|entire|entirely|all|only)[-_ ]+(?:in[-_ ]+)?(?:bf16|bfloat16|fp16|float16|half)\b"  # noqa: E501
    r"|\b(?:bf16|bfloat16|fp16|float16|half)[-_ ]+(?:true|all|only|everywhere|throughout)\b(?![-_ ]*(?:gather|reduce))"  # noqa: E501
)
_LIKE_DTYPES = re.compile(r"(?:u?int|nf|mx|nv|fp|bf|tf|float|bfloat|e)\d[a-z0-9]*|(?:mx|nv)fp\d\w*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dtypes:
    """What words of precision say: what products are computed in, and gradients reduced or kept in;
    "" where they do not say.

    `eight_bits`: some products are in 8 bits, the others in `compute`, "fp8" where only those are
    named.
    """

    compute: str
    reduce: str
    eight_bits: bool = False


def dtypes(text: str) -> Dtypes:
    """The dtypes in words as "bf16 compute, fp32 master/reduce"; RowError without one, for two of
    the same role, and for other words."""
    text = re.sub(
        r"\b16(?=[-_ ](?:mixed|true)\b)", "fp16", text, flags=re.IGNORECASE
    )  # as Lightning has them
    _understood(text)
    roles: dict[str, set[str]] = {"compute": set(), "reduce": set(), "kept": set()}
    for part in re.split(r"[,;+&()]|\band\b|\bwith\b", text.lower()):
        words = re.findall(r"[a-z]+\d*[a-z]*\d*", part.replace("_", " "))
        found = {DTYPES[word] for word in words if word in DTYPES}
        if re.search(r"reduc|grad|accum", part):
            roles["reduce"] |= found
        elif re.search(r"master|optim|state|weights? copy", part):
            roles["kept"] |= found
        elif (
            "mixed" in words and len(found) > 1
        ):  # "mixed bf16/fp32": parameters and their states are the latter
            roles["compute"] |= found - {"fp32"}
        else:
            roles["compute"] |= found
    eight_bits = "fp8" in roles["compute"]
    if len(roles["compute"]) == 2:
        roles["compute"] -= {"fp8"}
    if (
        len(roles["compute"]) != 1
        or len(roles["reduce"]) > 1
        or _PURE.search(text.lower())
        or roles["kept"] - {"fp32"}
    ):
        raise RowError(f"precision: expected one dtype of compute, perhaps one of reduction, over "
                       f"fp32 parameters, found {text[:60]!r}")
    return Dtypes(
        compute=roles["compute"].pop(), reduce=next(iter(roles["reduce"]), ""),
        eight_bits=eight_bits,
    )


def _understood(text: str) -> None:
    """RowError for a word that is not known; in brackets remarks of any words may stand, but no
    dtype that is not known."""
    said = text.lower().replace("_", " ")
    outside = re.findall(r"[a-z]+\d*[a-z]*\d*|\d+(?:x\d+)?", re.sub(r"\([^()]*\)", " ", said))
    known = (WORDS | float8.NAMES | float8.FILLERS | DTYPES.keys()) - float8.DENIALS
    foreign = [
        word
        for word in re.findall(r"[a-z0-9]+", said)
        if _LIKE_DTYPES.fullmatch(word) and word not in known
    ]
    unknown = ", ".join(sorted({word for word in outside if word not in known} | set(foreign)))
    if unknown:
        raise RowError(f"precision: expected dtypes and whose they are, found {text[:60]!r}, of "
                       f"which {unknown[:40]} is not understood")


def two_bytes(
    record: Record, *, default: str, reduce: str, assumed: Assumed, or_one: bool = False
) -> Dtypes:
    """The row's dtypes where products are in two bytes; RowError for other products.

    Reductions are in `reduce` where it does not say, but in what products are in where that is the
    other dtype of two bytes. Some products may be in 8 bits where `or_one`, all others being in the
    `default` where the row names none.
    """
    words = record.text("precision", default)
    found = dtypes(words)
    if or_one and found.compute == "fp8":
        found = replace(found, compute=dtypes(default).compute)
    if found.compute not in ("bf16", "fp16") or (found.eight_bits and not or_one):
        raise RowError(f"precision: expected products in bf16 or fp16, found {words[:60]!r}")
    if found.reduce not in ("", found.compute, "fp32"):
        raise RowError(f"precision: expected reductions in {found.compute} or fp32, found "
                       f"{words[:60]!r}")
    if found.compute == "fp16" != dtypes(default).compute:
        assumed.add("without its scaler of gradients", widens=WITHOUT_SCALER)
    if found.reduce:
        return found
    follows = reduce not in (found.compute, "fp32")
    if follows:
        assumed.add(f"reductions in {found.compute}, as its products, for the row does not say")
    else:
        assumed.add(f"reductions in {reduce}, as the source has them, for the row does not say")
    return replace(found, reduce=found.compute if follows else reduce)
