"""A traced model as data: what it must hold, its JSON and back, and every way in which a file of it
may lie."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from zsim.analysis.alternatives import changes
from zsim.analysis.fit.fit import ways
from zsim.autograd.lowered import LoweredModule, UnitHooks
from zsim.autograd.lowering.lower_model import loss_buffers, lower
from zsim.autograd.traced import traced_file
from zsim.autograd.traced.model import (
    FAMILY,
    HookVariant,
    TracedModel,
    TracedModelError,
    check,
    check_whole,
    stretch,
)
from zsim.autograd.traced.traced_file import dump, load, parse, save
from zsim.errors import ScenarioError, ZsimError
from zsim.io.files import PlaceError
from zsim.ir.ledger_replay import replay
from zsim.ir.mesh import Mesh
from zsim.ir.ops import Alloc, Free
from zsim.ir.program import PHASES
from zsim.models.checkpointing import NO_CHECKPOINTING, Checkpointing
from zsim.models.families import load_preset
from zsim.models.training_options import Batch, Precision
from zsim.runs.backend import RunOptions
from zsim.runs.figures import metrics
from zsim.runs.simulator import SimBackend
from zsim.scenario import scenario
from zsim.scenario.flops import model_flops
from zsim.scenario.plan import plan
from zsim.strategies import STRATEGIES, ddp, fsdp1, problems
from zsim.strategies.building.training import Training

BATCH = Batch(micro_batch=2)
SPEC = load_preset("mlp-tiny", sequence_length=1, num_layers=None, attention=None)


def model() -> TracedModel:
    """mlp-tiny as a tracer would hand it over: its lowered modules, and which parameters each
    reads."""
    modules = tuple(
        stretch(
            module.fqn, unit=module.unit,
            weights=tuple((op.weight, op.bias) for op in module.operators if op.weight),
            last=module is SPEC.modules[-1],
        )
        for module in SPEC.modules
    )
    return TracedModel(
        name="mlp-tiny", family=FAMILY, modules=modules, units=SPEC.units,
        lowered=lower(SPEC, batch=BATCH, dtype="bfloat16", casts_input=True), dtype="bfloat16",
        batch=BATCH, casts_input=True, buffer_nbytes=12, input_nbytes=34, hook_variants=(bare(),),
    )


def bare(checkpointing: Checkpointing = NO_CHECKPOINTING) -> HookVariant:
    """The form of it in which nobody casts the model's input."""
    modules = lower(
        SPEC, batch=BATCH, dtype="bfloat16", casts_input=False, checkpointing=checkpointing
    )
    return HookVariant(unit_hooks="raw_inputs", checkpointing=checkpointing, lowered=modules)


MODEL = model()
WITHOUT_TRACES = ("deepspeed3",)
"""Strategies that refuse traced models, as their trace follows the units of a family."""
SIGNS = "expected a row that begins with +, -, gradient, accumulated, node over"


def test_a_model_and_what_is_read_from_its_json_are_equal(tmp_path: Path) -> None:
    save(MODEL, tmp_path / "model.json")
    assert load(tmp_path / "model.json") == MODEL
    assert parse(dump(MODEL).encode()) == MODEL
    assert dump(parse(dump(MODEL).encode())) == dump(MODEL)


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name not in WITHOUT_TRACES])
def test_every_strategy_plans_with_it_as_with_the_family_it_stands_for(name: str) -> None:
    strategy = STRATEGIES[name]
    mesh = Mesh(**dict.fromkeys(strategy.axes, 2))

    def peaks(spec: Any) -> list[Any]:
        batch = replace(BATCH, accumulation=2)
        modules = lower(
            spec, batch=batch, dtype="bfloat16", casts_input=strategy.casts_input,
            unit_hooks=strategy.unit_hooks,
        )
        training = Training(
            model=spec, modules=modules, batch=batch, precision=Precision(parameters="bfloat16")
        )
        program = strategy.plan(training, mesh=mesh, options=strategy.options())
        return [replay(rank, timeline=False)[phase] for rank in program.ranks for phase in PHASES]

    assert peaks(MODEL) == peaks(SPEC)


