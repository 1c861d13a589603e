"""ModelSpec to nn.Module: one generic interpreter over operators, so that what is simulated is what runs.

Python drops each value after its last use, as hand-written modules that reassign `x` do. Parameters are initialised
from the seed and their own fqn alone, so every rank and every strategy starts from the same numbers.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from zreal.recomputing import as_asked, recomputed
from zsim.checkpointing import NO_CHECKPOINTING, Checkpointing
from zsim.errors import ZsimError
from zsim.model import ROOT, ModelSpec, Module, Parameter
from zsim.models.transformers import TransformersModel
from zsim.operators import Operator
from zsim.repeats import first_runs
from zsim.scenario import Scenario
from zsim.training import Batch, Precision

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_ROTARY_BASE = 10000.0


def _generator(*key: int | str) -> torch.Generator:
    """A generator that depends on the whole `key`. torch's on the CPU looks at the low 32 bits of its seed only."""
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def initial(parameter: Parameter, *, seed: int) -> Tensor:
    """What `parameter` begins with: it depends on the seed and its own fqn alone."""
    generator = _generator(seed, parameter.fqn)
    if len(parameter.shape) == 1:
        centre = 1.0 if parameter.fqn.endswith("weight") else 0.0
        return centre + 0.02 * torch.randn(parameter.shape, generator=generator)
    scale: float = min(0.1, parameter.shape[-1] ** -0.5)
    return torch.randn(parameter.shape, generator=generator) * scale


class ModelError(ZsimError):
    """A model of which no real module can be built."""


class Stretch(nn.Module):
    """One Module of the ModelSpec, checkpointed or not. Parameters of blocks live in the stretch itself.

    One that stands in the spec in parts has `later` ones: its own, and those of stretches in it, which are called.
    """

    def __init__(self, module: Module, checkpointing: Checkpointing = NO_CHECKPOINTING, *, later: tuple[Module, ...] = ()) -> None:
        super().__init__()
        self.spec = module
        self.checkpointing = checkpointing
        self.parts = (module, *later)
        self.reads = "x"

    @classmethod
    def inside(cls, part: Module, checkpointing: Checkpointing) -> Stretch:
        """A unit in a block, which reads one of the block's values."""
        (read,) = part.given
        named = tuple(replace(op, inputs=tuple("x" if v == read else v for v in op.inputs)) for op in part.operators)
        found = cls(replace(part, operators=named), checkpointing)
        found.reads = read
        return found

    def parameter(self, fqn: str) -> Tensor | None:
        """The parameter called `fqn` in the whole model, None for ""."""
        return _lookup(self, fqn.removeprefix(f"{self.spec.fqn}.")) if fqn else None

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """The value of the last operator."""
        asked = self.checkpointing
        if asked.mode == "none" or asked.recompute:
            return interpret(self.parts, x, targets, self, again=asked.recompute)
        return as_asked(asked, lambda value: interpret(self.parts, value, targets, self), x)

    def inner(self, part: Module) -> Stretch | None:
        """The stretch in this one that runs `part`, None where this one does so itself."""
        if not part.inside or part.path == self.spec.path:
            return None
        return cast(Stretch, self.get_submodule(part.path.removeprefix(f"{self.spec.path}.")))


KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
"""The kernels of scaled_dot_product_attention that a model can ask for."""

def interpret(
    parts: tuple[Module, ...], x: Tensor, targets: Tensor | None, owner: Stretch | Model, *, again: tuple[str, ...] = ()
) -> Tensor:
    """Run the operators of a module's `parts` on `x`; values are dropped after their last use.

    Operators of kinds in `again` are checkpointed; parts that are stretches in `owner` are called.
    """
    values: dict[str, Tensor] = {"x": x, "tokens": x}
    if targets is not None:
        values["targets"] = targets
    calls: list[Operator | Stretch] = []
    for part in parts:
        inner = owner.inner(part) if isinstance(owner, Stretch) else None
        calls += part.operators if inner is None else (inner,)
    last_use = {value: call for call in calls for value in _reads(call)}
    output = ""
    for call in calls:
        reads = _reads(call)
        if not isinstance(call, Operator):  # a stretch, or what wraps it
            output = call.spec.operators[-1].output
            values[output] = call(values[reads[0]])
        else:
            output = call.output
            values[output] = _checkpointed(call, values, owner) if call.kind in again else apply(call, values, owner)
        for value in dict.fromkeys(reads):
            if last_use[value] is call:
                del values[value]
    return values[output]


def _reads(call: Operator | Stretch) -> tuple[str, ...]:
    return call.inputs if isinstance(call, Operator) else (call.reads,)


def _checkpointed(op: Operator, values: dict[str, Tensor], owner: Stretch | Model) -> Tensor:
    return recomputed(
        lambda *inputs: apply(op, dict(zip(op.inputs, inputs, strict=True)), owner), *(values[name] for name in op.inputs)
    )


