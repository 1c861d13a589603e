"""The part of a simulation that every round has: schedules, communicators, and the links they take.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import TYPE_CHECKING

from zsim.engine.contention.link_contention import contended
from zsim.engine.contention.max_min_fairness import Usage
from zsim.engine.events.rank_schedule import RankSchedule
from zsim.engine.folding import Meetings, in_step_off_device, representatives
from zsim.engine.timeline import CostModel, RingCosts
from zsim.ir.ops import Op
from zsim.ir.program import Program

if TYPE_CHECKING:
    from zsim.engine.ring_steps.rings import Rings

Communicator = tuple[str, tuple[int, ...]]
"""The name of its group, and those of its ranks that are simulated."""


class Prepared:
    """The part of a simulation that does not depend on the delays of ops."""

    def __init__(
        self, program: Program, *, costs: CostModel, all_ranks: bool = False,
        contention: bool = True, stepwise: RingCosts | None = None, note_hops: bool = False,
    ) -> None:
        """Arguments as of `simulate`; simulations of rings as steps can `note_hops`."""
        self.costs, self.program, self.assignment = costs, program, program.assignment
        self.rings: Rings | None = None
        self.note_hops = note_hops
        shares_nodes = not in_step_off_device(program)
        # a file system is one for all nodes
        all_ranks = all_ranks or stepwise is not None or (shares_nodes and _uses_files(program))
        if stepwise is not None:
            from zsim.engine.ring_steps.rings import Rings  # start-up: few steps need networkx

            self.rings = Rings(program, stepwise, contention=contention)
        schedules = dict[int, RankSchedule]()
        for ops in program.steps:
            schedule = RankSchedule(ops, launch_queue=costs.launch_queue)
            schedule.share_segments(schedules.values())
            schedules[id(ops)] = schedule
        alone = {key: _alone(schedule, costs) for key, schedule in schedules.items()}
        self.schedules = [schedules[id(rank.steady)] for rank in program.ranks]
        self.alone = [alone[id(rank.steady)] for rank in program.ranks]
        everyone = tuple(range(program.mesh.world_size))
        self.representatives = everyone if all_ranks else representatives(
            program, duration_ns=costs.collective_ns, usage=costs.usage if contention else None,
            node_size=costs.node_size if shares_nodes else 0,
        )
        self.groups: dict[Communicator, tuple[int, ...]] = {}
        """All ranks of each communicator, simulated or not."""
        self.communicators: dict[int, dict[str, Communicator]] = {}
        """Communicators by simulated rank and by the name of the group."""
        meetings = Meetings(program, self.representatives)
        names = {key: schedule.groups for key, schedule in schedules.items()}
        met: dict[tuple[str, int], Communicator] = {}  # by first rank: to hash all takes long
        for rank in sorted(set(self.representatives)):
            own = self.communicators[rank] = {}
            for name in names[id(program.of_rank(rank).steady)]:
                group = program.mesh.group(name, rank)
                if (name, group[0]) not in met:
                    key = name, group if all_ranks else meetings.present(name, rank)
                    met[name, group[0]] = key
                    self.groups.setdefault(key, group)
                own[name] = met[name, group[0]]
        self.in_step, self.contention = not (all_ranks or shares_nodes), contention
        self.host_usages: dict[tuple[int, str, int], Usage] = {}
        """Shares of a node that ops off the device take, by rank, stream and kernels."""
        self.usages: list[Usage] = [{}] * len(self.groups)
        if contention and len(self.groups) > 1:
            self.usages = contended([self._usage(group) for group in self.groups.values()])

    def _usage(self, group: tuple[int, ...]) -> dict[int, Mapping[str, Fraction]]:
        """The share of each simulated rank's links that collectives over `group` take, by rank.

        It equals that of the members that the rank represents.
        """
        return {
            self.representatives[rank]: parts for rank, parts in self.costs.usage(group).items()
        }

    def host_usage(self, op: Op, rank: int) -> Usage:
        """The shares of the rank's node that `op` takes, the same object for one stream's like ops.
        """
        key = rank, op.stream, id(op.kernels)
        if key not in self.host_usages:
            self.host_usages[key] = self.costs.host_usage(op.kernels, rank, in_step=self.in_step)
        return self.host_usages[key]


def _uses_files(program: Program) -> bool:
    return any(
        kernel.location == "files"
        for ops in program.steps for op in ops for kernel in op.kernels
    )


def _alone(schedule: RankSchedule, costs: CostModel) -> tuple[list[int], list[int]]:
    """The ns of each op, 0 for what shares links, and the ns in which the host issues it."""
    durations = [
        costs.compute_ns(op.kernels) if op.kernels and op.index not in schedule.arrivals else 0
        for op in schedule.ops
    ]
    return durations, [costs.issue_ns(op) for op in schedule.ops]