def test_what_is_recomputed_goes_through_a_file_too() -> None:
    modules = lower(
        SPEC, batch=BATCH, dtype="bfloat16", casts_input=True,
        checkpointing=Checkpointing(mode="full"),
    )
    recomputing = check_whole(replace(MODEL, lowered=modules))
    assert sum(bool(module.recompute) for module in recomputing.lowered) == len(SPEC.units) - 1
    assert parse(dump(recomputing).encode()) == recomputing


def with_every_block_recomputed() -> TracedModel:
    asked = Checkpointing(mode="full")
    modules = lower(SPEC, batch=BATCH, dtype="bfloat16", casts_input=True, checkpointing=asked)
    return check_whole(replace(
        MODEL, recomputing=((asked, modules),), hook_variants=(*MODEL.hook_variants, bare(asked)),
    ))


def test_a_scenario_asks_for_the_checkpointing_that_was_traced(tmp_path: Path) -> None:
    save(with_every_block_recomputed(), tmp_path / "mine.json")
    assert load(tmp_path / "mine.json") == with_every_block_recomputed()

    def parsed(more: str) -> scenario.Scenario:
        text = f"""
model = {{ traced = "mine.json" }}
batch = {{ micro_batch = {BATCH.micro_batch}, sequence_length = {BATCH.sequence_length} }}
cluster = {{ preset = "dgx-h100" }}
strategy = {{ name = "fsdp2" }}
precision = {{ parameters = "bf16" }}
activation_checkpointing = {{ {more} }}
"""
        return scenario.parse(text.encode(), where="mine.toml", folder=tmp_path)

    plain, full = parsed(""), parsed('mode = "full"')
    assert not any(op.kind == "recompute" for op in plan(plain, device="cuda").of_rank(0).steady)
    assert any(op.kind == "recompute" for op in plan(full, device="cuda").of_rank(0).steady)
    assert "activation checkpointing of every block" in [name for name, _ in changes(plain)]
    assert "activation checkpointing of every block" not in [name for name, _ in changes(full)]
    assert {"fsdp2", "fsdp2, checkpointing"} <= {name for name, _ in ways(plain)}
    with pytest.raises(ScenarioError, match="expected activation checkpointing that it was "
                                            "traced with"):
        parsed('mode = "full", every = 2')


def with_other_lowered_modules(
    unit_hooks: UnitHooks = "none", gradient: str = "blocks.0.fc1.bias"
) -> TracedModel:
    """MODEL of which strategies without fully_shard's hooks have an activation more, and perhaps a
    gradient of another name."""
    first = MODEL.lowered[0]
    more = Alloc("more", "activations", 64), Free("more")
    named = [
        replace(e, fqn=gradient) if getattr(e, "fqn", "") == "blocks.0.fc1.bias" else e
        for e in first.backward.memory
    ]
    other = replace(
        first, forward=replace(first.forward, memory=(*first.forward.memory, *more)),
        backward=replace(first.backward, memory=tuple(named)),
    )
    variant = HookVariant(
        unit_hooks=unit_hooks, checkpointing=NO_CHECKPOINTING, lowered=(other, *MODEL.lowered[1:])
    )
    return replace(
        MODEL,
        hook_variants=(
            variant, *(hooked for hooked in MODEL.hook_variants if hooked.unit_hooks != unit_hooks),
        ),
    )


