"""ShardedStep: compute of a step at stage 3.

Linears are DeepSpeed's own, which save their parameters and not views of gathered memory. So that
goes when a parameter is released, and a backward gathers it anew.
Source: deepspeed/runtime/zero/stage3.py, partition_parameters.py, utils.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from zsim.autograd.lowered import LoweredModule, ParameterGradient, TapeEvent
from zsim.ir.buffers import Buffer, buffer_of, numbered, owner_of, role_of
from zsim.ir.ops import NORM_STEP, Alloc, Free, MemoryEvent, Op
from zsim.models.spec import ROOT, Parameter
from zsim.models.training_options import DTYPE_NBYTES
from zsim.strategies.building.backward_events import forward_memory
from zsim.strategies.building.step_builder import StepBuilder
from zsim.strategies.deepspeed_engine.engine_step import OWN, EngineStep
from zsim.strategies.deepspeed_engine.layout import AXIS
from zsim.strategies.deepspeed_engine.partition import buckets
from zsim.strategies.deepspeed_engine.shards.coordinator import Coordinator
from zsim.strategies.deepspeed_engine.shards.module_calls import Called
from zsim.strategies.deepspeed_engine.shards.parameters import ShardedParameters
from zsim.strategies.deepspeed_engine.shards.reducing import OWN_ENDS, ScatteringStep
from zsim.strategies.replicated.buckets import ready_order

TRACE = "trace"
"""The unit of broadcasts by which ranks assert that they have recorded the same trace."""
INTEGER = DTYPE_NBYTES["int64"]


def _end_of_node(tape: Sequence[TapeEvent]) -> int:
    """Index behind the gradients that a module's first node makes, of its parameters if any."""
    for kind in (ParameterGradient, Alloc):
        if made := [index for index, event in enumerate(tape) if isinstance(event, kind)]:
            return made[-1] + 1
    return 0


def _with_leaves_whole(
    order: Sequence[Parameter], sharded: ShardedParameters
) -> list[Parameter]:
    """The `order` in which gradients are reduced: those of a leaf in that of the model, with the
    last."""
    leaf_of = sharded.leaf_of
    last = {leaf_of.get(p.fqn, p.fqn): index for index, p in enumerate(order)}
    return sorted(
        order, key=lambda p: (
            last[leaf_of.get(p.fqn, p.fqn)], sharded.turn(p) if p.fqn in leaf_of else 0
        )
    )


