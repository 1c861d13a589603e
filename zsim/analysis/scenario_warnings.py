"""Warnings of a scenario that runs but costs more, or less, than its user may think: a line each,
with figures from the Program.

It knows scenarios and Programs, and refuses nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from zsim.analysis.lint import unit_rules
from zsim.analysis.lint.case import LintCase
from zsim.autograd.traced.model import TracedModel
from zsim.cluster.cluster import ClusterSpec
from zsim.engine.costs import host_work
from zsim.engine.costs.host_work import PASSES
from zsim.engine.faults.fault import LostLink, SlowLink
from zsim.errors import Caveat
from zsim.io.units import format_bytes
from zsim.ir.ops import COLLECTIVES
from zsim.ir.program import Program
from zsim.models.training_options import DTYPE_NAMES, DTYPE_NBYTES
from zsim.scenario.plan import planned
from zsim.scenario.scenario import Scenario
from zsim.strategies import STRATEGIES
from zsim.strategies.building import optimizers
from zsim.strategies.building.host_step import located, settings_of
from zsim.strategies.building.kernels import MASTER_DTYPE

LONGER = 1.1
"""Time of a step on the host, over that with other threads, from which on there is a warning."""


def caveats(scenario: Scenario) -> tuple[Caveat, ...]:
    """Caveats of `scenario`, which runs all the same."""
    return tuple(map(Caveat, (
        *_half_precision(scenario), *_single_precision(scenario), *_own_copies(scenario),
        *_launches_alone(scenario), *_compiled(scenario), *_compressed(scenario),
        *_reserved(scenario), *_one_unit(scenario), *_one_backward(scenario),
        *_idle_links(scenario), *_torch_step(scenario), *_threads(scenario),
        *STRATEGIES[scenario.strategy].drive_caveats(
            scenario.offload, scenario.options, scenario.model, scenario.mesh, scenario.precision
        ),
        *_lossy_loads(scenario),
    )))


def _lossy_loads(scenario: Scenario) -> Iterator[str]:
    """Checkpoints of which DeepSpeed loads a part."""
    lossy = scenario.checkpoint.format == "deepspeed" and scenario.offload.uses_drives
    if lossy and "checkpoint" in scenario.tables:
        yield (
            "checkpoint: of states on drives DeepSpeed loads float32 weights alone; moments begin "
            'anew, sub-groups in host memory stay as made; offload.optimizer = "cpu" loads all'
        )


def _half_precision(scenario: Scenario) -> Iterator[str]:
    """Parameters of fp16 that AdamW steps themselves, where there is no master copy."""
    keeps = STRATEGIES[scenario.strategy].formula.keeps
    if (
        scenario.precision.parameters == "float16"
        and scenario.optimizer.name == "adamw"
        and (keeps == "no master copy" or not scenario.precision.master)
    ):
        yield (
            f"adamw steps fp16 parameters, without a master copy in {scenario.strategy}: its eps "
            "is 0 in fp16, and parameters become infinite in torch too; take bf16"
        )


def _single_precision(scenario: Scenario) -> Iterator[str]:
    """Products in float32 on a GPU whose tensor cores they do not use."""
    device = scenario.cluster.device
    if (
        scenario.cluster.kind == "cuda"
        and scenario.precision.products == "float32"
        and scenario.execution.float32_products == "ieee"
        and device.bfloat16 > device.float32
    ):
        tf32 = ' or execution.float32_products = "tf32"' if device.tf32 else ""
        key = "autocast" if _is_plain(scenario) else "parameters"
        yield (
            f"precision: products are in float32, without TF32; on {device.name} bf16 has "
            f'{device.bfloat16 / device.float32:.0f} times the peak: precision.{key} = "bf16"'
            f"{tf32} takes tensor cores"
        )


def _is_plain(scenario: Scenario) -> bool:
    return STRATEGIES[scenario.strategy].library == "torch"


def _own_copies(scenario: Scenario) -> Iterator[str]:
    """Master copies of a plain module, which no library makes."""
    dtype = scenario.precision.parameters
    if _is_plain(scenario) and dtype != "float32" and scenario.precision.master:
        yield (
            f"precision.master: torch alone has no float32 copies of {DTYPE_NAMES[dtype]} "
            "parameters, your script makes and steps them; master = false is "
            f"model.to(torch.{dtype})"
        )


def _launches_alone(scenario: Scenario) -> Iterator[str]:
    """A cluster's file of one's own from which an operator takes the host no longer than a launch.
    """
    overheads = scenario.cluster.overheads
    if scenario.cluster.kind == "cuda" and overheads.issue_operator <= overheads.issue_kernel:
        yield (
            "cluster: its file has no overheads.issue_operator, so an eager operator takes the "
            "host as long as a launch; GPU servers take 42 to 60 us"
        )


def _compiled(scenario: Scenario) -> Iterator[str]:
    """Bytes of a compiled step, which are those of an eager one."""
    if scenario.execution.compile:
        yield (
            "execution.compile: memory is that of eager kernels, as in real runs here; "
            "torch.compile mostly takes less, in torchtitan's Llama 3.1 8B 5 GiB of 82"
        )


def _torch_step(scenario: Scenario) -> Iterator[str]:
    """Steps of torch's loops on the host, where DeepSpeed's own default is one pass."""
    offload, optimizer = scenario.offload, scenario.optimizer
    share = PASSES.get(optimizer.implementation)
    if (
        scenario.cluster.kind == "cuda" and not STRATEGIES[scenario.strategy].is_own
        and offload.optimizer and offload.adam == "torch" and optimizer.name == "adamw" and share
    ):
        yield (
            f'offload.adam: the host steps with torch\'s {optimizer.implementation}, at {share} of '
            'DeepSpeedCPUAdam\'s rate, which DeepSpeed takes for "AdamW" with offload unless told '
            'otherwise: offload.adam = "deepspeed"'
        )


def _threads(scenario: Scenario) -> Iterator[str]:
    """Threads of torch's ranks for a step on the host, which its launcher sets and nobody told."""
    offload, execution = scenario.offload, scenario.executed
    strategy, cluster = STRATEGIES[scenario.strategy], scenario.cluster
    moved = strategy.offloads(scenario.options)
    if not execution.torchrun or not (moved or offload.optimizer):
        return
    settings = settings_of(scenario.optimizer, offload)
    kernels = located(
        optimizers.kernels(
            [1], optimizer=settings, device="cpu",
            dtype=scenario.precision.stepped if moved else MASTER_DTYPE,
        ),
        implementation=settings.implementation,
    )
    fastest, slowest = host_work.by_threads(kernels, cluster, execution)
    cores = int(host_work.threads_of(cluster))
    if 1 / fastest >= LONGER:
        with_more = (
            f"{cores}: OMP_NUM_THREADS={cores} and execution.host_threads = {cores}" if cores
            else "all cores: set OMP_NUM_THREADS and execution.host_threads"
        )
        yield (
            "execution.host_threads: the host's step has one thread a rank, as torchrun sets "
            f"OMP_NUM_THREADS, and takes {1 / fastest:.1f} times as long as with {with_more}"
        )
    elif slowest >= LONGER:
        yield (
            f"execution.host_threads: the host's step has {cores or 'all'} cores; with one thread, "
            f"as accelerate and Ray set OMP_NUM_THREADS, it takes {slowest:.1f} times as long: "
            "execution.host_threads = 1"
        )


