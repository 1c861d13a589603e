"""The words that fsdp2 and hsdp are written in: what hooks do when units are called, and where a
forward and a backward end.

Nothing here decides which group comes next; see fsdp2.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zsim.ir.ops import MemoryEvent
from zsim.models.spec import ROOT
from zsim.strategies.fsdp.passes import ORIGINAL
from zsim.strategies.fully_shard.hook_calls import RECORD
from zsim.strategies.fully_shard.param_group import Group
from zsim.strategies.fully_shard.reduce import ReducingStep


@dataclass(slots=True, kw_only=True)
class ShardedStep(ReducingStep):
    """One training step of one rank."""

    root_again: str = ""
    """The unit that takes itself for the root, as it is called while its block is recomputed."""

    def copy(self) -> ShardedStep:
        """This step so far, to be ended in another way."""
        return replace(self, ops=list(self.ops), parts=list(self.parts), live=set(self.live))

    def begin_forward(self) -> None:
        """The root's forward begins: the all-gather streams wait for whatever the compute stream
        was last given."""
        last = next((op.index for op in reversed(self.ops) if op.stream == "compute"), None)
        self.gather_waits = [] if last is None else [last]
        self.last_copy_out = []

    def call(self, group: Group, following: Sequence[Group]) -> None:
        """The pre-forward hook: gather the group if need be, wait for it, and prefetch the
        `following` ones."""
        self._count_steps(1 + len(following))
        self.unshard(group)
        self.wait_for_unshard(group, forward=True)
        self.unshard_each(following)

    def call_again(self, group: Group, following: Sequence[Group]) -> None:
        """The pre-forward hook of a unit whose block is recomputed.

        In its own backward it only needs its parameters. Before that it begins a forward, of which
        it is the root if it is in no other.
        """
        if group.in_backward:
            self._count_steps(0)
            self.unshard(group)
            self.wait_for_unshard(group, forward=False)
            return
        if not self.root_again:
            self.root_again = group.fqn
            self.calls.count(
                RECORD, *([RECORD] if self.training.device != "cpu" else [])
            )  # inputs are brought to a device
            self.begin_forward()
            self.last_copy_out = self.gather_waits
        self.call(group, following)

    def _count_steps(self, number: int) -> None:
        """So many steps of a hook are recorded, and one more where inputs are cast."""
        self.calls.count(*[RECORD] * (number + (self.training.precision.parameters != ORIGINAL)))

    def return_again(self, group: Group) -> None:
        """Its post-forward hook, which in backward reshards nothing: a root lets the last
        all-gather's output go."""
        if not group.in_backward:
            self.calls.count(RECORD)
        if self.root_again == group.fqn:
            self.root_again = ""
            self.end_forward()

    def end_forward(self, held: Sequence[MemoryEvent] = ()) -> None:
        """The root's forward is over: the last all-gather output goes, then what the root `held` of
        its inputs."""
        group, self.forward_gather = self.forward_gather, None
        self.gather_waits = self.last_copy_out or self.gather_waits
        if group is not None:
            memory, self.forward_output = [*self.drop(self.forward_output), *held], ""
            self.issue(
                "free", group.fqn, stream="host", micro_batch=self.micro_batch, memory=memory
            )

    def leave_autocast(self) -> None:
        """The last forward before a backward is over: autocast's cache is emptied."""
        if self.training.freed_with_autocast_cache:
            self.issue(
                "free", ROOT, stream="host", micro_batch=self.micro_batch,
                memory=self.training.freed_with_autocast_cache,
            )

    def finalize_backward(self, group: Group) -> None:
        """The compute stream waits for the reductions so far, and what they held of `group` goes.

        So does an all-gather that was prefetched and that nobody came to use.
        """
        memory = self.drop(f"{group.fqn}.reduced")
        if group.gathered:
            group.gathered = False
            memory += self.drop(self.outputs.get(group.fqn, ""))
            self.unfinished += [self.gathers[group.fqn]] if group.fqn in self.gathers else []
        if memory or self.unfinished:
            waits, self.unfinished = self.unfinished, []
            self.issue(
                "free", group.fqn, stream="compute", waits=waits, micro_batch=self.micro_batch,
                memory=memory,
            )

    def end_backward(self) -> None:
        """The end of the root's final callback: the last reduce-scatter's input goes; backward
        returns, and the loss goes."""
        self.gather_waits, self.last_copy_out, self.post_reduces = [], [], {}
        if self.reduce_input is not None:
            (buffer, event), self.reduce_input = self.reduce_input, None
            memory = self.drop(buffer)
            if memory:
                self.issue(
                    "free", ROOT, stream="compute", waits=(event,), micro_batch=self.micro_batch,
                    memory=memory,
                )
        self.release_loss()
