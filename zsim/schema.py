"""The schema of scenario files, from the tables of strategies, families and figures. The only file with pydantic.

It checks each key by itself and says what is wrong in the scenario's words; what they mean together is `scenario`'s
business.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import MISSING, fields
from functools import cache
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, create_model, field_validator

from zsim.errors import shown
from zsim.execution import Accumulation, AttentionKernels, Casts, Loss, Norms, Products, Softmax
from zsim.expect import FIGURES
from zsim.hardware import clusters
from zsim.mesh import AXES, RESERVED_AXES
from zsim.models import FAMILIES, presets
from zsim.operators import AttentionKind
from zsim.sharding import Granularity
from zsim.strategies import STRATEGIES
from zsim.units import UnitError, parse_bytes, parse_time

MAX_SIZE = 10_000_000
"""The largest width, vocabulary or count that a size or an option may have."""
MAX_USES = 64
"""The most often that a block runs in a forward, or a model before a backward."""
MAX_PAUSE_NS = 3600 * 10**9
WORDS = (
    ("a valid integer", "a whole number"),
    ("a valid string", "text"),
    ("a valid boolean", "true or false"),
    ("a valid tuple", "a list"),
)
"""pydantic's words for types, and those of scenario files."""
FILES = ("model.huggingface", "model.traced", "cluster.file")
"""The keys that name files, which have keys of their own."""
DtypeName = Literal["fp32", "bf16", "fp16"]


