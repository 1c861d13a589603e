"""Recipes of float8 training, as torchao and torchtitan name them: whether a cell says that linears
multiply in 8 bits, and how."""

from __future__ import annotations

import re

from zsim.calibration.rows.checks import DTYPES, NOTHING
from zsim.calibration.rows.records import FALSE, TRUE, RowError

NAMES = frozenset(
    (
        *(
            "float8", "fp8", "e4m3", "e5m2", "tensorwise", "rowwise", "axiswise", "blockwise",
            "groupwise", "tensor", "row", "rows", "axis",
        ),
        *(
            "block", "blocks", "group", "dynamic", "delayed", "static", "current", "mx", "mxfp8",
            "nvfp4", "mxfp4", "fp4",
        ),
    )
)
"""Words of which a recipe has at least one: the dtype, what shares a scale, or when scales are
found."""
FILLERS = frozenset(
    (
        *(
            "wise", "per", "with", "and", "in", "for", "of", "the", "no", "not", "without", "only",
            "recipe", "scale", "scales", "scaled",
        ),
        *(
            "scaling", "gw", "hp", "high", "precision", "bf16", "bfloat16", "fsdp", "all",
            "allgather", "allgathers", "gather", "gathers",
        ),
        *(
            "linear", "linears", "matmul", "matmuls", "gemm", "gemms", "compute", "training",
            "torchao", "enable", "enabled", "cublas",
        ),
        *(
            "rceil", "precompute", "precomputed", "e4m3fn", "mixed", "hybrid", "32", "128", "1x128",
            "128x128", "1x32",
        ),
    )
)
"""And those that change nothing beside it, or that are read one by one."""
DENIALS = frozenset(("no", "not", "without"))
_ANSWER = re.compile(
    r"(true|yes|on|enabled|false|no|off|disabled)\s*(?:[,:;-]\s*|(?=\())(?:\(([^()]*)\)|([^()]*))"
)


def is_narrow(recipe: str) -> bool | None:
    """Whether the cell `recipe`, in lower case, turns float8 on; None where it says nothing,
    RowError where nobody knows."""
    if recipe in TRUE:
        return True
    if answer := _ANSWER.fullmatch(recipe):
        return _answered(answer[1], (answer[2] or answer[3] or "").strip(), recipe)
    if (
        recipe in FALSE
        or DTYPES.get(recipe, "fp8") != "fp8"
        or re.fullmatch(r"(?:no|not|without|w/o)[-_ ]+(?:float|fp)8", recipe)
    ):
        return False
    if recipe in NOTHING:
        return None
    recipe = recipe.replace("w/o", "without")
    tokens = set(re.findall(r"[a-z0-9]+", recipe))
    denied = re.match(r"(?:no|not|non|without)\b", recipe)
    if (
        denied
        or re.search(r"[^\w\s,;:+/()&.-]", recipe)
        or not tokens & NAMES
        or tokens - NAMES - FILLERS
    ):
        raise RowError(f"float8: expected True, False or a recipe as tensorwise or rowwise, found "
                       f"{recipe[:40]!r}")
    return True


def _answered(answer: str, remark: str, recipe: str) -> bool:
    """A yes with its recipe, as "True (dynamic)", or a no with another dtype; RowError where one
    contradicts the other."""
    found = is_narrow(remark)
    if found is not None and found is not (answer in TRUE):
        raise RowError(f"float8: {remark[:20]} contradicts {answer}, found {recipe[:40]!r}")
    return answer in TRUE


def gathers_narrow(recipe: str) -> bool:
    """Whether words of a recipe say that parameters are gathered in 8 bits too."""
    denied = r"(\b(?:no|not|without|w/o|bf16|bfloat16)\b[-_ a-z0-9]{0,20})?"
    said_so = re.search(rf"{denied}(?<![a-z])all[-_ ]?gathers?\b", recipe)
    return said_so is not None and not said_so[1]
