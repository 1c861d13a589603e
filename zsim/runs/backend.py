"""The Backend protocol: what it can measure, how a run is asked for, and the Run it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, cast, get_args

from zsim.cluster.cluster import ClusterSpec
from zsim.errors import ArgumentError, listed
from zsim.io.arguments import described
from zsim.ir.ops import Kernel
from zsim.ir.run import RunRecord
from zsim.models.training_options import Device, Dtype
from zsim.runs.modes import NUMERICS_MODES, NumericsMode

if TYPE_CHECKING:
    from zsim.autograd.traced.model import TracedModel
    from zsim.cluster.testbed import Layout
    from zsim.scenario.scenario import Scenario


INTERPRETERS = ("executor", "observer")
MOST_SECONDS = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """The GPUs of this machine: torch's name of the first, their number, and the versions of driver
    and NCCL."""

    name: str
    count: int
    driver: str
    nccl: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The senses of a backend; compare() reports the checks of all others as `unsupported`."""

    memory: bool
    numerics: bool
    time: bool
    device: str
    """"cpu" or "cuda": what plan() must plan for so that the comparison is fair."""
    spans: bool = False
    """True where a Run has spans of a recorded step; of what sees time it has them anyway."""
    gpus: Gpus | None = None
    """GPUs of this machine, where ranks run on them."""
    faults: tuple[str, ...] = ()
    """Kinds of faults of a scenario that the backend's ranks can have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of a run: ranks that a fake run observes, all ranks unfolded, the real interpreter,
    and seconds until a rank counts as hung.

    ArgumentError for values that they cannot have, and for some ranks together with all.
    """

    ranks: Sequence[int] | None = None
    all_ranks: bool = False
    interpreter: str | None = None
    timeout_s: float = 120.0
    testbed: Layout | None = None
    """The shaped network in whose hosts ranks run; None for the machine's own loopback."""
    emulated_on: ClusterSpec | None = None
    """The cluster whose times of forward and backward a timer takes in timed steps; None for real
    compute."""
    module: str | None = None
    """The user's function that makes the module to run, in place of the scenario's model."""
    device: Device | None = None
    """The devices that ranks run on; None for the backend's own."""
    numerics: NumericsMode | None = None
    """Ranks that train the reference; None for as many as bytes and time allow."""
    hops: bool = False
    """The Run keeps the hops of rings that are simulated as steps, for a trace."""
    progress: Callable[[str], None] = field(default=lambda _: None, compare=False, repr=False)
    """Told where long work stands: rank and collective of a fake run, phase and step of others."""

    def __post_init__(self) -> None:
        if self.ranks is not None:
            object.__setattr__(self, "ranks", tuple(dict.fromkeys(self.ranks)))
            if self.all_ranks:
                raise ArgumentError(
                    where="ranks", expected="some ranks or all of them",
                    found="ranks together with all_ranks", remedy="leave one of the two out",
                )
        if self.interpreter not in (None, *INTERPRETERS):
            raise _unfit("interpreter", listed(INTERPRETERS), self.interpreter)
        if self.device not in (None, *get_args(Device)):
            raise _unfit("device", listed(get_args(Device)), self.device)
        if self.numerics not in (None, *NUMERICS_MODES):
            raise _unfit("numerics", listed(NUMERICS_MODES), self.numerics)
        if self.module is not None and self.emulated_on is not None:
            raise ArgumentError(
                where="compute emulated", expected="a model of the scenario",
                found="your own module, which has no timers", remedy="leave one of them out",
            )
        require_seconds(self.timeout_s, where="timeout_s")


def require_seconds(seconds: object, *, where: str) -> None:
    """ArgumentError for a limit that is no number of seconds up to a day."""
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not 0 < cast(float, seconds) <= MOST_SECONDS:
        raise _unfit(where, f"seconds between 0 and {MOST_SECONDS}", seconds)