def apply(op: Operator, values: dict[str, Tensor], owner: Stretch | Model) -> Tensor:
    """One operator of eager torch."""
    first = op.inputs[0]
    weight, bias = owner.parameter(op.weight), owner.parameter(op.bias)
    match op.kind:
        case "linear":
            return functional.linear(values[first], cast(Tensor, weight), bias)
        case "embedding":
            return functional.embedding(values[first], cast(Tensor, weight))
        case "positions":
            return values[first] + cast(Tensor, weight)[: values[first].shape[1]]
        case "layer_norm":
            return functional.layer_norm(values[first], (op.out_features,), weight, bias)
        case "rms_norm":
            return functional.rms_norm(values[first], (op.out_features,), weight)
        case "gelu":
            return functional.gelu(values[first])
        case "swiglu":
            return functional.silu(values[first]) * values[op.inputs[1]]
        case "residual":
            return values[first] + values[op.inputs[1]]
        case "rotary":
            return _rotary(values[first], op)
        case "attention":
            return _attention(op, *(values[name] for name in op.inputs))
        case "cast":
            return values[first].to(torch.promote_types(values[first].dtype, DTYPES[op.dtype]))
        case "cross_entropy":
            return functional.cross_entropy(values[first].flatten(0, -2), values[op.inputs[1]].flatten())
        case _:
            raise AssertionError(op.name)  # transformers runs it itself, or build() has refused it


def _heads(x: Tensor, num_heads: int) -> Tensor:
    return torch.unflatten(x, -1, (num_heads, -1)).transpose(1, 2)


def _rotary(x: Tensor, op: Operator) -> Tensor:
    half = op.head_dim // 2
    rates = _ROTARY_BASE ** (-torch.arange(half, dtype=torch.float32, device=x.device) / half)
    angles = torch.outer(torch.arange(x.shape[1], dtype=torch.float32, device=x.device), rates)
    cos, sin = angles.cos().to(x.dtype)[:, None], angles.sin().to(x.dtype)[:, None]
    left, right = torch.unflatten(x, -1, (op.num_heads, op.head_dim)).split(half, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).flatten(-2)


