"""Errors in the words of the command line: names of options for the arguments of Python."""

from __future__ import annotations

import re

from zsim.errors import ZsimError

OPTIONS = {
    "ranks": "--ranks", "all_ranks": "--all-ranks", "interpreter": "--interpreter",
    "timeout_s": "--timeout",
    "numerics": "--numerics",
}
_ARGUMENT = re.compile(
    r"^(ranks|interpreter|numerics)(?=:)|(?<![\w/.-])(all_ranks|timeout_s)(?![\w/.-])"
)
"""An argument's name: as the place of the error, or one that is no word of any other sentence."""


def said(error: ZsimError) -> str:
    """The text of `error` for a user of the command line."""
    return _ARGUMENT.sub(lambda match: OPTIONS[match[0]], str(error))
