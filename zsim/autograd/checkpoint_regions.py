"""Regions of activation checkpointing: operators recomputed together, and their calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from zsim.autograd.aten.call import Call
from zsim.ir.buffers import form_of


@dataclass(slots=True, eq=False)
class OperatorCalls:
    """The calls of one operator, and the region that is recomputed with it; `cached` if its output
    is kept in there.

    `inside`: the unit in the block whose module runs it, "" for the block itself; that module was
    called with `entry`.
    """

    calls: list[Call]
    region: Region | None = None
    cached: bool = False
    inside: str = ""
    entry: str = ""

    @property
    def kept(self) -> Call:
        """The call whose output a `cached` step keeps: attention's kernel, even with a copy after
        it, else the last one."""
        return next((call for call in self.calls if call.operator == "attention"), self.calls[-1])

    def keeps(self, call: Call) -> bool:
        """True if the output of `call` is kept rather than computed again."""
        return self.cached and call is self.kept


@dataclass(slots=True, eq=False)
class Region:
    """Operators that are recomputed as one: what they read from outside, and their calls with
    recomputed values renamed."""

    first: OperatorCalls
    inputs: tuple[str, ...]
    again: list[OperatorCalls]
    names: dict[str, Call]
    stops_early: bool = True
    packed: Mapping[str, str] = field(default_factory=dict)
    """Names of the inputs as a hook hands them to the recomputation; empty without one."""
    saving: tuple[Call, ...] = field(init=False)
    """The recomputed calls that save something, in order."""

    def __post_init__(self) -> None:
        self.saving = tuple(
            call for step in self.again for call in step.calls if packs_something(call)
        )

    @classmethod
    def of(
        cls, steps: list[OperatorCalls], *, reads: tuple[str, ...] = (), stops_early: bool = True,
        packs: bool = False,
    ) -> Region:
        """The region of `steps`, which learn of it; `reads` are values that it is handed besides
        those that its calls name. A hook `packs` its inputs."""
        made = {name for step in steps for call in step.calls for name in (call.output, *call.also)}
        made |= {name for step in steps for call in step.calls for name, _ in call.keeps}
        read = (
            value for step in steps for call in step.calls for value in (*call.inputs, *call.saves)
        )
        inputs = tuple(dict.fromkeys([*(value for value in read if value not in made), *reads]))
        kept = {step.kept.output for step in steps if step.cached}
        kept |= {
            name for step in steps if step.cached for call in step.calls for name, _ in call.keeps
        }
        start = steps[-1].calls[-1].output  # no copy of a weight, which several runs may read
        packed = {value: form_of(start, "input", i) for i, value in enumerate(inputs) if packs}
        names = {value: form_of(value, "again") for value in made - kept} | packed
        again = [
            OperatorCalls(
                [_renamed(call, names) for call in step.calls],
                cached=step.cached,
                inside=step.inside,
                entry=names.get(step.entry, step.entry),
            )
            for step in steps
        ]
        pairs = zip(
            (c for step in steps for c in step.calls), (c for step in again for c in step.calls),
            strict=True,
        )
        region = cls(
            steps[0], inputs, again, {call.output: other for call, other in pairs}, stops_early,
            packed,
        )
        for step in steps:
            step.region = region
        return region

    def renamed(self, call: Call) -> Call:
        """`call` as it is recomputed."""
        return self.names[call.output]

    @property
    def last(self) -> Call:
        """The last call that saves something: backward meets it first, and recomputation stops
        there."""
        return self.saving[-1]

    @property
    def earliest(self) -> Call:
        """The first call that saves something; when its backward is over the region's inputs are
        let go."""
        return self.saving[0]

    @property
    def unreached(self) -> tuple[str, ...]:
        """Outputs that were kept and that recomputation does not get to: they go with the inputs.
        """
        if not self.stops_early:
            return ()
        calls = [call for step in self.again for call in step.calls]
        outputs = {step.kept.output for step in self.again if step.cached}
        stop = calls.index(self.last) + packs_its_output(self.last)
        return tuple(call.output for call in calls[stop:] if call.output in outputs)

    @property
    def kernels(self) -> list[Call]:
        """The calls that recomputation makes."""
        calls = [(step, call) for step in self.again for call in step.calls]
        stop = next(i for i, (_, call) in enumerate(calls) if call is self.last)
        made = calls[: stop + packs_its_output(self.last)] if self.stops_early else calls
        # those that are no kernels included
        return [call for step, call in made if not step.keeps(call)]


def packs_something(call: Call) -> bool:
    """True if autograd saves anything of the call, even a parameter: recomputation reaches it."""
    return call.differentiable and bool(call.saves or call.keeps or call.packs)


def packs_its_output(call: Call) -> bool:
    """True if recomputation makes the output of the call again: autograd saves it, or a node in
    Python saves when it has run."""
    return bool(call.keeps) or call.output in call.saves or call.one_node


def _renamed(call: Call, again: Mapping[str, str]) -> Call:
    """`call` with values called as they are when they are made `again`."""

    def names(values: tuple[str, ...]) -> tuple[str, ...]:
        return tuple([again.get(value, value) for value in values])

    (output,), keeps = names((call.output,)), names(tuple(name for name, _ in call.keeps))
    sizes = tuple(nbytes for _, nbytes in call.keeps)
    return replace(
        call,
        inputs=names(call.inputs),
        output=output,
        also=names(call.also),
        saves=names(call.saves),
        weights=names(call.weights),
        drops=names(call.drops),
        from_cache=False,
        keeps=tuple(zip(keeps, sizes, strict=True)),
    )