@pytest.mark.parametrize(("name", "form"), [
    ("ddp", "raw_inputs"), ("zero2", "raw_inputs"), ("fsdp1", "none"), ("fsdp2", ""),
    ("hsdp", ""),
])
def test_a_strategy_takes_the_lowered_modules_that_autograd_makes_there(
    name: str, form: UnitHooks | Literal[""]
) -> None:
    model = check_whole(with_other_lowered_modules(form or "none"))
    assert parse(dump(model).encode()) == model
    taken = model.modules_for(
        BATCH, dtype="bfloat16", casts_input=True, unit_hooks=STRATEGIES[name].unit_hooks
    )
    assert taken == (model.hook_variants[0].lowered if form else model.lowered)
    assert model.hook_variants[0].lowered != model.lowered


def test_those_that_only_run_with_hooks_go_through_a_file_and_are_refused_elsewhere() -> None:
    nothing = [
        HookVariant(unit_hooks=unit_hooks, checkpointing=NO_CHECKPOINTING, lowered=())
        for unit_hooks in ("none", "raw_inputs")
    ]
    model = check_whole(replace(MODEL, hook_variants=tuple(nothing)))
    assert parse(dump(model).encode()) == model
    assert model.modules_for(BATCH, dtype="bfloat16", casts_input=True) == MODEL.lowered
    for unit_hooks in ("none", "fsdp1_views", "raw_inputs"):
        with pytest.raises(TracedModelError, match="expected a module that runs without the "
                                                   "hooks of fully_shard"):
            model.modules_for(BATCH, dtype="bfloat16", casts_input=True, unit_hooks=unit_hooks)


def test_gradients_are_of_parameters_alone() -> None:
    with pytest.raises(
        TracedModelError,
        match=r"^blocks.0: expected gradients of parameters of its own unit.* found blocks.0.fc1.bias#2",  # noqa: E501
    ):
        check(with_other_lowered_modules("none", "blocks.0.fc1.bias#2"))


def test_the_loss_and_its_gradient_are_found_under_their_usual_names() -> None:
    assert loss_buffers(MODEL) == loss_buffers(SPEC)


def test_a_strategy_that_casts_no_input_gets_no_cast() -> None:
    def casts(modules: Any) -> list[str]:
        events = (
            event for module in modules for c in (module.forward, module.backward)
            for event in c.memory
        )
        return [type(event).__name__ for event in events if getattr(event, "buffer", "") == "x"]

    assert casts(MODEL.modules_for(BATCH, dtype="bfloat16", casts_input=True)) == ["Alloc", "Free"]
    assert casts(
        MODEL.modules_for(BATCH, dtype="bfloat16", casts_input=False, unit_hooks="raw_inputs")
    ) == []


def test_a_file_in_which_every_form_casts_the_models_input_is_refused() -> None:
    with pytest.raises(TracedModelError, match="a form with the model's own inputs beside"):
        parse(dump(replace(MODEL, hook_variants=())).encode())


@pytest.mark.parametrize(("batch", "dtype", "message"), [
    (BATCH, "float32", "mlp-tiny: expected dtype bfloat16, at which it was traced, found "
                       "float32; trace it again with that --dtype"),
    (Batch(micro_batch=3), "bfloat16",
     "mlp-tiny: expected micro_batch 2, at which it was traced, found 3; trace it again with "
     "--input BxS and the values that --micro-batch names"),
    (Batch(micro_batch=2, sequence_length=9), "bfloat16",
     "mlp-tiny: expected sequence_length 1, at which it was traced, found 9; trace it again with "
     "--input BxS and the values that --sequence-length names"),
])
def test_it_stands_for_its_own_batch_and_dtype_only(batch: Batch, dtype: str, message: str) -> None:
    with pytest.raises(TracedModelError) as error:
        lower(MODEL, batch=batch, dtype=dtype)
    assert str(error.value) == message


def test_a_strategy_that_casts_inputs_needs_a_trace_that_does() -> None:
    with pytest.raises(
        TracedModelError, match="mlp-tiny: expected inputs that are cast .* found a trace that "
                                "casts none"
    ):
        lower(replace(MODEL, casts_input=False), batch=BATCH, dtype="bfloat16", casts_input=True)


