"""Step times under jitter: mean and quantiles over seeds.

Beside them stands the largest of all ranks' delays in closed form, by which steps grow with the
number of ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, sqrt
from statistics import fmean, stdev
from typing import Any

from zsim.engine.costs.op_costs import Costs
from zsim.engine.faults.draws import expected_largest
from zsim.engine.faults.fault import Fault, Jitter
from zsim.engine.faults.faulty_program import faulty_program
from zsim.engine.faulty_step import simulate_faulty_step
from zsim.engine.simulate_step import faulty_timeline, is_by_columns, prepared_step, simulate_step
from zsim.errors import ArgumentError
from zsim.io.arguments import described
from zsim.io.units import counted, format_time
from zsim.ir.gc_pause import uncollected
from zsim.memory.full_device import filled
from zsim.scenario.plan import planned
from zsim.scenario.scenario import Scenario
from zsim.scenario.scenario_argument import require_scenario

MOST_SEEDS = 10_000
SHARES = (0.5, 0.95, 0.99)
"""Quantiles that are shown."""
MOST_WORK = 6_000_000
"""Ranks × param groups × micro-batches × seeds: minutes of work."""
MOST_BY_COLUMNS = 24_000_000
"""The same for ranks that are simulated by columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JitteredSteps:
    """Times of a scenario's steady step under its jitter, one of each seed, in ns.

    `clean_ns` is the time without any fault. `largest_ns` is the closed form of the mean: the clean
    time and the expected largest of all ranks' delays. None where delays are of single ops, whose
    largest add up as far as nothing hides them.
    """

    scenario: Scenario
    first_seed: int
    clean_ns: int
    times_ns: tuple[int, ...]
    largest_ns: float | None

    @property
    def mean_ns(self) -> float:
        """The mean over seeds."""
        return fmean(self.times_ns)

    @property
    def error_ns(self) -> float:
        """The standard error of the mean; 0 for one seed."""
        number = len(self.times_ns)
        return stdev(self.times_ns) / sqrt(number) if number > 1 else 0.0

    def quantile_ns(self, share: float) -> int:
        """The smallest time that is not exceeded in this share of the seeds."""
        if not 0 < share <= 1:
            raise ArgumentError(
                where="share", expected="above 0 and up to 1", found=described(share)
            )
        return sorted(self.times_ns)[ceil(share * len(self.times_ns)) - 1]

    def rows(self) -> Iterator[tuple[str, str]]:
        """Names and values of a table."""
        yield "clean step", format_time(self.clean_ns)
        mean, error = round(self.mean_ns), round(self.error_ns)
        yield "mean", f"{format_time(mean)} ± {format_time(error)}"
        for share in SHARES:
            yield f"{share:.0%} within", format_time(self.quantile_ns(share))
        yield "longest", format_time(max(self.times_ns))
        if self.largest_ns is not None:
            ranks = counted(self.scenario.world_size, "rank")
            yield "closed form", f"{format_time(round(self.largest_ns))}, the largest of {ranks}"

    def __str__(self) -> str:
        seeds = counted(len(self.times_ns), "seed")
        width = max(len(name) for name, _ in self.rows())
        return "\n".join([
            f"step of {self.scenario.name} under jitter, {seeds} from {self.first_seed} on",
            *(f"  {name:{width}}  {value}" for name, value in self.rows()),
        ])

    def to_dict(self) -> dict[str, Any]:
        """The object of `zsim run --seeds --json`; its keys are stable."""
        return {
            "scenario": self.scenario.name, "world_size": self.scenario.world_size,
            "faults": list(map(str, self.scenario.faults)), "first_seed": self.first_seed,
            "seeds": len(self.times_ns), "clean_step_ns": self.clean_ns, "mean_ns": self.mean_ns,
            "error_ns": self.error_ns,
            "quantiles_ns": {f"{share:g}": self.quantile_ns(share) for share in SHARES},
            "longest_ns": max(self.times_ns), "closed_form_ns": self.largest_ns,
            "times_ns": list(self.times_ns),
        }

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)


@uncollected()
def jitter(scenario: Scenario, *, seeds: int = 200) -> JitteredSteps:
    """Times of the steady step with the scenario's jitter, over so many seeds from its own on.

    ArgumentError for a scenario without a jitter among its `faults`, and for more seeds than
    minutes of work. DeadlockError where another fault keeps the step from ending, or a rank fails.

    >>> from zsim.scenario.scenario import load
    >>> fault = {"kind": "jitter", "mean": "1 ms"}
    >>> steps = jitter(load("scenarios/parity/ddp-mlp-2.toml").with_(faults=[fault]), seeds=50)
    >>> steps.clean_ns < steps.quantile_ns(0.5) < steps.quantile_ns(0.99)
    True
    """
    require_scenario(scenario)
    first = _jitter_of(scenario, seeds)
    case = filled(planned(scenario))
    costs = Costs(cluster=scenario.cluster, execution=scenario.executed)
    program = faulty_program(case.program, scenario.faults)
    prepared = prepared_step(program, costs=costs)
    if not is_by_columns(prepared):
        _require_few(scenario, seeds, most=MOST_WORK)
    simulate_faulty_step(case.program, scenario.faults, costs=costs)  # raises where it cannot end
    if prepared.rings is not None:
        prepared.rings.require_few(seeds)
    times = [
        faulty_timeline(prepared, _with_seed(scenario, seed), costs=costs).step_time_ns
        for seed in range(first.seed, first.seed + seeds)
    ]
    clean = simulate_step(case.program, costs=costs).step_time_ns
    by_step = first.each == "step" and len(scenario.faults) == 1
    largest = expected_largest(first.distribution, scenario.world_size) * first.mean_ns
    return JitteredSteps(
        scenario=scenario, first_seed=first.seed, clean_ns=clean, times_ns=tuple(times),
        largest_ns=clean + largest if by_step else None,
    )


def _with_seed(scenario: Scenario, seed: int) -> tuple[Fault, ...]:
    return tuple(
        replace(fault, seed=seed) if isinstance(fault, Jitter) else fault
        for fault in scenario.faults
    )


def _jitter_of(scenario: Scenario, seeds: object) -> Jitter:
    """The scenario's jitter; ArgumentError where it has none, or for too much work."""
    if not isinstance(scenario, Scenario):
        raise ArgumentError(
            where="scenario", expected="a Scenario", found=described(scenario),
            remedy="zsim.load or zsim.Scenario makes one",
        )
    if not isinstance(seeds, int) or isinstance(seeds, bool) or not 1 <= seeds <= MOST_SEEDS:
        raise ArgumentError(
            where="seeds", expected=f"a whole number from 1 to {MOST_SEEDS:,}",
            found=described(seeds),
        )
    own = [fault for fault in scenario.faults if isinstance(fault, Jitter)]
    if not own:
        raise ArgumentError(
            where=f"{scenario.name}: faults", expected="a jitter fault",
            found=", ".join(fault.kind for fault in scenario.faults) or "none",
            remedy='add { kind = "jitter", mean = "200 us" }',
        )
    _require_few(scenario, seeds, most=MOST_BY_COLUMNS)
    return own[0]


def _require_few(scenario: Scenario, seeds: int, *, most: int) -> None:
    """ArgumentError where so many seeds are more than the `most` work."""
    size = scenario.work
    work = size.num_ranks * size.num_units * size.passes * seeds
    if work > most:
        raise ArgumentError(
            where="seeds",
            expected=f"ranks × param groups × micro-batches × seeds of at most {most:,}",
            found=f"{work:,}", remedy="take fewer seeds",
        )
