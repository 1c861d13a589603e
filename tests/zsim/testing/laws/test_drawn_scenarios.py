"""Public hypothesis strategies: draws are legal, awkward, and shrink to small scenarios."""

from __future__ import annotations

import re

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

import zsim
from tests.support.cases.sampling import one_in
from tests.support.folders import PARITY
from zsim.ir.mesh import Mesh
from zsim.ir.program import Program
from zsim.models.spec import ROOT
from zsim.testing import strategies
from zsim.testing.strategies.sizes import DrawnParameter
from zsim.testing.strategies.tables import STRATEGIES

QUIET = settings(max_examples=2000, phases=[Phase.generate, Phase.shrink], database=None)


@pytest.mark.parametrize("name", one_in(2, STRATEGIES))
def test_each_strategy_is_drawn_and_shrinks_to_a_small_scenario(name: str) -> None:
    small = find(strategies.scenarios(), lambda scenario: scenario.strategy == name, settings=QUIET)
    assert len(small.model.blocks) == 1
    assert small.world_size <= 2
    assert small.batch.accumulation == 1


def test_a_property_that_never_holds_shrinks_to_the_plainest_scenario() -> None:
    small = find(strategies.scenarios(), lambda scenario: True, settings=QUIET)
    assert (small.strategy, small.world_size, small.batch.accumulation) == ("single", 1, 1)
    assert 'family = "mlp"' in small.to_toml()
    assert 'parameters = "fp32"' in small.to_toml()


def test_awkward_shapes_are_drawn() -> None:
    shapes = strategies.shapes(world=8)
    for awkward in (lambda s: s[0] == 0, lambda s: s[0] == 1, lambda s: s[0] < 8,
                    lambda s: s[0] == 9, lambda s: s[0] % 8 == 0 and s[0] > 0):
        assert awkward(find(shapes, awkward, settings=QUIET))


def test_tied_parameters_are_drawn() -> None:
    def tied(drawn: tuple[DrawnParameter, ...]) -> bool:
        return any(parameter.tied_to for parameter in drawn)

    drawn = find(strategies.parameters(), tied, settings=QUIET)
    by_name = {parameter.name: parameter for parameter in drawn}
    assert all(
        by_name[parameter.tied_to].shape == parameter.shape
        for parameter in drawn if parameter.tied_to
    )


@given(strategies.meshes(12), strategies.unit_trees())
def test_meshes_and_unit_trees_are_whole(mesh: Mesh, tree: dict[str, tuple[str, ...]]) -> None:
    assert mesh.world_size <= 12
    inside = [name for names in tree.values() for name in names]
    assert sorted([ROOT, *inside]) == sorted(tree)


@settings(max_examples=5)
@given(strategies.programs())
def test_a_programs_repr_is_short_as_hypothesis_and_pytest_print_it(program: Program) -> None:
    assert re.fullmatch(r"<Program: \d ranks, \d+ apart, [\d,]+ ops in a step; .*>", repr(program))


def test_the_kinds_of_fault_with_which_a_step_ends_are_public() -> None:
    plans = strategies.fault_plans(zsim.load(PARITY / "ddp-mlp-2.toml"), kinds=strategies.DELAYING)
    stopping = find(plans, lambda plan: len(plan) > 1, settings=QUIET)
    assert {table["kind"] for table in stopping} <= {*strategies.DELAYING}


def test_a_failing_example_is_printed_as_a_scenario_file(
    capsys: pytest.CaptureFixture[str]
) -> None:
    @settings(max_examples=1, phases=[Phase.generate], database=None, print_blob=False)
    @given(strategies.scenarios(strategies=("zero3",)), st.integers(0, 1))
    def fails(scenario: zsim.Scenario, number: int) -> None:
        raise AssertionError

    with pytest.raises(AssertionError) as caught:
        fails()
    told = "\n".join(caught.value.__notes__)
    text = told.partition("as a scenario file:\n")[2]
    assert text.startswith('model = { family = ')
    assert 'strategy = { name = "zero3"' in text
