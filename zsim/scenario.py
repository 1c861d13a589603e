"""Scenario files: TOML, strict and frozen; every problem listed with file and key. The only file that knows pydantic."""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from zsim import guards
from zsim.errors import ScenarioError
from zsim.expect import Expectation, expectation
from zsim.hardware import ClusterSpec, clusters, load_cluster
from zsim.mesh import AXES, RESERVED_AXES, Mesh
from zsim.model import ModelSpec
from zsim.models import FAMILIES, huggingface, load_preset
from zsim.models import build as build_model
from zsim.strategies import STRATEGIES
from zsim.training import Batch, Optimizer, Precision
from zsim.units import UnitError

MAX_WORK = 4_000_000
"""Ranks × layers × micro-batches beyond which a scenario is refused before any simulation."""

MAX_SIZE = 10_000_000

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
DtypeName = Literal["fp32", "bf16", "fp16"]


class _Table(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class ModelTable(_Table):
    """A preset (perhaps with fewer layers), a family with sizes, or a Hugging Face config.json."""

    preset: str | None = None
    num_layers: int | None = Field(default=None, ge=1)
    attention: Literal["explicit", "sdpa"] | None = None
    family: Literal["mlp", "gpt", "llama"] | None = None
    sizes: dict[str, int | str | bool | list[int]] | None = None
    huggingface: str | None = None


class BatchTable(_Table):
    """One rank's batch."""

    micro_batch: int = Field(ge=1, le=1_000_000)
    sequence_length: int = Field(default=1, ge=1, le=10_000_000)
    accumulation: int = Field(default=1, ge=1, le=10_000)


class ClusterTable(_Table):
    """A cluster preset; `nodes` of it, or for a CPU host that many `ranks`."""

    preset: str
    nodes: int = Field(default=1, ge=1, le=100_000)
    ranks: int | None = Field(default=None, ge=1, le=1_000_000)


class PrecisionTable(_Table):
    """Dtypes of parameters in compute and of gradient reduction."""

    parameters: DtypeName = "fp32"
    reduce: DtypeName = "fp32"


class OptimizerTable(_Table):
    """As torch.optim names them."""

    name: Literal["adamw", "sgd"] = "adamw"
    implementation: Literal["foreach", "for-loop", "fused"] = "foreach"
    learning_rate: float = Field(default=1e-3, gt=0)
    momentum: float = Field(default=0.0, ge=0, lt=1)
    weight_decay: float = Field(default=0.01, ge=0)


class _ScenarioTable(_Table):
    description: str = ""
    model: ModelTable
    batch: BatchTable
    cluster: ClusterTable
    strategy: dict[str, Any]
    precision: PrecisionTable = PrecisionTable()
    optimizer: OptimizerTable = OptimizerTable()
    steps: int = Field(default=3, ge=1, le=1000)
    seed: int = Field(default=0, ge=0, le=2**31)
    expect: dict[str, int | str] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A whole scenario, checked. `text` is what it was read from, so that ranks of a real run read the same."""

    name: str
    description: str
    model: ModelSpec
    batch: Batch
    cluster: ClusterSpec
    mesh: Mesh
    strategy: str
    options: Any
    sync: Literal["every", "last"]
    precision: Precision
    optimizer: Optimizer
    steps: int
    seed: int
    expect: tuple[Expectation, ...]
    text: str

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.mesh.world_size


@cache
def strategy_table(name: str) -> type[BaseModel]:
    """The schema of `strategy` for one strategy: the common keys and the strategy's own options."""
    strategy = STRATEGIES[name]
    common: dict[str, Any] = {axis: (int | None, Field(default=None, ge=1, le=1_000_000)) for axis in strategy.axes}
    hints = get_type_hints(strategy.options)
    own: dict[str, Any] = {field.name: (hints[field.name], field.default) for field in fields(strategy.options)}
    return create_model(
        f"{name}_strategy",
        __base__=_Table,
        name=(Literal[name], ...),
        sync=(Literal["every", "last"], "every"),
        **common,
        **own,
    )


@cache
def sizes_table(family: str) -> type[BaseModel]:
    """The schema of `model.sizes` for one family."""
    sizes = FAMILIES[family].sizes
    hints = get_type_hints(sizes)
    own: dict[str, Any] = {
        field.name: (hints[field.name], ... if field.default is MISSING else field.default) for field in fields(sizes)
    }
    return create_model(f"{family}_sizes", __base__=_Table, **own)


def json_schema() -> dict[str, Any]:
    """The JSON Schema of scenario files, with one variant of `strategy` per strategy."""
    schema = _ScenarioTable.model_json_schema()
    schema["properties"]["strategy"] = {"oneOf": [strategy_table(name).model_json_schema() for name in STRATEGIES]}
    schema["title"] = "zsim scenario"
    return schema


def load(path: str | Path) -> Scenario:
    """The scenario in a file; ScenarioError listing every problem, each with file and key."""
    file = Path(path)
    try:
        if not file.is_file():
            raise ScenarioError((f"{file}: no such file; `zsim list scenarios` shows those that come with the project",))
        with file.open("rb") as stream:
            data = stream.read(guards.MAX_BYTES + 1)
    except OSError as error:
        raise ScenarioError((f"{file}: cannot be read: {error.strerror}",)) from None
    return parse(data, where=str(file), folder=file.parent)


def parse(data: bytes, *, where: str, folder: Path | None = None) -> Scenario:
    """The scenario in `data`; `where` names it in messages, `folder` is where a config.json is looked for."""
    text = guards.check_text(data, where=where)
    try:
        table = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise ScenarioError((f"{where}: not TOML: {str(error)[:200]}",)) from None
    problems: list[str] = []
    checked = _validated(_ScenarioTable, table, prefix="", problems=problems)
    strategy = _strategy(table.get("strategy"), problems)
    if checked is None or strategy is None or problems:
        raise ScenarioError(tuple(f"{where}: {problem}" for problem in problems))
    return _assemble(checked, strategy, where=where, text=text, folder=folder)


def _validated(schema: type[BaseModel], table: object, *, prefix: str, problems: list[str]) -> Any:
    try:
        return schema.model_validate(table)
    except ValidationError as error:
        for item in error.errors(include_url=False):
            problems.append(_complaint(schema, item, prefix))
    except RecursionError:
        problems.append(f"{prefix or 'file'}: nested too deeply")
    return None


def _complaint(schema: type[BaseModel], item: Any, prefix: str) -> str:
    path = [str(part) for part in item["loc"]]
    key = ".".join([*([prefix] if prefix else []), *path])[:200]
    if item["type"] == "extra_forbidden":
        return f"{key}: unknown key{_did_you_mean(path[-1], _names_at(schema, path[:-1]))}"
    if item["type"] == "missing":
        return f"{key}: expected a value, found nothing"
    return f"{key}: {item['msg'][:200]}, found {str(item['input'])[:60]!r}"


def _names_at(schema: type[BaseModel], path: list[str]) -> list[str]:
    for part in path:
        found = schema.model_fields.get(part)
        if found is None or not isinstance(found.annotation, type) or not issubclass(found.annotation, BaseModel):
            return []
        schema = found.annotation
    return list(schema.model_fields)


def _did_you_mean(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f", did you mean {near[0]}?" if near else f"; known are {', '.join(known)}" if known else ""


def _strategy(table: object, problems: list[str]) -> Any:
    if not isinstance(table, dict):
        return None
    reserved = [axis for axis in RESERVED_AXES if axis in table]
    problems += [f"strategy.{axis}: tensor and pipeline parallelism are reserved words for now" for axis in reserved]
    name = table.get("name")
    if not isinstance(name, str) or name not in STRATEGIES:
        found = "nothing" if name is None else f"{str(name)[:60]!r}"
        hint = _did_you_mean(name, list(STRATEGIES)) if isinstance(name, str) else ""
        problems.append(f"strategy.name: expected one of {', '.join(STRATEGIES)}, found {found}{hint}")
        return None
    rest = {key: value for key, value in table.items() if key not in reserved}
    return _validated(strategy_table(name), rest, prefix="strategy", problems=problems)


def _assemble(table: _ScenarioTable, strategy: Any, *, where: str, text: str, folder: Path | None) -> Scenario:
    """Everything that one table alone cannot check: the model, the cluster, the mesh on it, and the work they make."""
    problems: list[str] = []

    def attempt(make: Any) -> Any:
        try:
            return make()
        except ScenarioError as error:
            problems.extend(error.problems)
        except UnitError as error:
            problems.append(str(error))
        return None

    model = attempt(lambda: _model(table.model, table.batch, folder))
    cluster = attempt(lambda: _cluster(table.cluster))
    mesh = attempt(lambda: _mesh(strategy, cluster.num_ranks)) if cluster is not None else None
    expect = [attempt(lambda k=key, v=value: expectation(k, v)) for key, value in table.expect.items()]
    if model is not None and mesh is not None:
        work = mesh.world_size * len(model.units) * table.batch.accumulation
        if work > MAX_WORK:
            problems.append(f"batch.accumulation: ranks × units × micro-batches is {work:,}, expected at most {MAX_WORK:,}")
    if problems:
        raise ScenarioError(tuple(f"{where}: {problem}" for problem in problems))
    kind = STRATEGIES[strategy.name]
    return Scenario(
        name=Path(where).stem,
        description=table.description,
        model=model,
        batch=Batch(**table.batch.model_dump()),
        cluster=cluster,
        mesh=mesh,
        strategy=strategy.name,
        options=kind.options(**{field.name: getattr(strategy, field.name) for field in fields(kind.options)}),
        sync=strategy.sync,
        precision=Precision(
            parameters=_DTYPES[table.precision.parameters],  # type: ignore[arg-type]
            reduce=_DTYPES[table.precision.reduce],  # type: ignore[arg-type]
        ),
        optimizer=Optimizer(**table.optimizer.model_dump()),
        steps=table.steps,
        seed=table.seed,
        expect=tuple(item for item in expect if item is not None),
        text=text,
    )


def _model(table: ModelTable, batch: BatchTable, folder: Path | None) -> ModelSpec:
    given = [key for key in ("preset", "family", "huggingface") if getattr(table, key) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise ScenarioError((f"model: expected one of preset, family or huggingface, found {found}",))
    length = batch.sequence_length
    if table.preset is not None:
        return load_preset(
            table.preset, sequence_length=length, num_layers=table.num_layers, attention=table.attention
        )
    if table.huggingface is not None:
        return huggingface.load(table.huggingface, folder=folder, sequence_length=length)
    return _from_sizes(table, length)


def _from_sizes(table: ModelTable, length: int) -> ModelSpec:
    family, problems = str(table.family), list[str]()
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in (table.sizes or {}).items()}
    checked = _validated(sizes_table(family), given, prefix="model.sizes", problems=problems)
    numbers = [n for value in given.values() for n in (value if isinstance(value, tuple) else (value,))]
    if any(isinstance(n, int) and not 0 <= n <= MAX_SIZE for n in numbers):
        problems.append(f"model.sizes: expected sizes from 0 to {MAX_SIZE:,}")
    if checked is None or problems:
        raise ScenarioError(tuple(problems))
    try:
        return build_model(family, FAMILIES[family].sizes(**dict(checked)), name=family, sequence_length=length)
    except (ValueError, ZeroDivisionError, IndexError) as error:
        raise ScenarioError((f"model.sizes: they make no model: {error}",)) from None


def _cluster(table: ClusterTable) -> ClusterSpec:
    if table.preset not in clusters():
        hint = _did_you_mean(table.preset, list(clusters()))
        raise ScenarioError((f'cluster.preset: unknown cluster "{table.preset[:60]}"{hint}',))
    return load_cluster(table.preset, nodes=table.nodes, ranks=table.ranks)


def _mesh(strategy: Any, num_ranks: int) -> Mesh:
    """The mesh on the cluster's ranks; one axis that is not given is filled, more than one must be given."""
    axes = STRATEGIES[strategy.name].axes
    sizes = {axis: getattr(strategy, axis) for axis in axes}
    open_axes = [axis for axis, size in sizes.items() if size is None]
    if len(open_axes) > 1:
        raise ScenarioError((f"strategy.{open_axes[0]}: expected a size, found nothing ({', '.join(axes)} make the mesh)",))
    given = 1
    for size in sizes.values():
        given *= size or 1
    if open_axes:
        if num_ranks % given:
            raise ScenarioError((f"strategy.{axes[0]}: {given} does not divide the cluster's {num_ranks} ranks",))
        sizes[open_axes[0]] = num_ranks // given
    elif given != num_ranks:
        product = " × ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise ScenarioError((f"strategy.{axes[0]}: {product} = {given} ranks, but the cluster has {num_ranks}",))
    assert set(sizes) <= set(AXES)
    return Mesh(**sizes)
