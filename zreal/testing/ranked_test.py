"""A test with the marker `ranks`, run by the controller on new ranks: once, or for each example of
hypothesis. Their output becomes sections of its report."""

from __future__ import annotations

import builtins
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any, cast

import pytest

from zreal.testing.judgement import output
from zreal.testing.judgement.verdict import RanksFailed
from zreal.testing.ranks import Ranks
from zreal.testing.requirements import devices_alone
from zreal.testing.session import session_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Folder in which the output of ranks is kept, and of what tests: failed, all or none."""

    folder: Path | None
    of: str


def run(
    item: pytest.Function, *, world_size: int, backend: Any, timeout_s: float, kept: Kept
) -> None:
    """Run the test on ranks; pytest's outcomes for failure, skip and xfail."""
    session = session_of(
        item.config, item.path, item.nodeid.partition("::")[2],
        tmp_path=cast(Path | None, item.funcargs.get("tmp_path")),
    )
    item.user_properties += [("world_size", world_size), ("backend", backend)]
    folders = cast(pytest.TempPathFactory, item.funcargs["tmp_path_factory"])
    ranks = Ranks(
        world_size=world_size, backend=backend, timeout_s=timeout_s, session=session,
        folder=folders.mktemp("ranks"),
    )
    with devices_alone(backend), ranks, _reported(item, ranks, kept):
        ranks.start()
        if hasattr(item.obj, "hypothesis"):
            _run_examples(item, ranks)
        else:
            ranks.call({})
        ranks.finish()


@contextmanager
def _reported(item: pytest.Item, ranks: Ranks, kept: Kept) -> Iterator[None]:
    """Turn failures into pytest's, and add what the ranks have printed."""
    failed = True
    try:
        yield
        failed = False
    except RanksFailed as failure:
        notes = getattr(failure, "__notes__", ())
        raise pytest.fail.Exception("\n".join([str(failure), *notes]), pytrace=False) from None
    except pytest.xfail.Exception:
        raise
    except pytest.fail.Exception as limit:  # pytest-timeout's, while ranks start
        raise pytest.fail.Exception(f"before the test: {limit.msg}", pytrace=False) from None
    finally:
        ranks.end()
        for title, text in output.sections(ranks.folder, ranks.world_size):
            item.add_report_section("call", title, text)
        if kept.folder is not None and (kept.of == "all" or (failed and kept.of == "failed")):
            output.keep(ranks.folder, ranks.world_size, target=kept.folder)
    try:
        _warn(ranks)
    except Warning as warning:  # warnings are errors there
        text = f"{type(warning).__name__}: {warning}"
        raise pytest.fail.Exception(text, pytrace=False) from None


def _run_examples(item: pytest.Function, ranks: Ranks) -> None:
    """Let hypothesis draw here, and all ranks run the body with the same values."""
    handle = item.obj.hypothesis
    body = handle.inner_test
    parameters = signature(item.obj).parameters
    arguments = list(signature(body).parameters)[item.instance is not None :]
    drawn = {*arguments} - parameters.keys()
    _judged_by_values(item.obj)

    @wraps(body)
    def example(*_: object, **values: object) -> None:
        chosen = {name: value for name, value in values.items() if name in drawn}
        ranks.call(chosen, is_example=True)

    handle.inner_test = example
    try:
        item.obj(**{name: _value(item, name) for name in parameters})
    finally:
        handle.inner_test = body


def _value(item: pytest.Function, name: str) -> object:
    """The parameter of a test, or the name of a fixture that ranks have."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return parameters.get(name, Named(name))


class Named(str):
    """A name that is shown without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def _judged_by_values(test: Any) -> None:
    """Leave out what hypothesis judges of this process: its default deadline, and the lines that
    only failing examples run."""
    from hypothesis import Phase, settings  # the test has imported it

    function = getattr(test, "__func__", test)
    default: Any = settings.default
    chosen = getattr(function, "_hypothesis_internal_use_settings", default) or default
    deadline = None if chosen.deadline == default.deadline else chosen.deadline
    phases = [phase for phase in chosen.phases if phase != Phase.explain]
    function._hypothesis_internal_use_settings = settings(chosen, deadline=deadline, phases=phases)


def _warn(ranks: Ranks) -> None:
    """Repeat the ranks' warnings, and warn of processes that they have left."""
    for text, name, file, line in ranks.warnings:
        kind = getattr(builtins, name, UserWarning)
        warnings.warn_explicit(text, kind, file, line)
    for command in dict.fromkeys(ranks.left):
        warnings.warn(
            f"a rank left a process behind, which was ended: {command[:200]}", pytest.PytestWarning,
            stacklevel=1,
        )
