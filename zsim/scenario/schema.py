"""The schema of scenario files, from the tables of strategies, families and figures: what each key
may be by itself.

`table_checks` holds tables to it; what keys mean together is `scenario`'s business. The two are the
only files with pydantic.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from functools import cache
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model, field_validator

from zsim.cluster.cluster import clusters
from zsim.engine.execution import (
    Accumulation,
    AttentionKernels,
    Casts,
    Loss,
    Norms,
    Products,
    Softmax,
)
from zsim.io.units import UnitError, parse_bytes, parse_time
from zsim.models.families import FAMILIES, presets
from zsim.models.operators import AttentionKind
from zsim.scenario.expect import FIGURES
from zsim.strategies import STRATEGIES
from zsim.strategies.flat_buffer.groups import Granularity

MAX_SIZE = 10_000_000
"""The largest width, vocabulary or count that a size or an option may have."""
MAX_USES = 64
"""The most often that a block runs in a forward, or a model before a backward."""
MAX_PAUSE_NS = 3600 * 10**9
DtypeName = Literal["fp32", "bf16", "fp16"]


class Table(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class UsesTable(Table):
    """How many times each block runs in a forward: each in a row, or the whole stack again."""

    times: int = Field(ge=1, le=MAX_USES)
    order: Literal["block", "stack"] = "block"


class ModelTable(Table):
    """A preset (perhaps with fewer layers), a family with sizes, a Hugging Face config.json, or a
    traced model's file.

    `unused`: blocks that own parameters and that forward passes by.
    """

    preset: str | None = None
    num_layers: int | None = Field(default=None, ge=1)
    attention: AttentionKind | None = None
    family: str | None = None
    sizes: dict[str, Any] = {}
    huggingface: str | None = None
    traced: str | None = None
    uses: int | UsesTable = 1
    unused: tuple[str, ...] = ()

    @field_validator("uses")
    @classmethod
    def _times(cls, value: int | UsesTable) -> int | UsesTable:
        if isinstance(value, int) and not 1 <= value <= MAX_USES:
            raise ValueError(f"expected 1 to {MAX_USES} uses of each block")
        return value


class BatchTable(Table):
    """One rank's batch."""

    micro_batch: int = Field(ge=1, le=1_000_000)
    sequence_length: int = Field(default=1, ge=1, le=10_000_000)
    accumulation: int = Field(default=1, ge=1, le=10_000)
    forwards: int = Field(default=1, ge=1, le=MAX_USES)


class SlowLinkTable(Table):
    """One NIC of one node whose link to the network carries less than the others', as a damaged
    cable does: `bandwidth` as "100 Gbit/s"."""

    node: int = Field(ge=0, le=100_000)
    nic: int = Field(ge=0, le=1024)
    bandwidth: str


class ClusterTable(Table):
    """A cluster preset, or a file as `zsim calibrate --out` writes it; `nodes` of it, or for a CPU
    host that many `ranks`.

    `nic_bandwidth` is what each NIC's link to the network carries where that is less than the
    preset's, as "100 Gbit/s" of a network that is oversubscribed or that others use; `slow_links`
    are those of its links that are slower than the rest, `fabric` the kind of its network where
    that is another than the preset's, as far as NCCL's collectives differ by it.
    """

    preset: str | None = None
    file: str | None = None
    nodes: int = Field(default=1, ge=1, le=100_000)
    ranks: int | None = Field(default=None, ge=1, le=1_000_000)
    nic_bandwidth: str | None = None
    slow_links: tuple[SlowLinkTable, ...] = Field(default=(), max_length=1024)
    fabric: Literal["ib", "roce", "efa", "tcp"] | None = None


class PrecisionTable(Table):
    """Dtypes of parameters in compute and of gradient reduction, and that of torch.autocast around
    forward."""

    parameters: DtypeName = "fp32"
    reduce: DtypeName = "fp32"
    autocast: Literal["none", "bf16", "fp16"] = "none"


class OptimizerTable(Table):
    """As torch.optim names them."""

    name: Literal["adamw", "sgd"] = "adamw"
    implementation: Literal["foreach", "for-loop", "fused"] = "foreach"
    learning_rate: float = Field(default=1e-3, ge=0)
    momentum: float = Field(default=0.0, ge=0, lt=1)
    weight_decay: float = Field(default=0.01, ge=0)
    clip_norm: float = Field(default=0.0, ge=0)


class CheckpointingTable(Table):
    """Which blocks, and which of their operators, are computed again in backward instead of being
    kept."""

    mode: Literal["none", "full", "selective"] = "none"
    every: int = Field(default=1, ge=1, le=MAX_SIZE)
    save: tuple[str, ...] = ()
    save_every: int = Field(default=1, ge=1, le=MAX_SIZE)
    recompute: tuple[str, ...] = ()
    early_stop: bool = True