def _attention(op: Operator, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    q, k, v = _heads(query, op.num_heads), _heads(key, op.num_kv_heads), _heads(value, op.num_kv_heads)
    if op.implementation != "explicit":
        asked = KERNELS.get(op.implementation)
        with sdpa_kernel(asked) if asked is not None else nullcontext():
            mixed = functional.scaled_dot_product_attention(
                q, k, v, is_causal=op.causal, enable_gqa=op.num_kv_heads != op.num_heads
            )
        return mixed.transpose(1, 2).flatten(-2)
    if op.num_kv_heads != op.num_heads:
        k, v = (t.repeat_interleave(op.num_heads // op.num_kv_heads, dim=1) for t in (k, v))
    scores = (q @ k.transpose(-2, -1)) * op.head_dim**-0.5
    if op.causal:
        length = scores.shape[-1]
        later = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return cast(Tensor, (scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(-2))


def _lookup(module: nn.Module, path: str) -> Tensor:
    *parents, name = path.split(".")
    for parent in parents:
        module = cast(nn.Module, getattr(module, parent))
    return cast(Tensor, getattr(module, name))


def _place(module: nn.Module, path: str, parameter: nn.Parameter) -> None:
    parents, _, name = path.rpartition(".")
    _made(module, parents).register_parameter(name, parameter)


def _made(module: nn.Module, path: str) -> nn.Module:
    """The module called `path` in `module`, made with what it lies in where it is not there."""
    for name in path.split(".") if path else ():
        if not hasattr(module, name):
            setattr(module, name, nn.Module())
        module = cast(nn.Module, getattr(module, name))
    return module


class Model(nn.Module):
    """The whole model: blocks in `blocks`, unused ones too, stretches apart and the root's own parameters under their fqns in itself.

    They are registered in forward order, the root's own parameters last.
    """

    blocks: nn.ModuleList

    def __init__(
        self,
        spec: ModelSpec,
        *,
        seed: int,
        dtype: torch.dtype = torch.float32,
        checkpointing: Checkpointing = NO_CHECKPOINTING,
    ) -> None:
        super().__init__()
        self.spec = spec
        again = checkpointing.applies_to(spec)
        blocks = nn.ModuleList()
        modules = first_runs(spec.modules)
        parts = {module.path: module for module in modules if module.inside}
        for module in modules:
            if module.within not in ("", module.path):
                continue
            later = tuple(part for part in modules if part.within == module.path and part is not module)
            stretch = Stretch(module, checkpointing if module.fqn in again else NO_CHECKPOINTING, later=later)
            if module.apart:
                self.add_module(module.fqn, stretch)
            elif module.unit != ROOT:
                self.blocks = blocks.append(stretch)
        for place in sorted(int(fqn.rpartition(".")[2]) for fqn in spec.idle):  # these only own their parameters
            blocks.insert(place, nn.Module())
            self.blocks = blocks
        for unit in spec.units:
            if unit.fqn in parts:
                part = parts[unit.fqn]
                by_itself = part.within in again and checkpointing.recompute  # else it is recomputed with its block
                own = Stretch.inside(part, checkpointing if by_itself else NO_CHECKPOINTING)
                outside, _, name = unit.fqn.rpartition(".")
                _made(self, outside).add_module(name, own)
            for parameter in unit.parameters:
                made = nn.Parameter(initial(parameter, seed=seed).to(dtype), requires_grad=parameter.requires_grad)
                _place(self, parameter.fqn, made)

    def parameter(self, fqn: str) -> Tensor | None:
        """The root's parameter `fqn`, None for ""."""
        return _lookup(self, fqn) if fqn else None

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """The loss of tokens (or, for mlp, floats) `x` against `targets`."""
        for module in self.spec.modules:
            if module.within in ("", module.path):
                x = self.run(module, x, targets)
        return x

    def run(self, module: Module, x: Tensor, targets: Tensor) -> Tensor:
        """One of the modules of `spec`, or a later run of it: by the stretch that it is, or by the root itself."""
        if module.unit == ROOT:
            return interpret((module,), x, targets, self)
        return cast(Tensor, self.stretch(module.path)(x))

    def stretch(self, fqn: str) -> nn.Module:
        """The real module of the spec's module `fqn`, which is not the root's own."""
        return self.get_submodule(fqn)


def build(
    spec: ModelSpec, *, seed: int, dtype: str = "float32", checkpointing: Checkpointing = NO_CHECKPOINTING
) -> Model:
    """The real module of `spec`, in `dtype`; ModelError for a traced one, of which only its memory and work are known."""
    if any(op.kind == "traced" for module in spec.modules for op in module.operators):
        raise ModelError(
            where=spec.name,
            expected="a preset, a family or a config.json, of which torch can build the module",
            found="a traced model",
            remedy="simulate it, and compare with a run of your own module",
        )
    if isinstance(spec, TransformersModel):
        from zreal import transformers_models  # needs an extra, and this module

        return cast(Model, transformers_models.build(spec, seed=seed, dtype=dtype, checkpointing=checkpointing))
    return Model(spec, seed=seed, dtype=DTYPES[dtype], checkpointing=checkpointing)


def autocast(precision: Precision, *, device: str) -> AbstractContextManager[object]:
    """Around the forward of a whole micro-batch: torch.autocast with its cache of cast weights, or nothing."""
    if precision.autocast == "none":
        return nullcontext()
    return torch.autocast(torch.device(device).type, dtype=DTYPES[precision.autocast], cache_enabled=True)


def inputs(
    spec: ModelSpec, batch: Batch, *, seed: int, rank: int, step: int, micro_batch: int, dtype: str = "float32"
) -> tuple[Tensor, Tensor]:
    """(x, targets) of one rank's micro-batch: they depend on seed, rank, step and micro-batch, not on the backend."""
    generator = _generator(seed, rank, step, micro_batch)
    classes = spec.modules[-1].operators[-1].out_features
    if spec.family == "mlp":
        width = spec.first_operator.in_features
        x = torch.randn(batch.micro_batch, width, generator=generator).to(DTYPES[dtype])
        return x, torch.randint(classes, (batch.micro_batch,), generator=generator)
    tokens = torch.randint(classes, (batch.micro_batch, batch.sequence_length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


MicroBatch = tuple[Tensor, Tensor]


def summed_loss(model: nn.Module, batches: Sequence[MicroBatch]) -> Tensor:
    """The sum of the losses of `model` on each of `batches`, one forward after another."""
    (x, targets), *more = batches
    loss = model(x, targets)
    for x, targets in more:
        loss = loss + model(x, targets)
    return cast(Tensor, loss)


def forwards_of(scenario: Scenario, batches: list[MicroBatch]) -> list[list[MicroBatch]]:
    """`batches` of a step by micro-batch: those whose forwards come before one backward."""
    size = scenario.batch.forwards
    return [batches[start : start + size] for start in range(0, len(batches), size)]


def micro_batches(scenario: Scenario, *, rank: int, step: int, dtype: str, device: str = "cpu") -> list[MicroBatch]:
    """The inputs of all forwards of all micro-batches of one step, in order; floating-point ones in `dtype`."""
    found = (
        inputs(scenario.model, scenario.batch, seed=scenario.seed, rank=rank, step=step, micro_batch=i, dtype=dtype)
        for i in range(scenario.batch.accumulation * scenario.batch.forwards)
    )
    return [(x.to(device), targets.to(device)) for x, targets in found]
