"""DeepSpeed's own engine at ZeRO stages 1 to 3, around an optimizer of torch.optim.

It is imported when a rank first needs it, as it takes two seconds. Its loop differs from torch's:
the engine runs backward, counts micro-batches, clips and clears gradients.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from shutil import which
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zreal.meters.held_memory import state_tensors
from zreal.modules.initial_values import Make, by_unit
from zreal.modules.modules import Model
from zreal.modules.optimizers import make_optimizer, trained
from zreal.observer.subjects import Subject
from zreal.observer.subjects.deepspeed_ops import require_async_io, require_compiled
from zreal.processes.rank_folder import make_folder, remove_folders, require_room
from zsim.errors import BackendUnavailableError
from zsim.models.training_options import BLOCK_NBYTES, DTYPE_NAMES, QUEUE_DEPTH
from zsim.scenario.scenario import Scenario
from zsim.strategies import STRATEGIES
from zsim.strategies.deepspeed_engine.options import VERSION, as_config

STAGES = {"deepspeed1": 1, "deepspeed2": 2, "deepspeed3": 3}
"""The stage of each strategy."""
OFFLOADED = {"optimizer": "optimizer", "parameters": "param"}
"""DeepSpeed's words for states that are offloaded."""
LEAST_PATCH = 8
"""The release of that version from which on the engine does what is modelled."""
SCALE_POWER = 8
"""The loss of fp16 is scaled by 2 to this power: DeepSpeed's own 16 would have it skip the first
steps, whose gradients overflow."""
COMPILERS = ("ninja", "g++")
"""Tools that compile DeepSpeed's Adam for the host."""
COMPILED_ON_CPU = "deepspeed_shm_comm"
"""Collectives in shared memory, which DeepSpeed would compile at each start, and no training calls.
"""


def require(scenario: Scenario) -> None:
    """BackendUnavailableError where a strategy of DeepSpeed's finds no DeepSpeed, or another."""
    if scenario.strategy not in STAGES:
        return
    try:
        installed = version("deepspeed")
    except PackageNotFoundError:
        installed = ""
    patch = installed.removeprefix(f"{VERSION}.").partition("+")[0]
    if not (patch.isdecimal() and int(patch) >= LEAST_PATCH):
        raise BackendUnavailableError(
            where=f"strategy {scenario.strategy}",
            expected=f"DeepSpeed {VERSION}.{LEAST_PATCH} or later of {VERSION}, whose engine is "
                     "observed",
            found=f"DeepSpeed {installed}" if installed else "no DeepSpeed",
            remedy="DS_BUILD_OPS=0 pip install --no-build-isolation 'zsim[real,deepspeed]'",
        )
    if STAGES[scenario.strategy] == 3 and scenario.options.trace == "breaks":
        raise BackendUnavailableError(
            where="strategy.trace", expected="blocks that change places from forward to forward",
            found="a model that runs them as they stand", remedy="use the backend sim",
        )


class EngineOptimizer(torch.optim.Optimizer):
    """The step of an engine, which clears gradients by itself."""

    def __init__(self, engine: Any) -> None:
        super().__init__([torch.empty(0)], {})
        self.engine = engine

    def step(self, closure: Any = None) -> Any:
        """Step at the end of accumulation."""
        return self.engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing, as no gradient is left."""


def build(scenario: Scenario, model: Model, mesh: DeviceMesh, make: Make) -> Subject:
    """`model` under DeepSpeed's engine, over all ranks of the mesh."""
    require_kernels(scenario, device_type=mesh.device_type)
    deepspeed = _deepspeed(mesh.device_type)
    if scenario.offload.uses_drives:
        require_async_io(deepspeed.ops.op_builder.AsyncIOBuilder().is_compatible())
    require_compiled(scenario, device_type=mesh.device_type)
    # an engine before it in this process may have had other groups for copies of parameters
    deepspeed.utils.groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    if mesh.device_type == "cpu":  # torch computes in fp16 there, though slowly
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    for fqns in by_unit(scenario.model).values():
        make(fqns)
    inner = _inner(deepspeed, scenario, model)
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, optimizer=inner, config=config(scenario), dist_init_required=False
    )

    sharded = STAGES[scenario.strategy] == 3
    masters = "fp32_partitioned_groups_flat" if sharded else "single_partition_of_fp32_groups"
    shards = _shards(optimizer, model) if sharded else list(
        getattr(optimizer, "param_buffer_of_bit16_for_cpu_offload_groups", ())
    )

    @contextmanager
    def micro_batch(last: bool) -> Iterator[None]:
        yield
        if not last:
            engine.step()  # counts the micro-batch

    return Subject(
        module=engine, optimizer=EngineOptimizer(engine), micro_batch=micro_batch,
        # gradients are sums over micro-batches, as everywhere
        backward=partial(engine.backward, scale_wrt_gas=False),
        states=lambda: _states(optimizer, [*getattr(optimizer, masters), *state_tensors(inner)]),
        flat=lambda: shards, gradients=lambda: _gradients(optimizer, getattr(optimizer, masters)),
        dtype=scenario.precision.parameters, clip=lambda norm: None,
        whole=lambda kind: _whole(kind, scenario, model, deepspeed, optimizer),
    )