def test_checkpointing_that_was_not_traced_is_refused() -> None:
    with pytest.raises(TracedModelError, match="expected activation checkpointing that it was "
                                               "traced with"):
        lower(MODEL, batch=BATCH, dtype="bfloat16", checkpointing=Checkpointing(mode="full"))


def test_ddp_cannot_look_for_unused_parameters_of_a_module_whose_outputs_are_not_known() -> None:
    asked = ddp.Options(find_unused_parameters=True)
    (problem,) = problems("ddp", asked, model=MODEL)
    assert problem.startswith("strategy.find_unused_parameters: DDP then copies whatever the "
                              "module returns")
    assert problems("ddp", asked, model=SPEC) == ()


def test_fsdp1_refuses_what_a_trace_does_not_tell_of_views() -> None:
    """Parameters are leaves in it: frozen ones beside others have no gradients, casts are cached,
    and a unit in a unit begins where it computes."""
    first, *others = MODEL.units[-1].parameters
    partly = (replace(first, requires_grad=False), *others)
    cases = {
        "frozen": replace(
            MODEL, units=(*MODEL.units[:-1], replace(MODEL.units[-1], parameters=partly))
        ),
        "precision.autocast": replace(MODEL, autocast="bfloat16"),
        "model.traced": replace(
            MODEL, modules=tuple(replace(module, within="blocks.0") for module in MODEL.modules)
        ),
    }

    options = fsdp1.Options(use_orig_params=True)
    assert list(fsdp1.model_problems(options, MODEL, False)) == []
    assert {
        key: [p.partition(":")[0] for p in fsdp1.model_problems(options, case, False)]
        for key, case in cases.items()
    } == {key: [key] for key in cases}


def frozen(*, made: bool) -> TracedModel:
    """MODEL with one bias frozen, of which backward makes a gradient or does not."""
    name = "blocks.0.fc1.bias"
    units = tuple(
        replace(
            unit, parameters=tuple(replace(p, requires_grad=p.fqn != name) for p in unit.parameters)
        )
        for unit in SPEC.units
    )

    def kept(first: LoweredModule, *others: LoweredModule) -> tuple[LoweredModule, ...]:
        memory = tuple(
            event for event in first.backward.memory if made or getattr(event, "fqn", "") != name
        )
        return replace(first, backward=replace(first.backward, memory=memory)), *others

    otherwise = tuple(
        replace(variant, lowered=kept(*variant.lowered)) for variant in MODEL.hook_variants
    )
    return replace(MODEL, lowered=kept(*MODEL.lowered), hook_variants=otherwise, units=units)


def test_a_frozen_parameter_has_no_gradient_and_is_frozen_in_the_file() -> None:
    model = check(frozen(made=False))
    assert parse(dump(model).encode()) == model
    assert json.loads(dump(model))["units"][1]["parameters"][1] == {
        "fqn": "blocks.0.fc1.bias", "shape": [128], "requires_grad": False
    }
    with pytest.raises(
        TracedModelError,
        match=r"^blocks.0.fc1.bias: expected no gradient of a parameter that is frozen or .*, found one",  # noqa: E501
    ):
        check(frozen(made=True))


# -- what must hold


def first_with(**changes: Any) -> TracedModel:
    """MODEL with its first lowered module's backward or forward changed."""
    return replace(MODEL, lowered=(replace(MODEL.lowered[0], **changes), *MODEL.lowered[1:]))


def without_last_free() -> TracedModel:
    backward = MODEL.lowered[0].backward
    return first_with(
        backward=replace(backward, memory=backward.memory[:-3] + backward.memory[-2:])
    )


@pytest.mark.parametrize(("broken", "message"), [
    (without_last_free(),
     "expected a buffer that is freed by the end of backward, found it still lives"),
    (first_with(forward=replace(MODEL.lowered[0].forward, memory=(Free("x"),))),
     "blocks.0: expected every buffer allocated once and freed once, found x"),
])
def test_what_does_not_hold_together_is_named(broken: TracedModel, message: str) -> None:
    with pytest.raises(TracedModelError, match=message):
        check(broken)


