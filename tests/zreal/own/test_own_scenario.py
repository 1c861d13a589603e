"""A user's own module in place of a scenario's model: built, traced, simulated, run for real and
compared, by one command."""

from __future__ import annotations

import itertools
import json
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any, cast

import pytest
from torch import Tensor

import zsim
from tests.support.cases.sampling import one_in
from tests.zreal.conftest import TimeOutWhen
from tests.zreal.own import own_modules
from tests.zreal.own.own_modules import HANGING, transformer
from zreal.modules.numerics.parity import largest, relative_differences
from zreal.modules.numerics.reference import SingleProcess
from zreal.modules.own import own_module
from zreal.modules.own.own_module import load
from zreal.rank.numerics import broadcasts_of_buffers
from zreal.tracing.own_scenario import with_module
from zreal.tracing.trace import trace
from zsim.analysis.scenario_warnings import caveats
from zsim.autograd.traced.model import TracedModel
from zsim.cli.main import main
from zsim.errors import ZsimError
from zsim.io.system import signals
from zsim.runs.compare.numerics import NUMERICS_BOUND
from zsim.scenario.plan import plan

HERE = Path(__file__).with_name("own_modules.py")
OWN = "tests.zreal.own.own_modules:"
STRATEGIES = {
    "ddp": '"ddp"', "zero_redundancy": '"zero_redundancy"', "fsdp2": '"fsdp2"',
    "hsdp": '"hsdp", dp_replicate = 2, dp_shard = 1',
    "fsdp1": '"fsdp1", dp_replicate = 1, dp_shard = 2, use_orig_params = true',
    "zero1": '"zero1"', "zero2": '"zero2", sync = "last"',
    "zero3": '"zero3", lookahead = 2, persistence_threshold = 64',
}
MODULES = ("perceptron", "transformer", "convolutions")
PAIRS = one_in(3, [*itertools.product(MODULES, STRATEGIES)])
"""All of the strategies, each with one of the modules."""


def scenario(folder: Path, strategy: str, **more: str) -> str:
    """The file of a scenario whose model the option replaces."""
    lines = {
        "model": '{ preset = "gpt-tiny" }', "batch": "{ micro_batch = 1, accumulation = 2 }",
        "cluster": '{ preset = "cpu-gloo", ranks = 2 }', "strategy": f"{{ name = {strategy} }}",
        **more,
    }
    file = folder / "own.toml"
    file.write_text("".join(f"{key} = {value}\n" for key, value in lines.items()))
    return str(file)


