"""A machine's constants: recovered from steps made of known ones, and a step's time is the sum that
the fit takes it for."""

from dataclasses import replace

import pytest

from zsim.calibration.machine import fit as fitting
from zsim.calibration.machine import machine_file
from zsim.calibration.machine.attention_fit import KINDS, attention_rate
from zsim.calibration.machine.fit import TERMS, MachineError, fit
from zsim.calibration.machine.request import request
from zsim.cluster.devices import AttentionRate
from zsim.cluster.measured_times import MeasuredTimes
from zsim.engine.costs.issue_times import TICK_NS
from zsim.engine.costs.kernel_time import product_s
from zsim.engine.costs.op_costs import Costs
from zsim.engine.simulate_step import simulate_step
from zsim.runs.backend import MachineMeasurements
from zsim.scenario.parts import cluster_file

ASKED = request(2, quick=True)
TRUE = dict(zip(TERMS, (0.8, 1.4, 2.0, 9_000.0, 60_000.0, 90_000.0, 150_000.0), strict=True))
WAKE = 900_000
"""Nanoseconds that collectives wait for a core after a tick of compute."""
LOST = 80
"""Percent of a collective's time that compute beside it loses."""


DEVICE = fitting.scaled(ASKED.scenarios[0].cluster.device, TRUE)
PROGRAMS = fitting._programs(ASKED)


RATE = AttentionRate(rate=40 * 10**9, half_length=60, backward=0.9)
DEVICE = replace(DEVICE, attention=dict.fromkeys(KINDS, RATE))


def attention_ns(batch, heads, tokens, width, *, backward):
    """Causal attention at RATE: two products of two FLOPs for half of the scores, or five."""
    flops = batch * heads * tokens**2 * width * (5 if backward else 2)
    rate = RATE.rate * tokens / (tokens + RATE.half_length) * (RATE.backward if backward else 1)
    return flops / rate * 1e9


def step_ns_of(scenario, program):
    """The step on DEVICE with the calls of TRUE, in nanoseconds."""
    device = [1.0, 1.0, 1.0]
    calls = [TRUE[name] for name in fitting.CALLS]
    return fitting.total([*device, *calls], fitting._terms(scenario, program, DEVICE))


def measured(*, spread=0.0):
    """Steps and products on DEVICE, and collectives of 100 us and 1 ns a byte that wait for a core.
    """
    steps = [step_ns_of(scenario, program) for scenario, program in PROGRAMS]
    return MachineMeasurements(
        steps=tuple(
            tuple(round(step * (1 + spread * turn)) for turn in (-1, -0.5, 0, 0.5, 1))
            for step in steps
        ),
        collectives=tuple(
            (
                LOST * (100_000 + each.nbytes) // 100 if each.beside else
                100_000 + each.nbytes + WAKE * (each.computed_ns == TICK_NS),
            ) * 3
            for each in ASKED.collectives
        ),
        products=tuple(
            (round(1e9 * product_s((1, *shape), DEVICE, "float32")),) for shape in ASKED.products
        ),
        attentions=tuple(
            (round(attention_ns(*shape, backward=backward)),)
            for shape in ASKED.attentions for backward in (False, True)
        ),
        provenance={},
    )


def test_known_constants_are_recovered():
    fitted = fit(ASKED, measured())
    assert fitted.calls == pytest.approx({name: TRUE[name] for name in fitting.CALLS}, rel=0.02)
    for name in ("memory_bandwidth", "memory_efficiency", "elementwise_efficiency", "float32"):
        assert getattr(fitted.device, name) == pytest.approx(getattr(DEVICE, name), rel=0.02)
    assert max(map(abs, fitted.errors)) < 0.02
    assert (fitted.width, fitted.busy) == (0.08, "")
    assert fitted.wake == WAKE
    attention = fitted.device.attention["flash2"]
    assert attention.rate == pytest.approx(RATE.rate, rel=1e-3)
    assert attention.half_length == RATE.half_length
    assert attention.backward == pytest.approx(RATE.backward, rel=1e-3)
    assert fitted.device.interference == pytest.approx(LOST / 100, rel=1e-3)


def test_a_busy_machine_is_told_and_has_a_band_as_wide():
    fitted = fit(ASKED, measured(spread=0.6))
    assert fitted.busy.startswith("equal steps differ by ")
    assert fitted.width >= 0.5
    loaded = fit(ASKED, replace(measured(), others_share=0.4))
    assert loaded.busy == "other work took 40% of this machine's cores"
    assert loaded.width == 0.4
    assert all(each.width == 0.4 for each in loaded.times)
    text = machine_file.text(loaded, world_size=2, date="2026-01-01", seconds=1.0)
    assert "# doubtful: other work took 40% of this machine's cores meanwhile, so the band is 40%" \
        in text


def test_missing_measurements_are_no_machine():
    whole = measured()
    with pytest.raises(MachineError, match="some are missing"):
        fit(ASKED, replace(whole, collectives=(*whole.collectives[1:], ())))


@pytest.mark.parametrize("strategy", sorted({s.strategy for s in ASKED.scenarios}))
def test_a_step_without_communication_is_simulated_as_the_sum_of_its_parts(tmp_path, strategy):
    """The fit takes a step for a sum; the engine, with the file of that fit, makes the same sum."""
    fitted = fit(ASKED, measured())
    nothing = tuple(replace(each, points=((1, 1), (2**30, 2))) for each in fitted.times)
    path = tmp_path / "machine.toml"
    path.write_text(machine_file.text(
        replace(fitted, times=nothing, wake=0), world_size=2, date="2026-01-01", seconds=1.0
    ))
    cluster = cluster_file.load(str(path), folder=None, nodes=1, ranks=2)
    for scenario, program in (each for each in PROGRAMS if each[0].strategy == strategy):
        costs = Costs(cluster=cluster, execution=scenario.executed_on(cluster))
        simulated = simulate_step(program, costs=costs).step_time_ns
        assert simulated == pytest.approx(step_ns_of(scenario, program), rel=0.01), scenario


def test_the_file_says_what_was_measured(tmp_path):
    fitted = fit(ASKED, measured())
    text = machine_file.text(fitted, world_size=2, date="2026-01-01", seconds=1.0)
    assert text.startswith("# calibrated on ")
    cluster = cluster_file.parse(text.encode(), where="machine.toml", ranks=2)
    (gathers,) = (each for each in cluster.times if each.collective == "all_gather")
    assert gathers == MeasuredTimes(
        collective="all_gather", ranks=2, width=0.08, source=gathers.source,
        points=tuple((n, 100_000 + n) for n in (2**9, 2**15, 2**19, 2**23)),
    )
    assert {
        figure.provenance for figure in cluster.device.figures
        if figure.key in ("device.matmul_efficiency", "device.memory_efficiency")
    } == {"calibrated"}


def test_attention_is_no_faster_than_products_and_grows_with_its_length_or_not_at_all():
    shapes = [(1, 1, tokens, 32) for tokens in (32, 64, 128)]
    as_long = attention_rate(shapes, [(1_000_000,)] * 6, most=10**6)
    assert (as_long.rate, as_long.backward) == (10**6, 1.0)
    by_scores = [(1000 * tokens**2,) for _, _, tokens, _ in shapes for _ in range(2)]
    assert attention_rate(shapes, by_scores, most=10**12).half_length == 1


def test_times_that_fall_with_the_size_share_their_mean():
    points = [(1, 100, 0.0), (2, 80, 0.0), (4, 120, 0.0)]
    assert fitting.growing(points) == [(1, 90), (2, 90), (4, 120)]
