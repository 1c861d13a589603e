"""The nearest known word in place of an unknown one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

OTHER_TOOLS = {
    "param_dtype": "parameters", "reduce_dtype": "reduce", "lr": "learning_rate",
    "batch_size": "micro_batch", "seq_len": "sequence_length", "max_grad_norm": "clip_norm",
    "gradient_accumulation_steps": "accumulation",
}
"""Keys of scenarios by the names that other tools have for them."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a complaint about `word`: the nearest of the `known` words, or all of them."""
    alike = {str(name).lower(): name for name in known}
    near = difflib.get_close_matches(OTHER_TOOLS.get(word, word).lower(), alike, n=1)
    if near:
        return f", did you mean {alike[near[0]]}?"
    return f"; known are {', '.join(known)}" if known else ""