def verdict(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The statuses of the checks by name."""
    return {
        check["name"]: check["status"] for check in json.loads(capsys.readouterr().out)["checks"]
    }


@pytest.mark.gloo
@pytest.mark.parametrize(("module", "strategy"), PAIRS)
def test_a_users_module_is_run_on_gloo_as_it_was_predicted(
    module: str, strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = scenario(tmp_path, STRATEGIES[strategy], optimizer="{ name = \"sgd\", clip_norm = 0.5 }")
    assert main(["validate", file, "--module", OWN + module, "--json"]) == 0
    checks = verdict(capsys)
    times = {checks.pop(name) for name in ("step time", "exposed communication", "time by unit")}
    assert times <= {"unsupported", "ok"}
    assert set(checks.values()) == {"ok"}


@pytest.mark.gloo
@pytest.mark.parametrize("name", [
    pytest.param("zero1", marks=pytest.mark.slow), pytest.param("zero2", marks=pytest.mark.slow),
    "zero3",
])
def test_a_users_module_is_run_on_two_groups_of_two_ranks(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = scenario(
        tmp_path, f'"{name}", dp_replicate = 2', cluster='{ preset = "cpu-gloo", ranks = 4 }',
        optimizer='{ name = "sgd", clip_norm = 0.5 }',
    )
    asked = ["validate", file, "--module", f"{OWN}transformer", "--no-calibrate", "--json"]
    assert main(asked) == 0
    checks = verdict(capsys)
    assert all(checks[name] == "ok" for name in ("collective order", "bytes", "groups", "numerics"))
    assert {status for name, status in checks.items() if "memory" in name} == {"ok"}


@pytest.mark.gloo
@pytest.mark.parametrize("strategy", [
    "ddp", "fsdp2", "zero3", pytest.param("fsdp1", marks=pytest.mark.slow),
    pytest.param("zero1", marks=pytest.mark.slow),
])
def test_a_module_that_keeps_state_of_its_forwards_trains_as_one_process_with_that_of_each_rank(
    strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under DDP ranks take rank 0's buffers before each forward, else each keeps its own."""
    file = scenario(tmp_path, STRATEGIES[strategy])
    assert main(["validate", file, "--module", f"{OWN}keeping", "--json"]) == 0
    assert verdict(capsys)["numerics"] == "ok"


@pytest.mark.quality
@pytest.mark.parametrize(("sync", "synchronised"), [("every", {0, 1}), ("last", {0})])
def test_buffers_of_all_ranks_or_of_rank_0_make_other_parameters(
    sync: str, synchronised: set[int], tmp_path: Path
) -> None:
    file = scenario(tmp_path, f'"ddp", sync = "{sync}"')
    case = with_module(zsim.load(file), f"{OWN}keeping", device="cpu")
    assert broadcasts_of_buffers(plan(case, device="cpu").of_rank(0)) == synchronised
    own, rank_0s = (
        SingleProcess(case, synchronised=each).train(3) for each in ((), synchronised)
    )
    difference, _ = largest(relative_differences(own.parameters, rank_0s))
    assert difference > 2 * NUMERICS_BOUND["float32"]


@pytest.mark.parametrize(
    ("module", "strategy"),
    [("keeping", name) for name in ("ddp", "zero1", "zero2", "zero3")]
    + [("keeping_in_two_bytes", name) for name in ("ddp", "fsdp2", "fsdp1", "zero3")],
)
def test_buffers_have_two_bytes_where_parameters_have_or_where_the_module_is_so_made(
    module: str, strategy: str, tmp_path: Path
) -> None:
    case = zsim.load(
        scenario(tmp_path, STRATEGIES[strategy], precision='{ parameters = "bf16" }')
    )
    assert zsim.validate(case, against="fake", module=OWN + module).ok


@pytest.mark.parametrize("strategy", one_in(2, list(STRATEGIES)))
def test_a_users_module_is_observed_on_fake_as_it_was_predicted(
    strategy: str, tmp_path: Path
) -> None:
    case = zsim.load(scenario(tmp_path, STRATEGIES[strategy]))
    comparison = zsim.validate(case, against="fake", module=f"{OWN}transformer")
    assert comparison.ok
    assert comparison.measured.provenance["module"] == f"{OWN}transformer"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_sums_of_gradients_have_storages_of_their_own_under_the_meter(
    strategy: str, tmp_path: Path
) -> None:
    case = zsim.load(scenario(tmp_path, STRATEGIES[strategy]))
    assert zsim.validate(case, against="fake", module=f"{OWN}residual").ok


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero2"])
@pytest.mark.parametrize("module", ["mixed", "perceptron"])
def test_a_module_all_of_two_bytes_is_cast_with_its_buffers_and_no_input_of_it_is(
    module: str, strategy: str, tmp_path: Path
) -> None:
    two_bytes = '{ parameters = "bf16", reduce = "bf16", master = false }'
    case = zsim.load(scenario(tmp_path, STRATEGIES[strategy], precision=two_bytes))
    assert zsim.validate(case, against="fake", module=OWN + module).ok


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_the_loss_lives_beside_the_last_reduction(strategy: str, tmp_path: Path) -> None:
    case = zsim.load(scenario(tmp_path, STRATEGIES[strategy], precision='{ parameters = "bf16" }'))
    assert zsim.validate(case, against="fake", module=f"{OWN}sums").ok
    assert zsim.validate(case, against="fake", module=f"{OWN}perceptron").ok


@pytest.mark.parametrize(
    ("strategy", "module"),
    [(name, "sums") for name in ("ddp", "fsdp1", "fsdp2", "zero2")]
    + [("fsdp1", "sums_of_two"), ("fsdp1", "joined")],
)
def test_a_gradient_that_a_sum_expands_is_copied_where_torch_copies_it(
    strategy: str, module: str, tmp_path: Path
) -> None:
    case = zsim.load(scenario(tmp_path, STRATEGIES[strategy]))
    assert zsim.validate(case, against="fake", module=OWN + module).ok


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_a_parameter_without_dimensions_is_trained_by_what_does_not_cut_it(
    strategy: str, tmp_path: Path
) -> None:
    case = zsim.load(scenario(tmp_path, STRATEGIES[strategy]))
    assert zsim.validate(case, against="fake", module=f"{OWN}scaled").ok


@pytest.mark.parametrize("strategy", ["ddp", "zero_redundancy"])
def test_ddp_trains_a_module_that_breaks_the_rules_of_units(strategy: str, tmp_path: Path) -> None:
    case = zsim.load(scenario(tmp_path, STRATEGIES[strategy]))
    assert zsim.validate(case, against="fake", module=f"{OWN}towers").ok
    sharded = zsim.load(scenario(tmp_path, STRATEGIES["fsdp2"]))
    with pytest.raises(ZsimError, match="a parameter of one unit, found one tied between"):
        zsim.validate(sharded, against="fake", module=f"{OWN}towers")


@pytest.mark.parametrize("module", [*MODULES, "towers", "scaled"])
def test_any_module_is_trained_on_one_rank_without_a_wrapper(module: str, tmp_path: Path) -> None:
    cluster = '{ preset = "cpu-gloo", ranks = 1 }'
    case = zsim.load(scenario(tmp_path, '"single"', cluster=cluster))
    assert zsim.validate(case, against="fake", module=OWN + module).ok


@pytest.mark.gloo
def test_numerics_of_a_module_that_draws_random_numbers_are_not_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = scenario(tmp_path, '"zero2"')
    assert main(["validate", file, "--module", f"{OWN}dropout", "--json"]) == 0
    checks = verdict(capsys)
    assert checks["numerics"] == "unsupported"
    assert checks["memory of parts"] == "ok"


def test_a_module_that_does_other_things_when_it_is_real_differs(tmp_path: Path) -> None:
    case = zsim.load(scenario(tmp_path, '"zero2"'))
    comparison = zsim.validate(case, against="fake", module=f"{OWN}forgetful")
    failed = {check.name for check in comparison.checks if check.status == "failed"}
    assert "memory of parts" in failed
    assert "collective order" not in failed


@pytest.mark.parametrize("strategy", ["fsdp2", "zero2"])
def test_a_tensor_that_the_first_forward_keeps_is_a_buffer_and_not_measured(
    strategy: str, tmp_path: Path
) -> None:
    case = zsim.load(scenario(tmp_path, STRATEGIES[strategy]))
    own = with_module(case, f"{OWN}caching", device="cpu").model
    assert isinstance(own, TracedModel)
    assert (own.buffer_nbytes, own.buffers) == (4 * 16 * 4, ())
    with pytest.raises(ZsimError, match="keeps no tensor in the module.*found 256 B"):
        zsim.validate(case, against="fake", module=f"{OWN}caching")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_inputs_of_ranks_and_steps_lie_in_memory_as_the_given_ones(
    strategy: str, tmp_path: Path
) -> None:
    """A product copies what it cannot read as it lies, and so do reshape and contiguous."""
    case = zsim.load(scenario(tmp_path, STRATEGIES[strategy]))
    assert zsim.validate(case, against="fake", module=f"{OWN}transposed").ok
    given, drawn = (own := load(f"{OWN}transposed")).inputs, own.batch(1, dtype="float32")
    assert [t.stride() for t in drawn] == [t.stride() for t in cast("tuple[Tensor, ...]", given)]


@pytest.mark.parametrize("strategy", ["fsdp2", "zero2", "zero3"])
def test_a_loss_may_leave_outputs_out(strategy: str, tmp_path: Path) -> None:
    case = zsim.load(scenario(tmp_path, STRATEGIES[strategy]))
    assert zsim.validate(case, against="fake", module=f"{OWN}one_head_of_three").ok


def test_products_in_any_dtype_have_a_time(tmp_path: Path) -> None:
    case = zsim.load(scenario(tmp_path, '"fsdp2"'))
    own = with_module(case, f"{OWN}exact", device="cpu")
    assert zsim.simulate(own).step_time
    device = own.cluster.device
    rates = {dtype: device.peak_flops(dtype) for dtype in ("float64", "complex64", "int64")}
    single = device.peak_flops("float32")
    assert rates == {"float64": single // 2, "complex64": single // 4, "int64": single}


def test_a_function_is_named_and_not_given(tmp_path: Path) -> None:
    case, build = zsim.load(scenario(tmp_path, '"ddp"')), cast("str", transformer)
    with pytest.raises(ZsimError, match="module: expected a function's name.*found a function"):
        zsim.validate(case, against="fake", module=build)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_complex_buffers_are_broadcast_as_they_are(
    dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    precision = f'{{ parameters = "{dtype}", reduce = "{dtype}" }}'
    file = scenario(tmp_path, '"ddp"', precision=precision)
    own = ["--module", f"{OWN}rotated", "--against", "fake", "--json"]
    assert main(["validate", file, *own]) == 0
    checks = verdict(capsys)
    assert checks["bytes"] == checks["memory of parts"] == "ok"


def test_operators_that_refuse_float64_are_compared_in_float32(tmp_path: Path) -> None:
    """Rounding error is still told: a shift of all scores has no gradient of its own."""
    case = with_module(zsim.load(scenario(tmp_path, '"ddp"')), f"{OWN}routed", device="cpu")
    trained = SingleProcess(case).train(3)
    assert trained.directionless["shift"].all()
    assert not trained.directionless["experts"].any()


def test_a_refusal_has_the_line_of_the_users_forward(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = HERE.read_text().splitlines()
    line = next(n for n, text in enumerate(lines, 1) if "torch.where" in text)
    file = scenario(tmp_path, '"fsdp2"')
    assert main(["run", file, "--module", f"{OWN}selecting"]) == 2
    first, *_, frame, _, _, last = capsys.readouterr().err.rstrip().splitlines()
    assert "aten::nonzero: expected shapes" in first
    assert f"line {line}, in forward)" in first
    assert frame == f'  File "{HERE}", line {line}, in forward'
    assert last.endswith("DynamicOutputShapeException: aten.nonzero.default")


def test_an_error_on_a_real_batch_has_the_line_of_the_users_forward(tmp_path: Path) -> None:
    line = 1 + next(
        n for n, text in enumerate(HERE.read_text().splitlines()) if "on real tensors alone" in text
    )
    said = f"found IndexError: index out of range in self \\({HERE}, line {line}\\); a defect"
    with pytest.raises(ZsimError, match=said):
        zsim.validate(
            zsim.load(scenario(tmp_path, '"fsdp2"')), against="fake", module=f"{OWN}ninth_row"
        )


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("mymodel", "module mymodel: expected a function as mypackage.mymodel:build"),
        (f"{OWN}absent", "expected a function that can be called, found AttributeError"),
        (f"{OWN}raising", f"found ValueError: no such checkpoint ({HERE}, line "),
        (f"{OWN}raising", 'raise ValueError("no such checkpoint")\n'),
        (f"{OWN}needing", f"missing 1 required positional argument: 'config' ({HERE}, line "),
        ("nowhere:build", "No module named 'nowhere'; start it in the folder that has nowhere"),
        (f"{OWN}leaving", "found SystemExit: 7"),
        (f"{OWN}lossless", f'needs a loss: "loss": lambda output: … ({HERE}, line '),
        (f"{OWN}nothing", "expected a dict with module and inputs, and perhaps loss and units, "
                          "found one without inputs"),
    ],
)
def test_what_makes_no_module_is_refused(
    module: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = scenario(tmp_path, '"ddp"')
    assert main(["validate", file, "--against", "fake", "--module", module]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"frozen": '["blocks.0.*"]'}, "frozen: expected none with an own module"),
        ({"batch": "{ micro_batch = 1, forwards = 2 }"}, "batch.forwards: expected 1"),
    ],
)
def test_keys_that_say_something_of_the_model_are_refused(
    more: dict[str, str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = scenario(tmp_path, '"ddp"', **more)
    argument = f"{OWN}perceptron"
    assert main(["validate", file, "--against", "fake", "--module", argument]) == 2
    assert message in capsys.readouterr().err


def test_no_timers_take_the_place_of_a_users_module(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, emulated = scenario(tmp_path, '"ddp"'), ["--compute", "emulated", "--testbed", "2x1gbit"]
    assert main(["validate", file, "--module", f"{OWN}perceptron", *emulated]) == 2
    assert "found your own module, which has no timers" in capsys.readouterr().err


def test_a_users_module_is_run_without_a_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, own = scenario(tmp_path, '"fsdp2"'), f"{OWN}perceptron"
    assert main(["run", file, "--backend", "fake", "--module", own, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["provenance"]
    assert told["module"] == own
    assert told["fingerprint"] != zsim.load(file).fingerprint
    assert zsim.run(zsim.load(file), backend="fake", module=own).record.provenance["module"] == own


def test_a_users_module_is_simulated_on_gpus_that_are_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trace is one for CUDA; every command without a real run takes the module too."""
    gpus, own = '{ preset = "dgx-h100", nodes = 2 }', ["--module", f"{OWN}transformer"]
    file = scenario(tmp_path, '"fsdp2"', cluster=gpus)
    assert main(["run", file, *own, "--json"]) == 0
    run = json.loads(capsys.readouterr().out)
    made = zsim.run(zsim.load(file), backend="sim", module=own[1])
    whole = transformer()
    traced = trace(whole["module"], whole["inputs"], units=whole["units"], device="cuda")
    model = made.scenario.model
    assert isinstance(model, TracedModel)
    assert (model.lowered, model.devices) == (traced.lowered, ("cuda",))
    assert run["step_time_ns"] == int(made.step_time) > 0
    assert main(["show", file, *own, "--memory", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert main(["fit", file, *own, "--json"]) == 0
    fitted = json.loads(capsys.readouterr().out)
    needs = {each["name"]: each["needed_bytes"]["nbytes"] for each in fitted["candidates"]}
    assert needs["fsdp2"] == shown["needed_bytes"]["nbytes"] == made.device_memory.needed_bytes


def test_fit_says_the_same_of_a_users_module_whatever_strategy_it_begins_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """DDP's reductions begin between units too, and fully_shard casts inputs that DDP does not."""
    answers: list[dict[str, tuple[int, int]]] = []
    for strategy in ("ddp", "zero3", "fsdp2"):
        file = scenario(
            tmp_path, f'"{strategy}"', cluster='{ preset = "dgx-h100", nodes = 2 }',
            precision='{ parameters = "bf16", reduce = "fp32" }',
        )
        assert main(["fit", file, "--module", f"{OWN}transformer", "--json"]) == 0
        candidates = json.loads(capsys.readouterr().out)["candidates"]
        answers.append({
            each["name"]: (each["needed_bytes"]["nbytes"], each["step_time_ns"])
            for each in candidates
        })
    assert len(answers[0]) > 6
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize(("module", "warned"), [("adapted", True), ("transformer", False)])
def test_a_module_of_one_unit_is_told_to_overlap_less_under_ddp(module: str, warned: bool) -> None:
    case = zsim.Scenario(
        model={"preset": "gpt-tiny"}, batch={"micro_batch": 1}, strategy={"name": "ddp"},
        cluster={"preset": "dgx-h100"},
    )
    told = map(str, caveats(zsim.run(case, module=f"{OWN}{module}").scenario))
    assert any("trace it with units" in line for line in told) is warned


@pytest.mark.parametrize("engine", ["deepspeed1", "deepspeed2"])
def test_a_users_module_is_simulated_under_deepspeeds_engine(engine: str) -> None:
    """Gradients of all parameters are reduced once, and their new values gathered once."""
    case = zsim.Scenario(
        model={"preset": "gpt-tiny"}, batch={"micro_batch": 1},
        cluster={"preset": "dgx-h100", "nodes": 2}, offload={"optimizer": "cpu"},
        strategy={"name": engine}, precision={"parameters": "bf16", "reduce": "bf16"},
    )
    own = zsim.run(case, module=f"{OWN}transformer")
    numel = sum(parameter.numel for parameter in own.scenario.model.parameters)
    nbytes = {kind: traffic.bytes for kind, traffic in own.collectives.items()}
    reduced = sum(nbytes.get(kind, 0) for kind in ("reduce", "all_reduce", "reduce_scatter"))
    assert 2 * numel <= reduced < 2.1 * numel
    assert 2 * numel <= nbytes["all_gather"] < 2.1 * numel


def test_a_build_without_an_end_is_named_at_the_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, begin = scenario(tmp_path, '"ddp"'), time.monotonic()
    arguments = ["--against", "fake", "--module", f"{OWN}hanging", "--timeout", "2"]
    assert main(["validate", file, *arguments]) == 2
    error = capsys.readouterr().err
    assert f"expected a module that is built within 2 s, found none yet ({HERE}, line " in error
    assert "raise --timeout" in error
    assert time.monotonic() - begin < 10


@pytest.mark.gloo
def test_a_build_without_an_end_on_ranks_is_named_at_the_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], time_out_when: TimeOutWhen
) -> None:
    own = f"{OWN}hanging_on_a_rank"
    names = "/proc/{}/comm"
    time_out_when(lambda ranks: all(
        Path(names.format(rank.process.pid)).read_text().strip() == HANGING for rank in ranks
    ))
    file = scenario(tmp_path, '"ddp"')
    assert main(["validate", file, "--module", own, "--timeout", "600"]) == 1
    error = capsys.readouterr().err
    assert f"a hang: ranks [0, 1] at building the module {own}" in error
    assert f'File "{HERE}", line ' in error


def test_signals_end_a_command_whatever_a_users_code_makes_of_them() -> None:
    before = [signal.signal(number, end_of_test) for number in signals.ENDING]
    try:
        own = own_module.load(f"{own_modules.__name__}:deaf")
        own.make(1)
        assert [signal.getsignal(number) for number in signals.ENDING] == [end_of_test] * 2
    finally:
        for number, handler in zip(signals.ENDING, before, strict=True):
            signal.signal(number, handler)


def end_of_test(number: int, frame: FrameType | None) -> None:
    """A handler of a command."""


def test_no_scenario_file_can_name_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = scenario(tmp_path, '"ddp"', model=f'{{ module = "{OWN}perceptron" }}')
    assert main(["validate", file, "--against", "fake"]) == 2
    assert "model.module: unknown key" in capsys.readouterr().err
