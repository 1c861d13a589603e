"""One recomputation: a region's forward run again in backward, as torch.utils.checkpoint does.

torch stops after the last tensor that backward needs, unless told not to. It skips the last call if
that saves nothing of its own output. The block holds a nested unit's input until the unit
returns; both moments have a mark. At the end Python drops whatever it still holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from zsim.autograd.aten.call import Call
from zsim.autograd.checkpoint_regions import OperatorCalls, Region, packs_its_output
from zsim.autograd.lowered import InnerCall
from zsim.autograd.values import Values, dead_after, last_uses


def recompute(values: Values, region: Region, *, unpacked: Iterable[str] = ()) -> None:
    """Run the `region`'s forward again on `values`, with the inputs that a hook has `unpacked`."""
    steps = region.again
    drops = {value for step in steps for call in step.calls for value in call.drops}
    _Recomputation(
        values, region, last_use=last_uses(steps), kept=drops.union(region.inputs)
    ).run()
    for value in unpacked:
        values.storages.release(value)


@dataclass(slots=True)
class _Recomputation:
    """`kept` are values that no last use frees; `held` those that Python holds; `kernels` have run.
    """

    values: Values
    region: Region
    last_use: dict[str, OperatorCalls]
    kept: set[str]
    held: dict[str, None] = field(default_factory=dict)
    kernels: int = 0

    def run(self) -> None:
        before = OperatorCalls([])
        for step in self.region.again:
            self._cross_units(before, step)
            if self._stops_in(step):
                break
            self._drop_dead(step)
            before = step
        else:
            self._mark_unit(before.inside, returns=True)
        for value in self.held:
            self.values.storages.release(value)

    def _cross_units(self, before: OperatorCalls, step: OperatorCalls) -> None:
        """Leave the nested unit of the step `before`, and enter that of `step`."""
        if before.inside == step.inside:
            return
        if before.inside:
            self._mark_unit(before.inside, returns=True)
            if self.last_use[before.entry].inside == before.inside:
                self._drop([before.entry])
        self._mark_unit(step.inside, returns=False)

    def _mark_unit(self, unit: str, *, returns: bool) -> None:
        if unit:
            mark = InnerCall(unit, returns=returns, kernels=self.kernels)
            self.values.storages.events.append(mark)

    def _stops_in(self, step: OperatorCalls) -> bool:
        """Run the calls of `step`; whether recomputation stops at one of them."""
        for call in step.calls:
            is_last = self.region.stops_early and call is self.region.last
            if is_last and not packs_its_output(call):
                self.values.hold(self.values.saved(call))
                return True
            self._run(call, kept=step.keeps(call))
            if is_last:
                return True
        return False

    def _run(self, call: Call, *, kept: bool) -> None:
        """Run `call`, unless forward has `kept` its output: Python holds it from now on."""
        if kept:
            self.values.hold(self.values.saved(call))
            for name, _ in () if call.differentiable else call.keeps:
                self.values.storages.release(name)
        else:
            self.values.make(call)
            self.kernels += bool(call.moved)
        self.held |= dict.fromkeys((call.output, *call.also))
        for value in call.drops:
            del self.held[value]
        self.values.drop(call)

    def _drop_dead(self, step: OperatorCalls) -> None:
        self._drop(v for v in dead_after(step, self.last_use) if v != step.entry)

    def _drop(self, values: Iterable[str]) -> None:
        for value in values:
            if value in self.held and value not in self.kept:
                del self.held[value]
                self.values.storages.release(value)
