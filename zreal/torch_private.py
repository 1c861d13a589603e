"""Private names of torch, and names that may move: one small function each, and no other file uses
them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._autograd import _get_sequence_nr
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.autograd.graph import _engine_run_backward
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor, _sharding_prop
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes


def is_fake(tensor: torch.Tensor) -> bool:
    """True for a tensor of FakeTensorMode, which has a shape but no memory."""
    return isinstance(tensor, FakeTensor)


def is_dtensor_type(kind: type) -> bool:
    """True where a dispatched type is DTensor."""
    return issubclass(kind, DTensor)


def clear_cublas_workspaces() -> None:
    """Free the workspace that torch keeps for each cuBLAS handle and stream of this process."""
    torch._C._cuda_clearCublasWorkspaces()


@contextmanager
def fake_group(*, rank: int, world_size: int) -> Iterator[None]:
    """The fake process group, whose collectives return at once and move nothing.

    At its end DTensor's cache of meshes is cleared. Otherwise DTensor would take a mesh of the same
    shape for one whose groups are gone.
    """
    from torch.distributed.tensor import debug  # loads torch's compiler, for half a second

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        with _strided_shards_sought_once():
            yield
    finally:
        dist.destroy_process_group()
        debug._clear_sharding_prop_cache()


@contextmanager
def _strided_shards_sought_once() -> Iterator[None]:
    """DTensor seeks strided shards among all arguments of an op once, not once for each tensor.

    A foreach op of n tensors scans its 4n arguments n times in torch 2.13: most of the first step
    of a deep model. What is found is the same. Older versions do not seek them.
    """
    original = getattr(_sharding_prop, "_propagate_use_strided_shard_flag", None)
    if original is None:
        yield
        return
    last: list[Any] = [None, True]

    def sought_once(op_strategy: Any, op_schema: Any) -> None:
        if last[0] is not op_schema:
            last[:] = (
                op_schema,
                any(
                    isinstance(placement, _StridedShard)
                    for spec in op_schema.args_spec
                    for placement in spec.placements
                ),
            )
        if last[1]:
            original(op_strategy, op_schema)

    _sharding_prop._propagate_use_strided_shard_flag = sought_once
    try:
        yield
    finally:
        _sharding_prop._propagate_use_strided_shard_flag = original


def hybrid_shard_grad_op() -> ShardingStrategy:
    """FSDP's strategy that shards over one mesh axis and keeps unsharded parameters until backward.
    """
    return ShardingStrategy._HYBRID_SHARD_ZERO2


def flat_parameters(root: FullyShardedDataParallel) -> list[torch.Tensor]:
    """The flat parameters of an FSDP module: this rank's shards, of which parameters may be views.
    """
    flats = (module._flat_param for module in FullyShardedDataParallel.fsdp_modules(root))
    return [flat for flat in flats if flat is not None]


def process_group(arguments: tuple[object, ...]) -> dist.ProcessGroup | None:
    """The process group among a c10d operator's arguments, None if there is none."""
    for argument in arguments:
        # functional collectives name their group, besides the reduction
        if isinstance(argument, str):
            with suppress(RuntimeError, ValueError, KeyError):
                return cast(Any, _resolve_process_group)(argument)
        if isinstance(argument, torch.ScriptObject):
            with suppress(RuntimeError):  # a reduction, or other options
                return dist.ProcessGroup.unbox(argument)
    return None


def number_of_group(group: dist.ProcessGroup) -> int:
    """The number of a group among those of the same ranks, in the order in which they were made."""
    world: Any = distributed_c10d._world
    ranks = dist.get_process_group_ranks(group)
    alike = [
        str(each.group_name) for each in world.pg_names
        if each.size() == len(ranks) and dist.get_process_group_ranks(each) == ranks
    ]
    name = str(group.group_name)
    return alike.index(name) + 1 if name in alike else 1


