"""The line that says why a rank failed."""

from __future__ import annotations

LAST_ERROR = "Last error:"
"""Heading under which torch puts what NCCL says of an error."""


def error_line(text: str) -> str:
    """The first line of an error's text, with NCCL's own reason where torch tells it further down.

    >>> error_line("NCCL error in: file.cpp:93\\nncclInvalidUsage: …\\nLast error:\\nDuplicate GPU")
    'NCCL error in: file.cpp:93: Duplicate GPU'
    """
    lines = [line.strip() for line in text.strip().splitlines()]
    reason = lines[lines.index(LAST_ERROR) + 1 :][:1] if LAST_ERROR in lines else []
    return ": ".join([*lines[:1], *filter(None, reason)])
