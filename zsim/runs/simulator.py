"""The backend `sim`: plans a scenario, replays its memory, lets the engine stamp times on it, and
returns a Run.

The only place where Program, memory, costs and engine meet. Ranks that are alike are folded unless
asked otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from operator import eq

from zsim.cluster.cluster import ClusterSpec
from zsim.cluster.cluster_presets import load_cluster
from zsim.engine.bands import error_bands
from zsim.engine.costs.op_costs import Costs
from zsim.engine.faults.arrivals import late_ranks
from zsim.engine.faults.fault import FAULT_KINDS, Jitter
from zsim.engine.faults.faulty_program import faulty_program
from zsim.engine.faulty_step import simulate_faulty_step, told_of
from zsim.engine.folding import in_step_off_device
from zsim.engine.simulate_step import is_by_columns, prepared_step, simulate_step
from zsim.engine.timeline import Timeline
from zsim.errors import DeadlockError, ZsimError
from zsim.ir.gc_pause import uncollected
from zsim.ir.host_ledger import OFFLOADED, SAVED, replay_host
from zsim.ir.laws import program_laws
from zsim.ir.laws.validate import validate
from zsim.ir.ledger_replay import replay_each
from zsim.ir.mesh import Mesh
from zsim.ir.ops import COLLECTIVES, Op, resource_of
from zsim.ir.program import PHASES, PhaseName, Program, RankProgram
from zsim.ir.run import (
    CollectiveRecord,
    MemoryRecord,
    OffDevice,
    PhaseRecord,
    RankRun,
    RunRecord,
    Span,
    UnendedRunError,
    observed_ranks,
)
from zsim.models.torch_versions import NEWEST, TorchVersion
from zsim.runs.backend import Capabilities, RunOptions
from zsim.runs.figures.off_device import off_device
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario
from zsim.version import __version__

DEFAULT_CLUSTERS: dict[str, str] = {"cpu": "cpu-gloo", "cuda": "dgx-h100"}
"""Clusters that stand for a real backend's own devices where the scenario's cluster is of another
kind."""

FEW_RANKS = "a few ranks, which suffice where all meet in each collective, and nothing is on hosts"
"""Ranks whose times may be asked for alone, in words."""
MOST_SENDERS = 512
"""Ranks of a kind, from the first and from the last, whose sent bytes are computed; ring neighbours
differ by a byte."""

MOST_TIMELINES = 64
"""Ranks up to which a Run keeps the bytes after each op."""

OnDevice = Callable[[Program, Scenario, ClusterSpec], Program]
Phases = Mapping[str, PhaseRecord]
Payload = tuple[str, int, str, int]
"""The kind, size, group and root of a collective."""
_Stamps = tuple[tuple[Op, int, int, int], ...]
"""Ops, each with its start, end and issue in ns."""


class WorkError(ZsimError):
    """A scenario that is too much to simulate rank by rank."""


class SimBackend:
    """The simulator as a backend.

    Its Run predicts a real one on `device`, such a kind of device, or on that very `cluster`, by
    that version of `torch`. `on_device` gives a Program what follows from the device's memory.
    """

    name = "sim"

    def __init__(
        self, device: str | None = None, cluster: ClusterSpec | None = None,
        torch: TorchVersion = NEWEST, on_device: OnDevice = lambda program, *_: program,
    ) -> None:
        self.on_device = on_device
        self.device = device
        self.cluster = cluster
        self.torch = torch

    def capabilities(self) -> Capabilities:
        """Memory and time, no numerics."""
        return Capabilities(
            memory=True, numerics=False, time=True, device=self.device or "cuda",
            faults=tuple(FAULT_KINDS),
        )

    @uncollected()
    def run(self, scenario: Scenario, *, options: RunOptions) -> RunRecord:
        """The simulated Run: of one rank of each kind, of `options.ranks`, or of all ranks.

        UnendedRunError where its faults keep the step from ending.
        """
        cluster = self.cluster or cluster_for(scenario, self.device)
        costs = Costs(cluster=cluster, execution=scenario.executed_on(cluster))
        stepwise = costs.execution.detail == "steps"
        every = options.all_ranks or stepwise
        program = _program(
            scenario, cluster, all_ranks=every, torch=self.torch,
            kept=None if options.ranks is None else len(options.ranks),
        )
        program = self.on_device(program, scenario, cluster)
        if _is_unlike(scenario) and not every:
            _require_columns(program, scenario, costs)
        begun = RunRecord(
            scenario=scenario.name, backend=self.name, interpreter="simulator",
            world_size=scenario.world_size, mesh=scenario.mesh, ranks=(),
            provenance={
                **_provenance(scenario, cluster), "torch": self.torch,
                **(observed_ranks(sorted(options.ranks)) if options.ranks else {}),
                **(_of_rings(program, costs) if stepwise else {}),
            },
        )
        if scenario.faults:
            try:
                program, timeline = simulate_faulty_step(
                    program, scenario.faults, costs=costs, all_ranks=every, note_hops=options.hops
                )
            except DeadlockError as error:
                ended = _until_the_step(
                    begun, program, ranks=range(scenario.world_size) if every else options.ranks
                )
                faults = tuple(map(str, scenario.faults))
                raise UnendedRunError(
                    error, replace(ended, complete=False, failure=str(error), faults=faults)
                ) from None
        else:
            timeline = simulate_step(
                program, costs=costs, all_ranks=every, note_hops=options.hops
            )
        band = "{:.4f} {:.4f}".format(*error_bands.band(program, timeline, costs=costs))
        return replace(
            begun,
            ranks=_ranks(program, _shown(timeline, options), costs=costs, timeline=timeline),
            step_time_ns=timeline.step_time_ns,
            representatives=() if every or options.ranks else timeline.representatives,
            provenance={**begun.provenance, "band": band},
            hops=timeline.hops,
            faults=told_of(scenario.faults),
            late=late_ranks(program, timeline) if scenario.faults else (),
        )


@uncollected()
def require_lawful(scenario: Scenario, *, device: str) -> None:
    """ProgramError where the Program of a real Run on that kind of device breaks a law."""
    program = _program(scenario, cluster_for(scenario, device), all_ranks=False)
    program_laws.require_lawful(program, where=scenario.name)


def _program(
    scenario: Scenario, cluster: ClusterSpec, *, all_ranks: bool, torch: TorchVersion = NEWEST,
    kept: int | None = None,
) -> Program:
    """The Program, held to the rules of the IR but for its memory, which `_phases` replays.

    `kept`: the number of ranks whose times are kept; None: of all that are simulated.
    """
    unlike, work = _is_unlike(scenario), scenario.work
    fits = unlike and not all_ranks and not work.problem(all_ranks=True, by_columns=True)
    few = kept is not None and not replace(work, num_ranks=kept).problem(all_ranks=True)
    problem = "" if fits and few else work.problem(all_ranks=all_ranks or unlike)
    if problem:
        raise WorkError(
            where=scenario.name, expected="less work", found=problem,
            remedy=f"or ask for the times of {FEW_RANKS}" if fits else "",
        )
    program = plan(scenario, device=cluster.kind, torch=torch)
    if not in_step_off_device(program) and (problem := scenario.work.problem(all_ranks=True)):
        raise WorkError(where=scenario.name, expected="less work", found=problem)
    return validate(program, memory=False)


def _is_unlike(scenario: Scenario) -> bool:
    """True where no two ranks are alike."""
    return any(isinstance(fault, Jitter) for fault in scenario.faults)


def _require_columns(program: Program, scenario: Scenario, costs: Costs) -> None:
    """WorkError where ranks that are all distinct are too many to be simulated by events."""
    problem = scenario.work.problem(all_ranks=True)
    if problem and not is_by_columns(
        prepared_step(faulty_program(program, scenario.faults), costs=costs)
    ):
        raise WorkError(
            where=scenario.name, expected="less work", found=problem,
            remedy=f"also for {FEW_RANKS}",
        )


def cluster_for(scenario: Scenario, device: str | None, *, preset: str = "") -> ClusterSpec:
    """The scenario's cluster, or one of another `device` with as many ranks: `preset`, or the
    default one."""
    if device is None or device == scenario.cluster.kind:
        return scenario.cluster
    name, ranks = preset or DEFAULT_CLUSTERS[device], scenario.world_size
    per_node = load_cluster(name).devices_per_node
    return load_cluster(name, nodes=1 if device == "cpu" else -(-ranks // per_node), ranks=ranks)


def _shown(timeline: Timeline, options: RunOptions) -> dict[int, int]:
    """The ranks to show and how many ranks each stands for."""
    if options.ranks is not None:
        return dict.fromkeys(sorted(options.ranks), 1)
    return dict(sorted(Counter(timeline.representatives).items()))


def _ranks(
    program: Program, shown: dict[int, int], *, costs: Costs, timeline: Timeline
) -> tuple[RankRun, ...]:
    with_timeline = len(shown) <= MOST_TIMELINES
    alike_to = {rank: [rank] for rank in shown}
    if set(shown) == set(timeline.representatives):
        for rank, like in enumerate(timeline.representatives):
            alike_to[like].append(rank)
    kinds = {id(rank): rank for rank in map(program.of_rank, shown)}  # faults make kinds alike
    phases = dict(zip(
        kinds, _phases([*kinds.values()], program.mesh, with_timeline=with_timeline), strict=True
    ))
    spans: dict[int, tuple[Span, ...]] = {}
    hosted: dict[int, OffDevice | None] = {}
    leaves = {id(ops): any(map(resource_of, ops)) for ops in program.steps}
    alike: dict[tuple[int, tuple[int, ...], tuple[int, ...]], tuple[Span, ...]] = {}
    before: tuple[_Stamps, tuple[Span, ...]] = (), ()
    payloads = {id(ops): _payloads(ops) for ops in program.steps}
    for rank in shown:
        kind = program.assignment[rank]
        times = timeline.ranks[timeline.representatives[rank]]
        key = (kind, tuple(times.starts), tuple(times.ends))
        if key not in alike:
            stamps = tuple(zip(
                program.ranks[kind].steady, times.starts, times.ends, times.issued, strict=True
            ))
            alike[key] = _spans(stamps, *before)
            before = stamps, alike[key]
            ops = program.ranks[kind].steady
            hosted[id(alike[key])] = (
                off_device(ops, times.starts, times.ends) if leaves[id(ops)] else None
            )
        spans[rank] = alike[key]
    return tuple(
        RankRun(
            rank=rank,
            stands_for=count,
            phases=phases[id(program.of_rank(rank))],
            spans=spans[rank],
            off_device=hosted[id(spans[rank])],
            bytes_sent=_bytes_sent(
                payloads[id(program.of_rank(rank).steady)], program.mesh, costs,
                ranks={*alike_to[rank][:MOST_SENDERS], *alike_to[rank][-MOST_SENDERS:]},
            ),
        )
        for rank, count in shown.items()
    )


def _until_the_step(
    begun: RunRecord, program: Program, *, ranks: Sequence[int] | None
) -> RunRecord:
    """The Run with the phases before the steady step, of `ranks` or of the first rank of each kind.
    """
    firsts = {kind: rank for rank, kind in reversed([*enumerate(program.assignment)])}
    alike = tuple(firsts[kind] for kind in program.assignment)
    shown = Counter(alike) if ranks is None else dict.fromkeys(sorted(ranks), 1)
    kinds = sorted({program.assignment[rank] for rank in shown})
    whole = _phases(
        [program.ranks[kind] for kind in kinds], program.mesh,
        with_timeline=len(shown) <= MOST_TIMELINES,
    )
    phases: dict[int, Phases] = {
        kind: {phase: own[phase] for phase in ("construction", "first")}
        for kind, own in zip(kinds, whole, strict=True)
    }
    return replace(
        begun, representatives=alike if ranks is None else (),
        ranks=tuple(
            RankRun(rank=rank, stands_for=count, phases=phases[program.assignment[rank]])
            for rank, count in sorted(shown.items())
        ),
    )


def _phases(
    programs: Sequence[RankProgram], mesh: Mesh, *, with_timeline: bool
) -> Iterator[Phases]:
    """The phases of each program; passes that several have are followed once."""
    replayed = replay_each(programs, timeline=with_timeline)
    for program, memory in zip(programs, replayed, strict=True):
        records = _with_host(memory, program)
        yield {
            phase: PhaseRecord(
                collectives=tuple(_collectives(program.phase(phase), mesh)),
                memory=records[phase],
            )
            for phase in PHASES
        }


def _with_host(
    memory: Mapping[PhaseName, MemoryRecord], program: RankProgram
) -> Mapping[PhaseName, MemoryRecord]:
    """The records of steps with the bytes of host memory at their ends, and the most bytes of saved
    tensors there, where there are any."""
    offloads = any(op.host for op in program.construction)
    if not offloads and not any(op.host for op in program.steady):
        return memory
    records, changed = replay_host(program), dict(memory)
    for phase, record in memory.items():
        if record.held:
            host = records[phase]
            host_bytes = {OFFLOADED: host.end_bytes} if offloads else {}
            host_bytes |= {SAVED: host.saved_bytes} if host.saved_bytes else {}
            changed[phase] = replace(record, held={**record.held, **host_bytes})
    return changed


def _collectives(ops: Iterable[Op], mesh: Mesh) -> Iterator[CollectiveRecord]:
    """Records of the collectives among `ops`; equal ones are one object."""
    known: dict[tuple[str, int, str, int], CollectiveRecord] = {}
    for op in ops:
        if op.kind in COLLECTIVES:
            key = op.kind, op.nbytes, op.group, op.root
            if key not in known:
                known[key] = CollectiveRecord(
                    op=op.kind, nbytes=op.nbytes, group=op.group,
                    group_size=mesh.size(op.group), root=op.root,
                )
            yield known[key]


def _spans(stamps: _Stamps, others: _Stamps, known: tuple[Span, ...]) -> tuple[Span, ...]:
    """The spans of `stamps`. Those with which `others` begin too are `known`."""
    num_known = len(list(takewhile(bool, map(eq, stamps, others))))
    return known[:num_known] + tuple([
        Span(
            name=f"{op.kind} {op.unit}", kind=op.kind, unit=op.unit, stream=op.stream,
            start_ns=start, end_ns=end, nbytes=op.nbytes, issued_ns=issued, group=op.group,
        )
        for op, start, end, issued in stamps[num_known:]
    ])


def _payloads(ops: tuple[Op, ...]) -> Counter[Payload]:
    """Counts of the collectives issued, by kind, size, group and root."""
    return Counter((op.kind, op.nbytes, op.group, op.root) for op in ops if op.kind in COLLECTIVES)


def _bytes_sent(
    payloads: Counter[Payload], mesh: Mesh, costs: Costs, *, ranks: Collection[int]
) -> int:
    """The most bytes that any of `ranks` sends. All members of a group send as many of a message in
    equal chunks, but for a broadcast."""
    sizes = {group: mesh.size(group) for _, _, group, _ in payloads}
    unequal = {
        (kind, nbytes, group, root) for kind, nbytes, group, root in payloads
        if kind == "broadcast" or nbytes % sizes[group]
    }

    def sent(rank: int, messages: Iterable[Payload]) -> int:
        positions = {group: mesh.position(group, rank) for group in sizes}
        return sum([
            payloads[kind, nbytes, group, root] * costs.bytes_sent(
                kind, nbytes, group_size=sizes[group], rank=positions[group], root=root
            )
            for kind, nbytes, group, root in messages
        ])

    equal = sent(min(ranks), payloads.keys() - unequal)
    return equal + (max(sent(rank, unequal) for rank in ranks) if unequal else 0)


def _of_rings(program: Program, costs: Costs) -> dict[str, str]:
    """The provenance of a Run whose rings are simulated as steps: that they are, and what goes
    round none."""
    from zsim.engine.ring_steps.work import closed_forms

    others = ", ".join(closed_forms(program, costs))
    return {"detail": "steps", **({"closed_form": others} if others else {})}


def _provenance(scenario: Scenario, cluster: ClusterSpec) -> dict[str, str]:
    return {
        "zsim": __version__, "seed": str(scenario.seed), "steps": str(scenario.steps),
        "strategy": scenario.strategy, "fingerprint": scenario.fingerprint,
        "computes_in": scenario.precision.narrowest, "cluster": cluster.name,
        "device": cluster.kind, "device_name": cluster.device.name,
        **({"power": f"{cluster.device.power} W"} if cluster.device.power else {}),
        "calibration": error_bands.calibration(
            cluster, scenario.executed, uses_drives=scenario.offload.uses_drives
        ),
        **(
            {"allocator": "expandable_segments:True"}
            if scenario.expandable_segments and cluster.kind == "cuda"
            else {}
        ),
    }