def reduction(arguments: tuple[object, ...]) -> str:
    """The reduction among a c10d operator's arguments, as "MAX"; "" for a sum, without one, and
    where torch does not tell it."""
    objects = (cast(Any, each) for each in arguments if isinstance(each, torch.ScriptObject))
    for argument in objects:
        if argument._has_method("op"):
            number = argument.op()
            kinds = cast(Any, dist.ReduceOp).RedOpType.__members__
            names = (name for name, kind in kinds.items() if int(kind) == number)
            return next((name for name in names if name != "SUM"), "")
    return ""


def all_gather(
    output: torch.Tensor, source: torch.Tensor, *, group: dist.ProcessGroup, async_op: bool = False
) -> dist.Work | None:
    """The all-gather into one tensor, by its name in torch 2.13 or the older one."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return cast(Any, call(output, source, group=group, async_op=async_op))


def reduce_scatter(
    output: torch.Tensor, source: torch.Tensor, *, group: dist.ProcessGroup, async_op: bool = False
) -> dist.Work | None:
    """The reduce-scatter of one tensor, by its name in torch 2.13 or the older one."""
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return cast(Any, call(output, source, group=group, async_op=async_op))


def works(result: object) -> list[dist.Work]:
    """The Works among what a c10d operator returned.

    NCCL makes none where a collective was called without async_op: it runs on the current stream.
    """
    items = result if isinstance(result, tuple) else (result,)
    boxed = (dist.Work.unbox(each) for each in items if isinstance(each, torch.ScriptObject))
    return [work for work in boxed if work is not None]


def fake_mode() -> Any:
    """Context in which tensors have shapes and no memory; torch refuses operators that need values.
    """
    return FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True)


def real_tensors() -> Any:
    """Context in which tensors are real again, inside `fake_mode`."""
    return unset_fake_temporarily()


@contextmanager
def failures_unlogged() -> Iterator[None]:
    """Inside, torch raises the error of an operator on fake tensors without logging its traceback.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")

    def other(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("failed while attempting to run meta")

    log.addFilter(other)
    try:
        yield
    finally:
        log.removeFilter(other)


TRUNCATED_NORMAL = "_no_grad_trunc_normal_"
SKIPPED_ON_META = (TRUNCATED_NORMAL, "orthogonal_", "dirac_", "sparse_")
"""Functions of torch.nn.init that do nothing to a tensor on the meta device."""


@contextmanager
def initialised_by(draw: Callable[..., torch.Tensor], names: Iterable[str]) -> Iterator[None]:
    """Inside, `draw` stands for functions of torch.nn.init: it gets torch's own first."""
    originals = {name: getattr(torch.nn.init, name) for name in names}
    for name, original in originals.items():
        setattr(torch.nn.init, name, partial(draw, original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(torch.nn.init, name, original)


def nothing_drawn() -> AbstractContextManager[None]:
    """Context manager in which truncated normal distributions are not drawn, since torch reads
    drawn values to check their bounds."""
    return initialised_by(_undrawn, [TRUNCATED_NORMAL])


def _undrawn(_: object, tensor: torch.Tensor, *__: Any, **___: Any) -> torch.Tensor:
    return tensor


def without_memory(kind: type[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """A tensor of a class with a `__torch_dispatch__`, of the shape and dtype of `like`."""
    made: torch.Tensor = torch.Tensor._make_wrapper_subclass(
        kind, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
    )
    return made


def extension_folder(name: str) -> str:
    """The folder in which torch compiles an extension in C++ of that name; it is made."""
    from torch.utils import cpp_extension  # takes a moment, and few need it

    return cpp_extension._get_build_directory(name, False)


def is_view(tensor: torch.Tensor) -> bool:
    """True where autograd knows a tensor as a view, which then holds its base."""
    return bool(tensor._is_view())


def next_sequence_number() -> int:
    """Sequence number of the next autograd node that this thread makes."""
    return int(_get_sequence_nr())


def sequence_number(node: Any) -> int:
    """Sequence number of an autograd node; of ready nodes the engine runs the largest first."""
    return int(node._sequence_nr())


def version(tensor: torch.Tensor) -> int:
    """Number of in-place changes to a tensor's memory, through any tensor that shares it."""
    return int(tensor._version)


def unwatched_functions() -> Any:
    """Context in which torch-function modes see nothing."""
    return torch._C.DisableTorchFunction()


def no_modes() -> Any:
    """Context in which no mode, as that of the meter, sees what torch dispatches."""
    return _disable_current_modes()


def below_autograd() -> Any:
    """Context in which operators record no gradients and are not decomposed for them."""
    return torch._C._AutoDispatchBelowAutograd()


def run_backward(result: torch.Tensor, gradient: torch.Tensor) -> None:
    """`torch.autograd.backward(result, gradient)` inside which torch-function modes stay active."""
    _engine_run_backward(
        (result,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of the backward that is running, as DDP and FSDP do."""
    cast(Any, torch.autograd.Variable)._execution_engine.queue_callback(callback)


_Seen = Callable[[str, tuple[Any, ...], Callable[[], Any]], Any]
_WATCHING: dict[str, list[_Seen]] = {}
"""Functions that see the calls of c10d operators, by operator, the outermost first."""


@contextmanager
def c10d_calls(names: Iterable[str], calls: _Seen) -> Iterator[None]:
    """Inside, `calls` gets each of these c10d operators with its arguments, and carries it out.

    Calls from C++, as DDP's, pass here too. Other operators cost nothing, unlike under a dispatch
    mode. Where one is inside another, the inner `calls` is called first, and calls the outer.
    """
    library = torch.library.Library("c10d", "IMPL")
    after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    names = tuple(names)
    for name in names:
        watching = _WATCHING.setdefault(name, [])
        watching.append(calls)
        if len(watching) > 1:  # torch takes one kernel of an operator from Python
            continue
        op: Any = getattr(torch.ops.c10d, name.removeprefix("c10d::")).default

        def call(keys: Any, *args: Any, op: Any = op, name: str = name) -> Any:
            __tracebackhide__ = True
            # no function here may know itself: a cycle would hold the tensors until it is collected
            carry_out = partial(op.redispatch, keys & after, *args)
            for watcher in _WATCHING[name]:
                carry_out = partial(watcher, name, args, carry_out)
            return carry_out()

        library.impl(name, call, "BackendSelect", with_keyset=True)
    try:
        yield
    finally:
        for name in names:
            _WATCHING[name].pop()
        library._destroy()


def operator(name: str) -> Any:
    """The overload of torch's operators called `name`, as "sum.dim_IntList"."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def with_kernels(key: str) -> frozenset[str]:
    """The operators of torch that have a kernel of their own for a dispatch key."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return frozenset(n.removeprefix("aten::") for n in names if n.startswith("aten::"))


@contextmanager
def replaced_kernels(key: str, kernels: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Inside, `kernels` by operator in the place of those that torch has for a dispatch key."""
    library = torch.library.Library("aten", "IMPL", key)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel is replaced is meant
            for name, kernel in kernels.items():
                library.impl(name, kernel, allow_override=True)
        yield
    finally:
        library._destroy()


def no_autocast() -> AbstractContextManager[object]:
    """Inside, autocast of a CPU casts nothing."""
    autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    return torch._C._ExcludeDispatchKeyGuard(autocast)


@contextmanager
def inputs_cast_by_custom_fwd() -> Iterator[None]:
    """Inside, `torch.amp.custom_fwd` of CUDA casts inputs on a CPU."""
    module = cast(Any, torch.amp.autocast_mode)
    original = module._cast

    def cast_inputs(value: Any, of: str, dtype: torch.dtype) -> Any:
        return original(value, "cpu" if of == "cuda" else of, dtype)

    module._cast = cast_inputs
    try:
        yield
    finally:
        module._cast = original