def _inner(deepspeed: Any, scenario: Scenario, model: Model) -> torch.optim.Optimizer:
    """The optimizer that the engine steps: torch's, or DeepSpeed's for the host."""
    settings = scenario.optimizer
    if scenario.offload.adam == "torch":
        return make_optimizer(settings, trained(model))
    made: torch.optim.Optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(
        trained(model), lr=settings.learning_rate, weight_decay=settings.weight_decay
    )
    return made


def require_kernels(scenario: Scenario, *, device_type: str) -> None:
    """BackendUnavailableError where the scenario needs kernels that DeepSpeed has for GPUs alone,
    or cannot compile."""
    shards = STRATEGIES[scenario.strategy].formula.number == 3
    if device_type == "cpu" and shards and scenario.options.zero_quantized_weights:
        raise BackendUnavailableError(
            where="strategy.zero_quantized_weights", expected="a GPU, for DeepSpeed's own kernels",
            found="a CPU", remedy="leave it out, or use the backend sim",
        )
    missing = [tool for tool in COMPILERS if not which(tool)]
    if scenario.offload.adam == "deepspeed" and missing:
        raise BackendUnavailableError(
            where='offload.adam = "deepspeed"',
            expected=f"{' and '.join(COMPILERS)} on the path, with which DeepSpeed compiles its "
                     "Adam",
            found=f"no {missing[0]}", remedy="install it, or use adam = \"torch\"",
        )


def _deepspeed(device_type: str) -> Any:
    """The module deepspeed, in the process group that this rank is in already."""
    if dist.get_backend() == "fake":
        raise BackendUnavailableError(
            where="backend fake", expected="ranks of their own for DeepSpeed's engine",
            found="a process for all of them", remedy="use the backend gloo, or nccl",
        )
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    if device_type == "cuda":  # the engine takes the GPU of this number, which ranks may share
        os.environ["LOCAL_RANK"] = str(torch.cuda.current_device())
    for name, value in (
        ("DS_ACCELERATOR", device_type), ("RANK", rank), ("LOCAL_RANK", rank),
        ("WORLD_SIZE", size), ("LOCAL_SIZE", size),
    ):
        os.environ.setdefault(name, value)
    logging.disable(logging.WARNING)
    # it calls collectives by names that torch 2.13 has others for
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
    import deepspeed

    deepspeed.ops.__compatible_ops__[COMPILED_ON_CPU] = False
    deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False)
    return deepspeed


def config(scenario: Scenario) -> dict[str, Any]:
    """The engine's config: the strategy's options, which have DeepSpeed's names, and what other
    tables say."""
    precision = scenario.precision
    zero = as_config(scenario.options, scenario.model)
    checks = zero.pop("check_grad_overflow", True)
    offload = scenario.offload
    for state in offload.states:
        zero[f"offload_{OFFLOADED[state]}"] = {
            "device": getattr(offload, state), "pin_memory": offload.pin_memory
        }
    requests: dict[str, Any] = {}
    if offload.optimizer == "nvme":
        folder = _folder(scenario)
        if offload.parameters == "nvme":
            zero["offload_param"] |= {
                "nvme_path": folder, "max_in_cpu": offload.max_in_cpu,
                "buffer_count": offload.parameter_buffer_count,
                "buffer_size": offload.parameter_buffer_size,
            }
        zero["offload_optimizer"] |= {
            "nvme_path": folder, "buffer_count": offload.buffer_count,
            "pipeline_read": offload.pipeline_read, "pipeline_write": offload.pipeline_write,
        }
        requests = {
            "block_size": offload.block_size or BLOCK_NBYTES,
            "queue_depth": offload.queue_depth or QUEUE_DEPTH,
        }
    return {
        "aio": requests,
        "train_micro_batch_size_per_gpu": scenario.batch.micro_batch,
        "gradient_accumulation_steps": scenario.batch.accumulation,
        "gradient_clipping": scenario.optimizer.clip_norm,
        "communication_data_type": DTYPE_NAMES[precision.reduce],
        "bf16": {"enabled": precision.parameters == "bfloat16", "check_grad_overflow": checks},
        "fp16": {
            "enabled": precision.parameters == "float16", "initial_scale_power": SCALE_POWER
        },
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": STAGES[scenario.strategy], **zero
        },
    }


