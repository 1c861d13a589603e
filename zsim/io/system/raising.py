"""The line of code that raised an error: the user's own, where theirs called what failed."""

from __future__ import annotations

import importlib
import sysconfig
import traceback
from pathlib import Path

OURS = tuple(str(Path(__file__).parents[3] / package) + "/" for package in ("zreal", "zsim"))
LIBRARIES = tuple({sysconfig.get_path(name) + "/" for name in ("stdlib", "purelib", "platlib")})


def is_ours(file: str) -> bool:
    """True for a file of zsim or zreal, and of Python's import."""
    return file.startswith((*OURS, "<frozen importlib", importlib.__file__))


def is_users(file: str) -> bool:
    """True for a file that is neither ours nor an installed library's."""
    return not is_ours(file) and not file.startswith(LIBRARIES)


def raising_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost frame of the user's code, else of all; None for an error without frames."""
    frames = list(traceback.extract_tb(error.__traceback__))
    own = [frame for frame in frames if is_users(frame.filename)]
    return next(iter((own or frames)[-1:]), None)