class WrappingTable(Table):
    """Which modules are one param group: `every` consecutive blocks, or "all"; embedding and head
    in the root's or apart.

    `nested`: modules of each block that are units in its unit.
    """

    every: Annotated[int, Field(ge=1, le=MAX_SIZE)] | Literal["all"] = 1
    ends: Literal["root", "apart"] = "root"
    nested: tuple[str, ...] = ()


class AllocatorTable(Table):
    """How torch's caching allocator for CUDA is set (PYTORCH_CUDA_ALLOC_CONF); on a CPU nothing is
    reserved ahead."""

    expandable_segments: bool = False


class ExecutionTable(Table):
    """How the step is executed, where it changes time alone: pauses are times such as "12 ms"."""

    compile: bool = False
    float8: bool = False
    float8_casts: Casts = "fused"
    attention_kernels: AttentionKernels = "flash2"
    norms: Norms = "fused"
    loss: Loss = "fused"
    accumulation: Accumulation = "eager"
    softmax: Softmax = "eager"
    products: Products = "training"
    interference: bool = True
    step_overhead: str = "0 ns"
    micro_batch_overhead: str = "0 ns"
    issue_kernel: str | None = None

    @field_validator("step_overhead", "micro_batch_overhead", "issue_kernel")
    @classmethod
    def _time(cls, value: str | None) -> str | None:
        if value is not None and parse_time(value) > MAX_PAUSE_NS:
            raise ValueError("expected at most an hour")
        return value


class ScenarioTable(Table):
    """A whole scenario file; `strategy` is checked by its own table, which its name decides."""

    description: str = ""
    model: ModelTable
    batch: BatchTable
    cluster: ClusterTable
    strategy: dict[str, Any]
    precision: PrecisionTable = PrecisionTable()
    optimizer: OptimizerTable = OptimizerTable()
    activation_checkpointing: CheckpointingTable = CheckpointingTable()
    wrapping: WrappingTable = WrappingTable()
    execution: ExecutionTable = ExecutionTable()
    frozen: tuple[str, ...] = ()
    allocator: AllocatorTable = AllocatorTable()
    steps: int = Field(default=3, ge=1, le=1000)
    seed: int = Field(default=0, ge=0, le=2**31)
    expect: dict[str, int | str] = {}


def _fields(options: type[Any]) -> dict[str, Any]:
    """The fields of a dataclass as pydantic wants them: (type, default), `...` for none. Sizes are
    bounded."""
    hints = get_type_hints(options)
    kinds: dict[Any, Any] = {
        int: Annotated[int, Field(ge=0, le=MAX_SIZE)],
        float | None: Annotated[float, Field(ge=0, le=MAX_SIZE)] | None,
        Granularity: BucketSize,
    }
    return {
        field.name: (
            kinds.get(hints[field.name], hints[field.name]),
            ... if field.default is MISSING else field.default,
        )
        for field in fields(options)
    }


def _bucket_size(written: str) -> str | int:
    """ "unit", "parameter", or a size in bytes from its text."""
    if written in ("unit", "parameter"):
        return written
    try:
        nbytes = parse_bytes(written)
    except UnitError:
        nbytes = 0
    if nbytes < 1:
        raise ValueError('expected "unit", "parameter" or a size as "25 MiB"')
    return nbytes


BucketSize = Annotated[str, AfterValidator(_bucket_size)]
"""How a scenario writes a Granularity."""


@cache
def strategy_table(name: str) -> type[BaseModel]:
    """The schema of `strategy` for one strategy: the common keys and the strategy's own options."""
    strategy = STRATEGIES[name]
    axis_size = (int | None, Field(default=None, ge=1, le=1_000_000))
    own: dict[str, Any] = dict.fromkeys(strategy.axes, axis_size) | _fields(strategy.options)
    own |= {"name": (Literal[name], ...), "sync": (Literal["every", "last"], "every")}
    return create_model(
        f"strategy {name}",
        __base__=Table,
        **own,
    )


@cache
def sizes_table(family: str) -> type[BaseModel]:
    """The schema of `model.sizes` for one family."""
    return create_model(f"sizes of {family}", __base__=Table, **_fields(FAMILIES[family].sizes))


def json_schema() -> dict[str, Any]:
    """The JSON Schema of scenario files: one variant of `strategy` per strategy, of `model` per
    family and source."""
    schema = ScenarioTable.model_json_schema()
    schema["title"] = "zsim scenario"
    schema["properties"]["strategy"] = {
        "oneOf": [strategy_table(name).model_json_schema() for name in STRATEGIES]
    }
    model = schema["$defs"]["ModelTable"]["properties"]
    model["preset"] = {"enum": list(presets()), "title": "Preset"}
    model["family"] = {"enum": list(FAMILIES), "title": "Family"}
    model["sizes"] = {"anyOf": [sizes_table(name).model_json_schema() for name in FAMILIES]}
    schema["$defs"]["ClusterTable"]["properties"]["preset"] = {
        "enum": list(clusters()), "title": "Preset"
    }
    schema["properties"]["expect"]["propertyNames"] = {"enum": list(FIGURES)}
    return schema
