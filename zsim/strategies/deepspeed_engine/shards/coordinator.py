"""Coordinator: the parameters that DeepSpeed gathers, gathers ahead and releases at stage 3.

The first forward and backward record the order in which modules are called. From then on each call
gathers what is missing, and then more from the recorded order. These are up to
`stage3_prefetch_bucket_size` elements, while fewer than `stage3_max_live_parameters` are whole. A
module releases its parameters unless they persist, were passed by in gathering ahead for a later
use, or are used again within `stage3_max_reuse_distance`. With `zero_hpz_partition_size` a release
leaves a copy in larger shards, from which the next gathers are made until the step. Source:
deepspeed/runtime/zero/partitioned_param_coordinator.py.

It must not know ops or bytes: a `Carrier` does what it decides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, Protocol

from zsim.models.spec import ROOT, Parameter
from zsim.strategies.deepspeed_engine.options import ShardOptions

NEVER = -1


@dataclass(eq=False, slots=True)
class Gather:
    """An all-gather of several parameters at once, and those of them that nobody has waited for."""

    number: int
    parameters: tuple[Parameter, ...]
    pending: set[str]
    is_over: bool = False


class Carrier(Protocol):
    """Does what a Coordinator decides."""

    def gather(self, parameters: Sequence[Parameter], *, secondary: bool) -> Gather:
        """All-gather parameters, in the order of the model, from their shards or larger copies."""

    def wait(self, gather: Gather) -> None:
        """Wait for it, and give each parameter its own memory."""

    def forget(self, gather: Gather) -> None:
        """Drop what was gathered: all its parameters have been waited for."""

    def release(self, parameter: Parameter) -> None:
        """Drop a whole parameter."""

    def release_leaf(self, module: str, parameters: Sequence[Parameter]) -> None:
        """A leaf is about to release so many of its parameters."""

    def copy_secondary(self, parameter: Parameter) -> None:
        """Copy this rank's larger shard of a whole parameter."""

    def is_on_drive(self, parameter: Parameter) -> bool:
        """True where the shard is on a drive and has not been read."""

    def num_free(self) -> int:
        """Buffers that shards may be read into."""

    def read_ahead(self, parameters: Sequence[Parameter]) -> None:
        """Begin to read shards."""

    def rename(self, names: Mapping[str, Parameter]) -> None:
        """Shards that have been read are from now on those of other parameters, by fqn."""


