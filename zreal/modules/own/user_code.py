"""Errors of a user's own code: the line that raised it, and the traceback without our frames."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from zsim.errors import ArgumentError, ZsimError
from zsim.io.system.raising import is_ours, is_users
from zsim.io.system.signals import TimeIsUp, limited

MOST_CHARS = 4000
"""Longest traceback that a message has."""


class UserCodeError(ArgumentError):
    """The user's own code made no module; `details` is the traceback of its error."""


def user_code_error(
    name: str, expected: str, error: BaseException, *, remedy: str = "", code: object = None
) -> UserCodeError:
    """The `error` that the user's code behind `name` raised, in one line with file and line.

    They are those of `code` where no line of the user's raised it.
    """
    first = (str(error).strip().splitlines() or [""])[0][:200]
    raised = UserCodeError(
        where=f"module {name[:60]}", expected=expected,
        found=f"{type(error).__name__}: {first}{_location(error, code)}", remedy=remedy,
    )
    raised.details = _traceback(error)
    return raised


def not_in_time(name: str, seconds: float, location: str) -> UserCodeError:
    """The user's code behind `name` has not ended within so many seconds."""
    return UserCodeError(
        where=f"module {name[:60]}", expected=f"a module that is built within {seconds:g} s",
        found=f"none yet{location}", remedy="raise timeout_s if it is only slow",
    )


@contextmanager
def within(seconds: float, name: str) -> Iterator[None]:
    """Context manager around the user's code behind `name`: UserCodeError, with the line that it is
    at, where it does not end in time.

    A command line whose main thread is in a call that no signal ends says so and exits.
    """
    try:
        with limited(seconds, stuck=lambda: _exit(not_in_time(name, seconds, current_location()))):
            yield
    except TimeIsUp as error:
        late = not_in_time(name, seconds, _location(error, None))
        late.details = _traceback(error)
        raise late from None


def current_location() -> str:
    """File and line that the main thread is at, as `user_code_error` has them."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return _innermost(list(traceback.extract_stack(frame)), None)


def _exit(error: UserCodeError) -> None:
    sys.stderr.write(f"zsim: {error}\n".replace("timeout_s", "--timeout"))
    sys.stderr.flush()
    os._exit(error.exit_code)


def add_location(error: ZsimError, code: object) -> None:
    """Add file and line, and the traceback, to an `error` of ours that one of the user's caused."""
    cause = error.__cause__
    if cause is not None and not isinstance(cause, ZsimError):
        # where ours took its place beneath the user's code, ours alone has the user's frames
        frames = [*_frames(error), *_frames(cause)]
        error.found += _location(cause, code, frames)
        while frames and not is_users(frames[-1].filename):
            del frames[-1]
        error.details = _traceback(cause, frames or _frames(cause))


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    return list(traceback.extract_tb(error.__traceback__))


def _location(
    error: BaseException, code: object, frames: list[traceback.FrameSummary] | None = None
) -> str:
    """File and line of the innermost frame of the user's code, else those of `code`, else of the
    library that failed; "" where there is none. Frames are those of `error` by default."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}, line {error.lineno})"
    return _innermost(_frames(error) if frames is None else frames, code)


def _innermost(stack: list[traceback.FrameSummary], code: object) -> str:
    frames = [each for each in stack if not is_ours(each.filename)]
    own = [each for each in frames if is_users(each.filename)]
    if not own and (defined_at := _defined_at(code)):
        return f" ({defined_at})"
    for last in (own or frames)[-1:]:
        return f" ({last.filename}, line {last.lineno}, in {last.name})"
    return ""


def _defined_at(code: object) -> str:
    """File and line of a function; "" of anything else."""
    known = getattr(code, "__code__", None)
    return f"{known.co_filename}, line {known.co_firstlineno}" if known else ""


def _traceback(
    error: BaseException, frames: list[traceback.FrameSummary] | None = None
) -> str:
    """The traceback from the first to the last frame that is not ours; "" where it would say one
    line alone, which the message has. Frames are those of `error` by default."""
    frames = _frames(error) if frames is None else frames
    while frames and is_ours(frames[0].filename):
        del frames[0]
    while frames and is_ours(frames[-1].filename):
        del frames[-1]
    tail = [] if isinstance(error, TimeIsUp) else traceback.format_exception_only(error)
    head = ["Traceback (most recent call last):\n"] if frames else []
    text = "".join([*head, *traceback.format_list(frames), *tail]).rstrip()
    text = text if "\n" in text else ""
    return text if len(text) <= MOST_CHARS else f"…{text[-MOST_CHARS:]}"
