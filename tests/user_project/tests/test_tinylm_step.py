"""The step on eight GPUs, simulated, and of our own module on two ranks."""

import pytest

import zsim
from zsim.testing import assert_units

EIGHT, TWO = "../scenarios/eight-gpus.toml", "../scenarios/two-ranks.toml"


@pytest.mark.zero(scenario=EIGHT, backend="sim")
def test_communication_hides_behind_compute(zero):
    run = zero.run()
    assert run.exposed_communication.fraction < 0.1
    assert run.peak_memory <= zsim.GiB(20)


@pytest.mark.zero(scenario=TWO, backend="fake")
def test_our_module_does_what_is_predicted(zero, compare):
    run = zero.run(module="tinylm.model:build")
    assert_units(run, ["root", "blocks.0", "blocks.1", "blocks.2"])
    compare(run)


@pytest.mark.zero(scenario=TWO, backend="sim")
def test_our_collectives_are_those_of_the_golden_file(zero):
    zero.golden(zero.run(module="tinylm.model:build"))