def _folder(scenario: Scenario) -> str:
    """A new folder for a rank's files in place of drives; BackendUnavailableError without room."""
    require_room(scenario.world_size * STRATEGIES[scenario.strategy].drive_nbytes(
        scenario.offload, scenario.options, scenario.model, scenario.mesh, scenario.precision,
        scenario.optimizer,
    ))
    return str(make_folder())


@contextmanager
def files_removed() -> Iterator[None]:
    """Files in place of drives are gone behind it; the engine opens them by name as it trains."""
    try:
        yield
    finally:
        remove_folders(os.getpid())


def _shards(optimizer: Any, model: Model) -> list[torch.Tensor]:
    """The flat buffers of this rank's shards, on the device or on the host. Shards of frozen
    parameters have memory of their own, and so have small ones where others are on drives."""
    on_host: list[torch.Tensor] = optimizer.param_groups_fp16_flat_cpu_memory
    parameters: list[Any] = list(model.parameters())
    apart = [
        each.ds_tensor for each in parameters if not each.requires_grad
        or (optimizer.params_in_nvme_and_cpu and each.ds_tensor.final_location is None)
    ]
    return [*(on_host or [optimizer.lp_param_buffer.detach()]), *apart]


def _states(optimizer: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The ones of `tensors` with memory of their own. Pipelines leave those on drives as views of
    buffers."""
    swapper = getattr(optimizer, "optimizer_swapper", None)
    buffers = [] if swapper is None else swapper.swap_buffer_manager.all_buffers
    begins = {each.untyped_storage().data_ptr() for each in buffers}
    return [each for each in tensors if each.untyped_storage().data_ptr() not in begins]


def _gradients(optimizer: Any, masters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients that stay from step to step: of shards, of master copies on the host, and whole
    ones there of several micro-batches."""
    flat = getattr(optimizer, "grad_partitions_flat_buffer", None)
    return [
        *([flat] if flat is not None else []),
        *(master.grad for master in masters if master.grad is not None),
        *getattr(optimizer, "accumulated_grads_in_cpu", {}).values(),
    ]


def _link_as_dealt(optimizer: Any) -> None:
    """Have DeepSpeed read each parameter and its gradient where `round_robin_gradients` deals it,
    for it looks for them in the order of the model."""
    in_order = optimizer.bit16_groups
    optimizer.bit16_groups = optimizer.round_robin_bit16_groups
    optimizer._link_all_hp_params()
    optimizer.bit16_groups = in_order


def _whole(
    kind: str, scenario: Scenario, model: Model, deepspeed: Any, optimizer: Any
) -> dict[str, torch.Tensor]:
    """Whole float32 parameters, those that are trained first, or gradients as the step will have
    unscaled and clipped them; by all ranks."""
    if STRATEGIES[scenario.strategy].reorders(scenario.options):
        _link_as_dealt(optimizer)
    utils, loss_scale = deepspeed.utils, float(optimizer.loss_scale)
    read = {
        "parameters": utils.safe_get_full_fp32_param, "gradients": utils.safe_get_full_grad
    }[kind]
    whole = dict[str, torch.Tensor]()
    for name, parameter in sorted(
        model.named_parameters(), key=lambda named: not named[1].requires_grad
    ):
        if parameter.requires_grad:
            whole[name] = read(parameter).detach().clone()
        elif kind == "parameters":
            with deepspeed.zero.GatheredParameters([parameter]):
                whole[name] = parameter.detach().clone()
    if kind == "gradients":
        whole = {name: tensor.float() / loss_scale for name, tensor in whole.items()}
    clip_norm = scenario.optimizer.clip_norm
    if kind == "gradients" and clip_norm:
        norm = torch.stack([tensor.double().norm() for tensor in whole.values()]).norm()
        scale = float(((norm + 1e-6) / clip_norm).clamp(min=1.0))
        whole = {name: tensor / scale for name, tensor in whole.items()}
    return whole