@dataclass(slots=True, kw_only=True)
class ShardedStep(ScatteringStep):
    """One training step."""

    _inputs: list[MemoryEvent] = field(default_factory=list)
    """The free of the input of the module that computes."""
    _recomputed: dict[str, list[Buffer]] = field(default_factory=dict)
    """Buffers that each module's recomputation has left for its backward."""
    asserts: StepBuilder = field(default_factory=StepBuilder)
    """Broadcasts at the beginning of the second step."""

    @classmethod
    def of(cls, sharded: ShardedParameters) -> ShardedStep:
        """An empty step, in which nothing is whole."""
        made = cls(training=sharded.training, gradients=sharded.gradients, sharded=sharded)
        order = _with_leaves_whole(ready_order(sharded.training), sharded)
        made.fill(buckets(order, most=sharded.options.reduce_bucket_size))
        return made

    # -- compute

    def begin(self, coordinator: Coordinator, *, first: bool) -> None:
        """A forward begins. Ranks assert that their recorded lists are the same: the length, then
        the list."""
        for length in coordinator.begin():
            step = self.step if first else self.asserts
            for numbers in (1, length):
                list_ = Alloc(numbered(TRACE, numbers), "communication", INTEGER * numbers)
                if numbers:
                    step.issue(
                        "broadcast", TRACE, stream="all_gather", group=AXIS,
                        nbytes=list_.nbytes, dtype="int64", micro_batch=self.micro_batch,
                        memory=(list_, Free(list_.buffer)),
                    )

    def forward(self, module: LoweredModule) -> None:
        """Compute. The caller of a module holds its input until the hook after it has run."""
        memory = forward_memory(self.training, module)
        if self.sharded.own.get(module.fqn):
            own = {event.buffer for event in memory if isinstance(event, Alloc)}
            self._inputs = [event for event in memory if event.buffer not in own]
        self._forward(module, [event for event in memory if event not in self._inputs])

    def let_go(self) -> None:
        """A module has returned: its caller lets go of its input."""
        if self._inputs:
            self.step.issue("free", ROOT, micro_batch=self.micro_batch, memory=self._inputs)
            self._inputs = []

    def begin_backward(self, seed: Alloc) -> Iterable[MemoryEvent]:
        """These events come before the root's hook, in an op of their own."""
        return ()

    def open_backward(self) -> None:
        """The loss is scaled, and backward begins."""
        seed = self.training.modules[-1].backward.memory[0]
        assert isinstance(seed, Alloc)
        self.step.issue(
            "alloc", ROOT, stream="host", micro_batch=self.micro_batch,
            memory=list(EngineStep.begin_backward(self, seed)),
        )

    def hold(self, module: str) -> None:
        """`module` returns from its recomputation, which keeps detached parameters for backward:
        the memory that they have now. It keeps frozen ones as they are."""
        saved = self._saved(module)
        self._recomputed[module] = [
            self._whole[p.fqn] for p in self.sharded.own[module]
            if p.requires_grad and p.fqn in saved
        ]
        self._held.update(self._recomputed[module])

    def _saved(self, module: str) -> tuple[str, ...]:
        """The parameters that autograd saves for the backward of a module. A norm in steps whose
        input needs no gradient saves that input alone."""
        index = self.sharded.index_of[module]
        lowered, op = self.training.modules[index], self.training.model.modules[index].operators[0]
        steps = any(kernel.operator == NORM_STEP for kernel in lowered.forward.kernels)
        if op.kind == "shifted_norm" or (steps and not lowered.input_needs_gradient):
            return ()
        return (op.weight,) if op.kind == "conv1d" else (op.weight, op.bias)

    def _tape(self, module: LoweredModule) -> Iterator[TapeEvent]:
        """The backward of `module`; what its recomputation holds goes when its node has made
        gradients."""
        tape = list(EngineStep._tape(self, module))
        if module.fqn in self.sharded.leaves:  # torch's hook keeps the gradient of its output
            own = {event.buffer for event in tape if isinstance(event, Alloc)}
            frees = [event for event in tape if isinstance(event, Free)]
            self._outputs = [
                event for event in frees
                if event.buffer in self.sharded.gradients_of_values and event.buffer not in own
            ]
            tape = [event for event in tape if event not in self._outputs]
        if buffers := self._recomputed.pop(module.fqn, []):
            self._held.difference_update(buffers)
            gone = set(buffers).difference(self._whole.values())
            tape[_end_of_node(tape):_end_of_node(tape)] = [Free(each) for each in sorted(gone)]
        return iter(tape)

    def pass_on(self, call: Called) -> None:
        """The gradient of a module's input is added to others of the same value."""
        if call.adds:
            self._compute = self.step.issue(
                "backward", call.module, micro_batch=self.micro_batch, memory=call.adds
            )

    # -- ranks

    def kind_of(self, rank: int) -> tuple[int, ...]:
        """All that the ops of a rank depend on: the elements of its shards of each size, if
        anything."""
        if not self.sharded.casts:
            return ()
        return tuple(
            self.sharded.local_numel(p, rank=rank) for p in self.sharded.one_of_each_size
        )

    def of_rank(self, rank: int) -> list[Op]:
        """The ops of a rank, which casts its shards of reduced gradients to the parameters' dtype.
        """
        ops, numels = list(self.step.ops), self.sharded.local_numels(rank)
        for index in self._placed if self.sharded.casts else ():
            memory = [e for event in ops[index].memory for e in self._filled(event, numels)]
            ops[index] = replace(ops[index], memory=tuple(memory))
        return ops

    def _filled(
        self, event: MemoryEvent, numels: Mapping[str, int]
    ) -> Iterator[MemoryEvent]:
        name, role = owner_of(event.buffer), role_of(event.buffer)
        if role not in (OWN, OWN_ENDS):
            yield event
            return
        for p in sorted(self.bucket_of[name].parameters, key=self.sharded.turn):
            shard = buffer_of(p.fqn, "reduced_shard")
            if numel := numels[p.fqn]:
                nbytes = numel * self.sharded.element
                yield Free(shard) if role == OWN_ENDS else Alloc(shard, "communication", nbytes)