def test_a_parameter_without_a_gradient_is_named() -> None:
    backward = MODEL.lowered[0].backward
    kept = tuple(
        event for event in backward.memory if getattr(event, "fqn", "") != "blocks.0.fc1.bias"
    )
    with pytest.raises(
        TracedModelError,
        match=r"^blocks.0.fc1.bias: expected a gradient in every backward, found none",
    ):
        check(first_with(backward=replace(backward, memory=kept)))


# -- files from anywhere


def memory(table: Any) -> list[Any]:
    """The events of the first module's forward in a file."""
    events: list[Any] = table["modules"][0]["lowered"]["forward"]["memory"]
    return events


def first_kernel(table: Any) -> list[Any]:
    """The row of the first module's first kernel in a file."""
    row: list[Any] = table["modules"][0]["lowered"]["forward"]["kernels"][0]
    return row


def changed(change: Callable[[Any], Any]) -> bytes:
    table = json.loads(dump(MODEL))
    change(table)
    return json.dumps(table).encode()


@pytest.mark.parametrize(("change", "where"), [
    (lambda t: t.update(schema="zsim-traced-model-1"),
     'file: schema: expected zsim-traced-model-4 or zsim-traced-sizes-1, the forms of this '
     'version, found "zsim-traced-model-1"; trace the module again'),
    (lambda t: t.pop("schema"), "file: schema: expected zsim-traced-model-4"),
    (lambda t: t.update(more=1), "file: more: expected no such key, found 1"),
    (lambda t: t.pop("units"), "file: units: expected a value, found nothing"),
    (lambda t: first_kernel(t).__setitem__(7, -1), "[0][7]: expected at least 0, found -1"),
    (lambda t: first_kernel(t).__setitem__(7, 2**60),
     "[0]: expected no more elements one by one, of a known dtype, than its bytes hold"),
    (lambda t: t.update(dtype="int64"),
     'file: dtype: expected float32, bfloat16 or float16, found "int64"'),
    (lambda t: t.update(devices=["**/*"]),
     'file: devices[0]: expected cpu or cuda, found "**/*"'),
    (lambda t: t["batch"].update(micro_batch=-1),
     "file: batch.micro_batch: expected at least 0, found -1"),
    (lambda t: t.update(buffer_nbytes=2**63), "file: buffer_nbytes: expected at most 9,223"),
    (lambda t: t.update(name="a name"),
     "file: name: expected a name of 1 to 400 characters without blanks"),
    (lambda t: t["units"][1]["parameters"][0].update(thawed=True),
     "file: units[1].parameters[0].thawed: expected no such key"),
    (lambda t: t["units"][1]["parameters"][0].update(shape=[1] * 17),
     "file: units[1].parameters[0].shape: expected at most 16 entries"),
    (lambda t: t["units"][1]["parameters"][0].update(shape=[0, 8]),
     "file: units[1].parameters[0]: expected sizes above 0 of what is trained"),
    (lambda t: t["units"][1]["parameters"][0].update(shape=[2**40] * 2),
     "file: units[1].parameters[0]: expected at most 2^63 - 1 elements"),
    (lambda t: memory(t).append(["+", "y", "gold", 1]),
     'modules[0].lowered.forward.memory[4][2]: expected parameters, gradients'),
    (lambda t: memory(t).append(["run", "y"]), SIGNS),
    (lambda t: memory(t).append(["+", "y", "activations", 1]), "y: expected a buffer that"),
    (lambda t: t["modules"][0]["reads"].append(["head.weight", ""]), "mlp-tiny"),
    (lambda t: t["modules"][1]["reads"].append(["blocks.0.fc1.weight", ""]),
     "blocks.1: expected parameters of its own"),
])
def test_a_file_that_lies_is_refused_with_the_place(
    change: Callable[[Any], Any], where: str
) -> None:
    if where == "mlp-tiny":  # a block may read what is the root's, which stays gathered
        assert parse(changed(change)).name == where
        return
    with pytest.raises(TracedModelError) as error:
        parse(changed(change), where="file")
    assert where in str(error.value)