class _Table(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class UsesTable(_Table):
    """How many times each block runs in a forward: each in a row, or the whole stack again."""

    times: int = Field(ge=1, le=MAX_USES)
    order: Literal["block", "stack"] = "block"


class ModelTable(_Table):
    """A preset (perhaps with fewer layers), a family with sizes, a Hugging Face config.json, or a traced model's file.

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


class BatchTable(_Table):
    """One rank's batch."""

    micro_batch: int = Field(ge=1, le=1_000_000)
    sequence_length: int = Field(default=1, ge=1, le=10_000_000)
    accumulation: int = Field(default=1, ge=1, le=10_000)
    forwards: int = Field(default=1, ge=1, le=MAX_USES)


class SlowLinkTable(_Table):
    """One NIC of one node whose link to the network carries less than the others', as a damaged cable does: `bandwidth` as "100 Gbit/s"."""

    node: int = Field(ge=0, le=100_000)
    nic: int = Field(ge=0, le=1024)
    bandwidth: str


class ClusterTable(_Table):
    """A cluster preset, or a file as `zsim calibrate --out` writes it; `nodes` of it, or for a CPU host that many `ranks`.

    `slow_links` are those of its links that are slower than the rest, `fabric` the kind of its network where that is another than the
    preset's, as far as NCCL's collectives differ by it.
    """

    preset: str | None = None
    file: str | None = None
    nodes: int = Field(default=1, ge=1, le=100_000)
    ranks: int | None = Field(default=None, ge=1, le=1_000_000)
    slow_links: tuple[SlowLinkTable, ...] = Field(default=(), max_length=1024)
    fabric: Literal["ib", "roce", "efa", "tcp"] | None = None


class PrecisionTable(_Table):
    """Dtypes of parameters in compute and of gradient reduction, and that of torch.autocast around forward."""

    parameters: DtypeName = "fp32"
    reduce: DtypeName = "fp32"
    autocast: Literal["none", "bf16", "fp16"] = "none"


class OptimizerTable(_Table):
    """As torch.optim names them."""

    name: Literal["adamw", "sgd"] = "adamw"
    implementation: Literal["foreach", "for-loop", "fused"] = "foreach"
    learning_rate: float = Field(default=1e-3, ge=0)
    momentum: float = Field(default=0.0, ge=0, lt=1)
    weight_decay: float = Field(default=0.01, ge=0)
    clip_norm: float = Field(default=0.0, ge=0)


class CheckpointingTable(_Table):
    """Which blocks, and which of their operators, are computed again in backward instead of being kept."""

    mode: Literal["none", "full", "selective"] = "none"
    every: int = Field(default=1, ge=1, le=MAX_SIZE)
    save: tuple[str, ...] = ()
    save_every: int = Field(default=1, ge=1, le=MAX_SIZE)
    recompute: tuple[str, ...] = ()
    early_stop: bool = True


class WrappingTable(_Table):
    """Which modules are one param group: `every` consecutive blocks, or "all"; embedding and head in the root's or apart.

    `nested`: modules of each block that are units in its unit.
    """

    every: Annotated[int, Field(ge=1, le=MAX_SIZE)] | Literal["all"] = 1
    ends: Literal["root", "apart"] = "root"
    nested: tuple[str, ...] = ()


class AllocatorTable(_Table):
    """How torch's caching allocator for CUDA is set (PYTORCH_CUDA_ALLOC_CONF); on a CPU nothing is reserved ahead."""

    expandable_segments: bool = False


class ExecutionTable(_Table):
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


class ScenarioTable(_Table):
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
    """The fields of a dataclass as pydantic wants them: (type, default), `...` for none. Sizes are bounded."""
    hints = get_type_hints(options)
    kinds: dict[Any, Any] = {
        int: Annotated[int, Field(ge=0, le=MAX_SIZE)],
        float | None: Annotated[float, Field(ge=0, le=MAX_SIZE)] | None,
        Granularity: BucketSize,
    }
    return {
        field.name: (kinds.get(hints[field.name], hints[field.name]), ... if field.default is MISSING else field.default)
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
        __base__=_Table,
        **own,
    )


@cache
def sizes_table(family: str) -> type[BaseModel]:
    """The schema of `model.sizes` for one family."""
    return create_model(f"sizes of {family}", __base__=_Table, **_fields(FAMILIES[family].sizes))


def json_schema() -> dict[str, Any]:
    """The JSON Schema of scenario files: one variant of `strategy` per strategy, of `model` per family and source."""
    schema = ScenarioTable.model_json_schema()
    schema["title"] = "zsim scenario"
    schema["properties"]["strategy"] = {"oneOf": [strategy_table(name).model_json_schema() for name in STRATEGIES]}
    model = schema["$defs"]["ModelTable"]["properties"]
    model["preset"] = {"enum": list(presets()), "title": "Preset"}
    model["family"] = {"enum": list(FAMILIES), "title": "Family"}
    model["sizes"] = {"anyOf": [sizes_table(name).model_json_schema() for name in FAMILIES]}
    schema["$defs"]["ClusterTable"]["properties"]["preset"] = {"enum": list(clusters()), "title": "Preset"}
    schema["properties"]["expect"]["propertyNames"] = {"enum": list(FIGURES)}
    return schema


def validated(schema: type[BaseModel], table: object, *, prefix: str, problems: list[str]) -> Any:
    """`table` as `schema`, or None after adding one line per bad key to `problems`."""
    try:
        return schema.model_validate(_frozen(table))
    except ValidationError as error:
        complaints: dict[str, list[str]] = {}
        for item in error.errors(include_url=False):
            key, complaint = _complaint(schema, item, prefix)
            complaints.setdefault(key, []).append(complaint)
        problems += [f"{key}: {_joined(parts)}" for key, parts in complaints.items()]
    return None


@cache
def _one_key(name: str) -> type[BaseModel]:
    """The schema of a scenario that has the key `name` only."""
    field = ScenarioTable.model_fields[name]
    own: dict[str, Any] = {name: (field.annotation, field)}
    return create_model(f"scenario's {name}", __base__=_Table, **own)


def parts(table: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """Each top-level key of a scenario by itself, None where it is missing or wrong; `problems` gets one line per bad key.

    One key's mistake hides no other's.
    """
    known = ScenarioTable.model_fields
    problems += [f"{str(key)[:100]}: unknown key{did_you_mean(str(key), known)}" for key in table if key not in known]
    found: dict[str, Any] = {}
    for name in known:
        given = {name: table[name]} if name in table else {}
        checked = validated(_one_key(name), given, prefix="", problems=problems)
        found[name] = None if checked is None else getattr(checked, name)
    return found


def _frozen(value: object) -> object:
    """Lists as tuples, so that the frozen schema can take them."""
    if isinstance(value, dict):
        return {key: _frozen(inner) for key, inner in value.items()}
    return tuple(_frozen(inner) for inner in value) if isinstance(value, list) else value


def _joined(complaints: list[str]) -> str:
    """One complaint of the several that a value of no allowed type gives."""
    heads = list(dict.fromkeys(complaint.split(", found ")[0].removeprefix("expected ") for complaint in complaints))
    if len(heads) == 1:
        return complaints[0]
    return f"expected {' or '.join(heads)}, found {complaints[0].partition(', found ')[2]}"


def _complaint(schema: type[BaseModel], item: Any, prefix: str) -> tuple[str, str]:
    """The key and what is wrong with it. Parts of the location that name the variant of a union are left out."""
    path = [str(part)[:100] for part in item["loc"][: 1 if prefix else 2]]
    key = ".".join([*([prefix] if prefix else []), *path])
    if item["type"] == "extra_forbidden":
        return key, f"unknown key{did_you_mean(path[-1], _names_at(schema, path[:-1]))}"
    if item["type"] == "missing":
        return key, "expected a value, found nothing"
    expected = item["msg"][:200].replace("Input should be ", "expected ").removeprefix("Value error, ")
    for pydantics, ours in WORDS:
        expected = expected.replace(pydantics, ours)
    expected = re.sub(r"a valid dictionary or instance of \w+", "a table, { key = value }", expected)
    if item["type"] == "literal_error":
        expected = expected.replace("'", '"')  # as TOML and the rest of the message quote
    return key, f"{expected}, found {shown(item['input'])}"


def _names_at(schema: type[BaseModel], path: list[str]) -> list[str]:
    for part in path:
        found = schema.model_fields.get(part)
        if found is None or not isinstance(found.annotation, type) or not issubclass(found.annotation, BaseModel):
            return []
        schema = found.annotation
    return list(schema.model_fields)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a complaint about `word`: the nearest of the `known` words, or all of them."""
    near = difflib.get_close_matches(word, known, n=1)
    if near:
        return f", did you mean {near[0]}?"
    return f"; known are {', '.join(known)}" if known else ""


def each_key_once(problems: Iterable[str]) -> tuple[str, ...]:
    """The first complaint about each key; of a key that names a file, all about that file's own keys."""
    first: dict[str, str] = {}
    for problem in problems:
        key = problem.partition(": ")[0]
        first.setdefault(problem if key in FILES else key, problem)
    return tuple(first.values())


def strategy_of(table: object, problems: list[str]) -> Any:
    """The `strategy` table as its own schema, or None after adding what is wrong to `problems`."""
    if not isinstance(table, dict):
        return None
    reserved = [axis for axis in RESERVED_AXES if axis in table]
    problems += [f"strategy.{axis}: tensor and pipeline parallelism are reserved words for now" for axis in reserved]
    name = table.get("name")
    if not isinstance(name, str) or name not in STRATEGIES:
        found = "nothing" if name is None else shown(name)
        hint = did_you_mean(name, list(STRATEGIES)) if isinstance(name, str) else ""
        problems.append(f"strategy.name: expected one of {', '.join(STRATEGIES)}, found {found}{hint}")
        return None
    rest = {key: value for key, value in table.items() if key not in reserved and not _idle(name, key, value)}
    return validated(strategy_table(name), rest, prefix="strategy", problems=problems)


def _idle(name: str, key: str, value: object) -> bool:
    """Whether `key` is a mesh axis that the strategy does not use, given as 1."""
    return key in AXES and key not in STRATEGIES[name].axes and value == 1 and isinstance(value, int)