def _compressed(scenario: Scenario) -> Iterator[str]:
    """Buckets of DDP that a hook reduces in another dtype, whose casts torch's own hook holds until
    their all-reduces end."""
    dtypes = scenario.precision
    is_cast = dtypes.reduce != dtypes.parameters and DTYPE_NBYTES[dtypes.reduce] == 2
    if not STRATEGIES[scenario.strategy].bucket_cap or not is_cast:
        return
    steady = planned(scenario).program.of_rank(0).steady
    casts = {op.unit: op.nbytes for op in steady if op.kind == "all_reduce"}
    if len(casts) > 1:
        more = sum(casts.values()) - min(casts.values())
        yield (
            f"precision.reduce: memory has the cast of a bucket at a time; torch's "
            f"{DTYPE_NAMES[dtypes.reduce]}_compress_hook may hold all until they are reduced, at "
            f"most {format_bytes(more)} more"
        )


def _reserved(scenario: Scenario) -> Iterator[str]:
    """Memory that GPUs may reserve for the strategy beside what is told."""
    if scenario.cluster.kind == "cuda":
        yield from STRATEGIES[scenario.strategy].memory_caveats(
            scenario.options, scenario.model, scenario.precision
        )


def _one_unit(scenario: Scenario) -> Iterator[str]:
    """A model that is one param group, as the lint finds it; not where the lint is not to."""
    if "one-unit" not in scenario.lint_ignore:
        for finding in unit_rules.one_unit(LintCase(scenario)):
            yield f"{finding.fact}; {finding.remedy}"


def _one_backward(scenario: Scenario) -> Iterator[str]:
    """A traced module without units under DDP, whose reductions really begin within its backward.
    """
    strategy, model = STRATEGIES[scenario.strategy], scenario.model
    if (
        isinstance(model, TracedModel) and len(model.units) == 1 and strategy.nests == "nothing"
        and scenario.world_size > 1
    ):
        yield (
            "model.traced: of one unit, whose reductions are predicted to begin when all of its "
            "backward is over, later than they do; trace it with units"
        )


def _idle_links(scenario: Scenario) -> Iterator[str]:
    """Faults of links that no collective of the step goes over."""
    of_links = {
        number: fault for number, fault in enumerate(scenario.faults)
        if isinstance(fault, SlowLink | LostLink)
    }
    program = planned(scenario).program if of_links else None
    for number, fault in of_links.items():
        if program and not _is_used(program, scenario.cluster, fault):
            yield (
                f"faults[{number}] ({fault}) does nothing: no collective goes over that link; "
                "take a NIC of ranks that talk to another node"
            )


def _is_used(program: Program, cluster: ClusterSpec, link: SlowLink | LostLink) -> bool:
    groups = {
        program.mesh.group(name, rank)
        for rank in cluster.ranks_at(link.node, link.nic)
        for name in {op.group for op in program.of_rank(rank).steady if op.kind in COLLECTIVES}
    }
    return any(cluster.needs(group, node=link.node, nic=link.nic) for group in groups)
