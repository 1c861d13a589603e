"""Folding: ranks that run the same program are alike, so one stands for all, and meets those that stand for its partners."""

from __future__ import annotations

from zsim.program import Program


class Meetings:
    """Which of the ranks that stand for others meet in groups of one name: those whose kinds share some group."""

    def __init__(self, program: Program, stand_ins: dict[int, int]) -> None:
        self.program, self.stand_ins = program, stand_ins
        self.met: dict[str, list[set[int]]] = {}

    def present(self, axis: str, rank: int) -> tuple[int, ...]:
        """The simulated ranks that a simulated rank meets, itself among them, in order."""
        if axis not in self.met:
            self.met[axis] = self._meet(axis)
        return next(tuple(sorted(meeting)) for meeting in self.met[axis] if rank in meeting)

    def _meet(self, axis: str) -> list[set[int]]:
        met: list[set[int]] = []
        covered: set[int] = set()
        for rank in range(self.program.mesh.world_size):
            if rank in covered:
                continue
            group = self.program.mesh.group(axis, rank)
            covered.update(group)
            meeting = {self.stand_ins[self.program.assignment[member]] for member in group}
            apart = [other for other in met if not other & meeting]
            met = [*apart, meeting.union(*(other for other in met if other & meeting))]
        return met
