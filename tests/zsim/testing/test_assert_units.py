"""Units asserted by name: missing ones, others, and those that stand elsewhere."""

import pytest

import zsim
import zsim.testing
from tests.support.folders import ROOT

MLP = zsim.load(ROOT / "scenarios/parity/fsdp2-mlp-4.toml")
UNITS = [unit.fqn for unit in MLP.model.units]


@pytest.mark.parametrize("subject", [MLP, MLP.model, zsim.simulate(MLP)], ids=["s", "m", "r"])
def test_the_units_of_a_scenario_a_model_and_a_run(subject):
    zsim.testing.assert_units(subject, UNITS)
    zsim.testing.assert_units(subject, tuple(UNITS))


@pytest.mark.parametrize(
    ("expected", "told"),
    [
        ([*UNITS[:-1], "blocks.9"], [
            f"units: expected {len(UNITS)}, found {len(UNITS)}", "  missing       blocks.9",
            f"  not expected  {UNITS[-1]:<18} {MLP.model.units[-1].numel:>6,} elements",
        ]),
        (UNITS[::-1], [
            f"units: expected {len(UNITS)}, found {len(UNITS)}",
            f"  in another order from number 0: expected {UNITS[-1]}, found {UNITS[0]}",
        ]),
        ([*UNITS, UNITS[-1]], [
            f"units: expected {len(UNITS) + 1}, found {len(UNITS)}",
            "  some of them are expected twice",
        ]),
    ],
    ids=["another", "order", "twice"],
)
def test_differences_are_told_by_unit(expected, told):
    with pytest.raises(AssertionError) as caught:
        zsim.testing.assert_units(MLP, expected)
    assert str(caught.value).splitlines() == told


def test_long_differences_are_cut():
    with pytest.raises(AssertionError) as caught:
        zsim.testing.assert_units(MLP, [f"layers.{index}" for index in range(40)])
    lines = str(caught.value).splitlines()
    assert len(lines) == 14
    assert lines[-1] == f"  … and {40 + len(UNITS) - 12} more"


def test_what_is_no_scenario_or_no_list_is_refused():
    with pytest.raises(zsim.ArgumentError, match="expected a Scenario, a Run or a model of one, "
                                                 "found an object; of your own module"):
        zsim.testing.assert_units(object(), ["root"])
    for wrong in ("root", [3]):
        with pytest.raises(zsim.ArgumentError, match="expected fqns in a list"):
            zsim.testing.assert_units(MLP, wrong)
