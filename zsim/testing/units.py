"""Units of a scenario's model, asserted by name: the wrapping that a test takes for granted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zsim.errors import ArgumentError
from zsim.io.arguments import described
from zsim.models.spec import ModelSpec, ParamGroup
from zsim.runs.run import Run
from zsim.scenario.scenario import Scenario

__tracebackhide__ = True  # reports of pytest end at the user's own line
MOST_LISTED = 12


def assert_units(subject: Run | Scenario | ModelSpec, expected: Sequence[str]) -> None:
    """AssertionError where the units are others than `expected`, or in another order.

    They are fqns in forward order, "root" first. Your own module has those that it was traced with.

    >>> from zsim.scenario.scenario import load
    >>> assert_units(load("scenarios/parity/fsdp2-mlp-4.toml"), ["root", "blocks.0", "blocks.1"])
    Traceback (most recent call last):
        ...
    AssertionError: units: expected 3, found 4
      not expected  blocks.2            8,352 elements
    """
    units = _units(subject)
    if isinstance(expected, str) or not all(isinstance(name, str) for name in expected):
        raise ArgumentError(
            where="assert_units: expected", expected='fqns in a list, as ["root", "blocks.0"]',
            found=described(expected),
        )
    if [unit.fqn for unit in units] != [*expected]:
        raise AssertionError("\n".join(_differences(units, expected)))


def _units(subject: object) -> tuple[ParamGroup, ...]:
    if isinstance(subject, Run):
        subject = subject.scenario
    model = subject.model if isinstance(subject, Scenario) else subject
    if not isinstance(model, ModelSpec):
        raise ArgumentError(
            where="assert_units", expected="a Scenario, a Run or a model of one",
            found=described(model),
            remedy='of your own module it is that of zero.run(module="mypackage.mymodel:build")',
        )
    return model.units


def _differences(units: Sequence[ParamGroup], expected: Sequence[str]) -> Iterator[str]:
    """Lines on units that are missing, on others, or on the first that stands elsewhere."""
    names = [unit.fqn for unit in units]
    yield f"units: expected {len(expected):,}, found {len(units):,}"
    lines = [f"  missing       {name}" for name in expected if name not in names]
    lines += [
        f"  not expected  {unit.fqn:<18} {unit.numel:>6,} elements"
        for unit in units if unit.fqn not in expected
    ]
    if not lines:
        pairs = enumerate(zip(names, expected, strict=False))
        lines = [
            f"  in another order from number {index}: expected {there}, found {name}"
            for index, (name, there) in pairs if name != there
        ][:1] or ["  some of them are expected twice"]
    yield from lines[:MOST_LISTED]
    if len(lines) > MOST_LISTED:
        yield f"  … and {len(lines) - MOST_LISTED:,} more"