@dataclass(slots=True)
class Coordinator:
    """`own`: the parameters of each module by its fqn. `persistent`: fqns of those that stay whole.
    `leaves`: modules that have others inside.
    """

    own: Mapping[str, Sequence[Parameter]]
    persistent: Set[str]
    options: ShardOptions
    carrier: Carrier
    leaves: Set[str] = frozenset()
    first_block: str = ""
    """The module at whose call the order breaks; none where it holds."""
    turned: Mapping[str, Parameter] = field(default_factory=dict)
    """Parameters of the block called before, by fqn: a break gives each block its name."""
    trace: list[str] = field(default_factory=list)
    secondary: set[str] = field(default_factory=set)
    """Fqns of parameters with a copy in larger shards: all of them from construction on."""
    mode: Literal["without", "records", "follows"] = "without"
    step: int = 0
    whole: set[str] = field(default_factory=set)
    in_flight: dict[str, Gather] = field(default_factory=dict)
    """Gathers that a parameter's own module has not waited for, also after another one has."""
    num_whole: int = 0
    """Elements counted as whole, from the last `begin` on."""
    _queue: deque[tuple[Parameter, int]] = field(default_factory=deque)
    _latest: dict[str, int] = field(default_factory=dict)
    """The last step for which each parameter was gathered, or passed by."""
    _active: dict[str, set[str]] = field(default_factory=dict)
    _decided: dict[tuple[str, int], set[str]] = field(default_factory=dict)
    _counted: dict[tuple[str, bool], tuple[frozenset[str], int]] = field(default_factory=dict)
    _in_backward: dict[str, None] = field(default_factory=dict)
    """Modules whose backward has begun and has not released them."""
    _recomputed: dict[str, dict[str, Parameter]] = field(default_factory=dict)
    """Frozen parameters that a recomputation gathered, by the module in whose backward it ran."""

    def __post_init__(self) -> None:
        if self._has_copies:
            self.secondary = {p.fqn for parameters in self.own.values() for p in parameters}

    @property
    def _has_copies(self) -> bool:
        return self.options.zero_hpz_partition_size > 1

    def begin(self) -> list[int]:
        """A forward begins. Returns the lengths of lists of which all ranks assert that they have
        the same, none once the trace is complete."""
        self._drop_in_flight()
        lengths: list[int] = []
        if self.mode == "without":
            lengths, self.mode = [0], "records"
        elif self.mode == "records":
            uses = sum(len(self.own[module]) for module in self.trace)
            lengths, self.mode = [len(self.trace), uses, uses], "follows"
        self._queue = deque(
            (parameter, step) for step, module in enumerate(self.trace)
            for parameter in self.own[module]
        ) if self.mode == "follows" else deque()
        self._latest, self.step, self.num_whole = {}, 0, 0
        return lengths

    def _drop_in_flight(self, *, breaks: bool = False) -> None:
        """Wait for what is gathered ahead, and release it; where the order `breaks`, copies have
        the names of from then on."""
        for fqn, gather in self.in_flight.items():
            self._wait(gather)
            parameter = next(p for p in gather.parameters if p.fqn == fqn)
            self._release(parameter, named=self.turned.get(fqn) if breaks else None)
        for fqn in list(self.in_flight):
            self._drop_pending(fqn)

    def fetch(self, module: str, *, backward: bool = False, again: bool = False) -> None:
        """`module` is called, or its backward begins; or a recomputation calls it `again`."""
        if self.mode == "follows" and module == self.first_block:
            self.mode = "without"
            self.trace.clear()
            self._drop_in_flight(breaks=True)
            self.carrier.rename(self.turned)
        if backward:
            self._in_backward[module] = None
        if self.mode == "records":
            self.trace.append(module)
        own = self.own[module]
        self._gather([p for p in own if not self._is_there(p)])
        for parameter in own:
            self._active.setdefault(parameter.fqn, set()).add(module)
            if again and self._in_backward and not parameter.requires_grad:
                self._keep_for_backward(parameter)
            if gather := self.in_flight.get(parameter.fqn):
                self._wait(gather)
                self._drop_pending(parameter.fqn)
        if self.mode == "follows":
            self._pass_own(own)
            self._gather_ahead()
        self.step += 1

    def _keep_for_backward(self, parameter: Parameter) -> None:
        """The module whose backward began last holds it, and releases it too."""
        holder = next(reversed(self._in_backward))
        self._recomputed.setdefault(holder, {})[parameter.fqn] = parameter
        self._active[parameter.fqn].add(holder)

    def _is_there(self, parameter: Parameter) -> bool:
        return parameter.fqn in self.whole or parameter.fqn in self.in_flight

    def _gather(self, parameters: Sequence[Parameter]) -> None:
        if not parameters:
            return
        self.num_whole += sum([parameter.numel for parameter in parameters])
        for secondary in (True, False):
            own = [p for p in parameters if (p.fqn in self.secondary) is secondary]
            if own:
                gather = self.carrier.gather(own, secondary=secondary)
                self.in_flight |= dict.fromkeys([p.fqn for p in own], gather)

    def _wait(self, gather: Gather) -> None:
        if not gather.is_over:
            gather.is_over = True
            self.carrier.wait(gather)
            self.whole.update(parameter.fqn for parameter in gather.parameters)

    def _drop_pending(self, fqn: str) -> None:
        gather = self.in_flight.pop(fqn)
        gather.pending.discard(fqn)
        if not gather.pending:
            self.carrier.forget(gather)

    def _pass_own(self, own: Sequence[Parameter]) -> None:
        """Take this use of the module's own parameters from the queue, unless gathering ahead has.
        """
        wanted = {p.fqn for p in own if self._latest.get(p.fqn, NEVER) < self.step}
        passed = set[str]()
        while self._queue and len(passed) < len(wanted):
            parameter, step = self._queue.popleft()
            self._latest[parameter.fqn] = step
            passed.add(parameter.fqn)

    def _gather_ahead(self) -> None:
        options, numel = self.options, 0
        budget = min(
            options.stage3_max_live_parameters - self.num_whole,
            options.stage3_prefetch_bucket_size,
        )
        ahead: dict[str, Parameter] = {}
        while self._queue and numel < budget:
            if self.carrier.is_on_drive(self._queue[0][0]):
                break
            parameter, step = self._queue.popleft()
            fqn = parameter.fqn
            self._latest[fqn] = max(self._latest.get(fqn, NEVER), step)
            if fqn not in ahead and not self._is_there(parameter):
                ahead[fqn] = parameter
                numel += parameter.numel
        self._gather(list(ahead.values()))
        if options.stage3_prefetch_bucket_size:
            self._read_ahead()

    def _read_ahead(self) -> None:
        """Read shards of what comes next, up to twice the elements of gathers in flight and more by
        the last."""
        free = self.carrier.num_free()
        if free <= 0:
            return
        most = 2 * sum(
            parameter.numel for fqn, gather in self.in_flight.items()
            for parameter in gather.parameters if parameter.fqn == fqn
        )
        ahead, passed = list[Parameter](), 0
        for parameter, _ in self._queue:
            if passed > most or len(ahead) >= free:
                break
            if self.carrier.is_on_drive(parameter):
                ahead.append(parameter)
            passed += parameter.numel
        if ahead:
            self.carrier.read_ahead(ahead)

    def release(self, module: str, *, backward: bool = False) -> None:
        """`module` has returned, or its backward is over."""
        recomputed = dict[str, Parameter]()
        if backward:
            self._in_backward.pop(module, None)
            recomputed = self._recomputed.pop(module, recomputed)
        own = self.own[module]
        if self.mode == "follows":  # DeepSpeed decides once for each step of the trace
            key = (module, self.step)
            if key not in self._decided:
                self._decided[key] = self._gone(module)
            gone = self._decided[key]
        else:
            gone = {parameter.fqn for parameter in own}
        if recomputed:
            gone = gone.union(recomputed.keys() - self.persistent)
        if module in self.leaves:
            self.carrier.release_leaf(module, [p for p in own if p.fqn in gone])
        for parameter in dict.fromkeys((*own, *recomputed.values())) if recomputed else own:
            self._active[parameter.fqn].discard(module)
            if parameter.fqn in gone:
                self._release(parameter)

    def release_leftovers(self) -> None:
        """Backward is over: modules whose input needs no gradient have no hook that releases them.
        """
        while self._in_backward:
            module, _ = self._in_backward.popitem()
            recomputed = self._recomputed.pop(module, {})
            for parameter in dict.fromkeys((*self.own[module], *recomputed.values())):
                self._active[parameter.fqn].discard(module)
                if parameter.fqn not in self.persistent:
                    self._release(parameter)

    def _gone(self, module: str) -> set[str]:
        """The module's own parameters that it releases here."""
        gone = {
            p.fqn for p in self.own[module]
            if p.fqn not in self.persistent and self._latest.get(p.fqn, NEVER) <= self.step
        }
        distance = 0
        for later in islice(self.trace, self.step, None):
            if not gone or distance >= self.options.stage3_max_reuse_distance:
                break
            met, numel = self._met(later, module in self.leaves)
            gone -= met
            distance += numel
        return gone

    def _met(self, module: str, recursively: bool) -> tuple[frozenset[str], int]:
        """The parameters that DeepSpeed counts of a later module, and their elements. A leaf that
        is released counts all inside it; any other module counts none inside a leaf."""
        key = (module, recursively)
        if key not in self._counted:
            counted = () if module in self.leaves else self.own[module]
            if recursively:
                inside = f"{module}."
                counted = tuple(
                    parameter for name, own in self.own.items()
                    if module == ROOT or name == module or name.startswith(inside)
                    for parameter in own
                )
            self._counted[key] = frozenset(p.fqn for p in counted), sum(p.numel for p in counted)
        return self._counted[key]

    def _release(self, parameter: Parameter, *, named: Parameter | None = None) -> None:
        if parameter.fqn in self.whole and not self._active.get(parameter.fqn):
            self.whole.remove(parameter.fqn)
            self.num_whole -= parameter.numel
            copied = named or parameter
            if self._has_copies and copied.fqn not in self.secondary:
                self.secondary.add(copied.fqn)
                self.carrier.copy_secondary(copied)
            self.carrier.release(parameter)

    def release_all(self, parameters: Sequence[Parameter]) -> None:
        """The optimizer steps: nothing stays whole."""
        for parameter in parameters:
            if gather := self.in_flight.get(parameter.fqn):
                self._wait(gather)
                self._drop_pending(parameter.fqn)
            self._active.pop(parameter.fqn, None)
            self._release(parameter)