def _unfit(where: str, expected: str, value: object) -> ArgumentError:
    return ArgumentError(where=where, expected=expected, found=described(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRequest:
    """One collective to measure: full messages of `nbytes` over `ranks` ranks, `repeats` times,
    each after `computed_ns` of compute; or `beside` compute, for what that loses.

    Ranks that are `stride` apart make a group, and all groups communicate at once, as a mesh's do.
    """

    kind: str
    nbytes: int
    ranks: int
    repeats: int
    computed_ns: int = 0
    beside: bool = False
    apart_ns: int = 0
    """Time between the ranks' arrivals. The collective is then timed from the last arrival; else
    each rank times it from its own."""
    stride: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRequest:
    """Measurements of a machine with `world_size` ranks at work: steps of `scenarios`, each
    `repeats` times, and `collectives`.

    `products` of matrices are in float32, each (m, n, k). Causal `attentions` are too, each (batch,
    heads, tokens, width of a head).
    """

    world_size: int
    scenarios: tuple[Scenario, ...]
    collectives: tuple[CollectiveRequest, ...]
    repeats: int
    timeout_s: float
    budget_s: float = MOST_SECONDS
    """Seconds beyond which repetitions get fewer, down to a few."""
    testbed: Layout | None = None
    products: tuple[tuple[int, int, int], ...] = ()
    attentions: tuple[tuple[int, int, int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineMeasurements:
    """Nanoseconds of each repetition on the slowest rank, by scenario, collective, product and
    attention of the request.

    A step here moves nothing: it has the host's and the device's work, and no time of the network.
    """

    steps: tuple[tuple[int, ...], ...]
    collectives: tuple[tuple[int, ...], ...]
    products: tuple[tuple[int, ...], ...] = ()
    attentions: tuple[tuple[int, ...], ...] = ()
    """Two for each attention that was asked for: forward, backward."""
    others_share: float = 0.0
    """Share of the machine's cores that other work took meanwhile; 0 where it is not known."""
    provenance: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRequest:
    """Measurements of single kernels on the device of each of `world_size` ranks, and of
    collectives over all of them, each (kind, bytes of the full message).

    Each is repeated within `budget_s` seconds, a few times at least.
    """

    world_size: int
    kernels: tuple[Kernel, ...]
    collectives: tuple[tuple[str, int], ...]
    budget_s: float
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedCall:
    """Nanoseconds of one call on the slowest rank, repetition by repetition: on the device, and of
    the host to issue it."""

    device: tuple[int, ...]
    issue: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMeasurements:
    """The measurements of a DeviceRequest, in its order."""

    kernels: tuple[RepeatedCall, ...]
    collectives: tuple[RepeatedCall, ...]


class DeviceBackend(Protocol):
    """A backend that can measure the devices of the machine that it runs on."""

    name: str

    def measure_device(self, request: DeviceRequest) -> DeviceMeasurements:
        """All measurements; ZsimError when a rank fails."""
        ...


class MeasuringBackend(Protocol):
    """A backend that can measure the machine that it runs on."""

    def measure(self, request: MachineRequest) -> MachineMeasurements:
        """All measurements; ZsimError when a rank fails."""
        ...


class DeviceChoice(Protocol):
    """A backend whose devices the user can choose."""

    def on(self, device: Device) -> Backend:
        """The backend on such devices; ArgumentError where it has no such form."""
        ...


class ModuleBackend(Protocol):
    """A backend that can run a user's own module."""

    def with_module(
        self, scenario: Scenario, module: str, *, timeout_s: float, device: Device | None = None
    ) -> Scenario:
        """The scenario with the module that the function called `module` makes, in place of its
        model, traced for `device`, by default the backend's own.

        ZsimError where it cannot be loaded or traced, or not within `timeout_s` seconds.
        """
        ...


class TracingBackend(Protocol):
    """A backend that can trace a module of torch."""

    def trace(
        self, name: str, inputs: Sequence[str], *, dtype: Dtype | None,
        autocast: Dtype | Literal["none"] = "none", device: Device,
        recomputed: bool, micro_batches: Sequence[int] = (), lengths: Sequence[int] = (),
        units: Sequence[str] | None = None,
    ) -> tuple[TracedModel, ...]:
        """The module `mine:MyModel`, or `hf:config.json`, traced on inputs as "2x2048:int64", or
        as "BxS:int64" at each size; ZsimError where that cannot be done."""
        ...


class Backend(Protocol):
    """Anything that turns a scenario into a Run. Found through the entry-point group
    `zsim.backends`; constructed with no arguments."""

    name: str

    def capabilities(self) -> Capabilities:
        """The backend's senses, or BackendUnavailableError with how to get it."""
        ...

    def run(self, scenario: Scenario, *, options: RunOptions) -> RunRecord:
        """Run the scenario; ZsimError (exit code 1) when a rank fails."""
        ...