def test_a_key_that_is_given_twice_is_refused() -> None:
    twice = (
        changed(lambda t: None)
        .decode()
        .replace('{"schema"', '{"name":"other","schema"', 1)
        .encode()
    )
    with pytest.raises(TracedModelError, match="expected each key of a table once, found the key "
                                               "'name' twice"):
        parse(twice)


@pytest.mark.parametrize("data", [
    b"", b"{", b"\xff\xfe", b"[" * 100_000, b"null", b"[]", b"1" * 5000, b'{"schema": NaN}',
    b"\x80\x04N.",
])
def test_what_is_no_model_at_all_is_refused(data: bytes) -> None:
    with pytest.raises(ZsimError, match="expected"):
        parse(data)


def test_a_file_that_is_too_large_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traced_file, "MAX_FILE_BYTES", 1000)
    (tmp_path / "large.json").write_text(dump(MODEL))
    with pytest.raises(TracedModelError, match="expected at most 1,000 bytes, found more"):
        load(tmp_path / "large.json")


def test_a_place_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(TracedModelError, match="expected a traced model, found no such file; "):
        load(tmp_path / "none.json")
    with pytest.raises(PlaceError, match="expected a file that can be written"):
        save(MODEL, tmp_path)


TRACED_SCENARIO = """
model = { traced = "mine.json" }
batch = { micro_batch = 2 }
cluster = { preset = "dgx-h100" }
strategy = { name = "fsdp2" }
precision = { parameters = "bf16", reduce = "fp32" }
"""


def test_a_scenario_can_be_of_a_traced_model(tmp_path: Path) -> None:
    save(MODEL, tmp_path / "mine.json")
    case = scenario.parse(TRACED_SCENARIO.encode(), where="x.toml", folder=tmp_path)
    run = SimBackend().run(case, options=RunOptions())
    figures = metrics.figures(run, case)
    assert figures.peak_memory_bytes > 0
    assert figures.mfu is not None and figures.mfu > 0  # noqa: PT018


def test_a_traced_step_of_more_micro_batches_has_as_many_times_the_flops(tmp_path: Path) -> None:
    """Backward has twice those of forward, but for the first product, whose input needs no
    gradient; each kernel says its own."""
    save(MODEL, tmp_path / "mine.json")
    forward = [kernel.flops for module in MODEL.lowered for kernel in module.forward.kernels]
    first = next(flops for flops in forward if flops)
    for accumulation in (1, 3):
        text = TRACED_SCENARIO.replace("micro_batch = 2", f"micro_batch = 2, accumulation = "
                                                          f"{accumulation}")
        case = scenario.parse(text.encode(), where="x.toml", folder=tmp_path)
        assert model_flops(case) == accumulation * (3 * sum(forward) - first)


@pytest.mark.parametrize(("old", "new", "wanted"), [
    ("mine.json", "other.json", "x.toml: model.traced: "),
    ("micro_batch = 2", "micro_batch = 3", "expected micro_batch 2, at which it was traced, "
                                           "found 3"),
    ('parameters = "bf16"', 'parameters = "fp32"', "expected dtype bfloat16, at which it was "
                                                   "traced, found float32"),
])
def test_a_scenario_that_does_not_fit_its_traced_model_is_refused_with_file_and_key(
    old: str, new: str, wanted: str, tmp_path: Path
) -> None:
    save(MODEL, tmp_path / "mine.json")
    with pytest.raises(ZsimError) as caught:
        scenario.parse(TRACED_SCENARIO.replace(old, new).encode(), where="x.toml", folder=tmp_path)
    assert wanted in str(caught.value)
    assert str(caught.value).startswith("x.toml: model.traced: ")
