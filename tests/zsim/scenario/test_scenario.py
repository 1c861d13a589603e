"""A scenario file is read whole, or refused with every problem named by file and key."""

import json
import random
import time
import tomllib

import pytest

import zsim
from tests.support.folders import ROOT
from zsim.engine.execution import Execution
from zsim.errors import ScenarioError, ZsimError, shown
from zsim.ir.mesh import Mesh
from zsim.models.checkpointing import Checkpointing
from zsim.models.training_options import Batch, Optimizer, Precision
from zsim.models.wrapping import Wrapping
from zsim.scenario import scenario
from zsim.scenario.checks import refusals
from zsim.scenario.derived import derived
from zsim.scenario.keys import json_schema, reference, table_checks
from zsim.scenario.plan import plan
from zsim.strategies import STRATEGIES

FILES = sorted((ROOT / "scenarios").rglob("*.toml"))
WHOLE = """\
description = "FSDP2 on four ranks"
model = { preset = "gpt-tiny" }
batch = { micro_batch = 2, sequence_length = 64, accumulation = 2 }
cluster = { preset = "cpu-gloo", ranks = 4 }
strategy = { name = "fsdp2", dp_shard = 4, reshard_after_forward = "auto", sync = "last" }
precision = { parameters = "bf16", reduce = "fp32" }
optimizer = { name = "sgd", implementation = "for-loop", momentum = 0.9 }
steps = 4
seed = 7

[expect]
all_gathers = 18
"""


def parse(text: str) -> scenario.Scenario:
    return scenario.parse(text.encode(), where="x.toml", folder=ROOT)


def problems(text: str) -> tuple[str, ...]:
    with pytest.raises(ScenarioError) as caught:
        parse(text)
    return caught.value.problems


def changed(old: str, new: str) -> str:
    assert old in WHOLE
    return WHOLE.replace(old, new)


def test_a_scenario_is_read_whole():
    case = parse(WHOLE)
    assert case.name == "x"
    assert case.batch == Batch(micro_batch=2, sequence_length=64, accumulation=2)
    assert case.mesh == Mesh(dp_replicate=1, dp_shard=4)
    assert case.precision == Precision(parameters="bfloat16", reduce="float32")
    assert case.optimizer == Optimizer(name="sgd", implementation="for-loop", momentum=0.9)
    assert (case.strategy, case.options.reshard_after_forward, case.sync) == (
        "fsdp2", "auto", "last",
    )
    assert (case.steps, case.seed, case.cluster.num_ranks, case.model.name) == (
        4, 7, 4, "gpt-tiny",
    )
    assert [(item.name, item.operator, item.value) for item in case.expect] == [
        ("all_gathers", "==", 18)
    ]
    assert case.tables == tomllib.loads(WHOLE) == tomllib.loads(case.to_toml())
    assert case.to_toml(folder="elsewhere") == case.to_toml()  # it names no file


def test_there_are_at_least_25_scenarios_with_names_of_their_own():
    assert len(FILES) >= 25
    assert len({file.stem for file in FILES}) == len(FILES)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_scenario_of_the_project_is_valid_and_short(file):
    case = scenario.load(file)
    assert case.description
    assert case.expect
    assert 10 <= len(file.read_text().splitlines()) <= 30


def test_every_strategy_is_used_at_two_and_at_four_ranks():
    used = {(case.strategy, case.world_size) for case in map(scenario.load, FILES)}
    names = {name for name, strategy in STRATEGIES.items() if strategy.axes}
    assert {(name, 1) for name in STRATEGIES.keys() - names} <= used
    assert {(name, 4) for name in names} <= used
    assert {(name, 2) for name in names - {"hsdp"}} <= used


def test_the_published_schema_is_in_step():
    assert json.loads((ROOT / "scenarios" / "schema.json").read_text()) == json_schema.json_schema()


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        ("dp_shard = 4", "dp_shrad = 4", "x.toml: strategy.dp_shrad: unknown key, did you mean "
                                         "dp_shard?"),
        ("steps = 4", "stepps = 4", "x.toml: stepps: unknown key, did you mean steps?"),
        ("accumulation = 2", "acumulation = 2", "x.toml: batch.acumulation: unknown key, did you "
                                                "mean accumulation?"),
        ("dp_shard = 4", "dp_shard = 3", "x.toml: cluster: expected 3, by strategy.dp_shard 3, "
                                         "found 4 ranks; leave one axis out"),
        ("dp_shard = 4", "tp = 4", "x.toml: strategy.tp: tensor, pipeline, context and expert "
                                   "parallelism are not modelled"),
        ("dp_shard = 4", "pp = 4", "x.toml: strategy.pp: tensor, pipeline, context and expert "
                                   "parallelism are not modelled"),
        ('"fsdp2"', '"fsdp3"', "did you mean fsdp2?"),
        ('"fsdp2"', '"FullyShardedDataParallel"', "did you mean fsdp1?"),
        ('"fsdp2"', '"hybrid_shard"', "did you mean hsdp?"),
        ("dp_shard = 4", "dp_replicate = 2", "strategy.dp_replicate: an option of ddp, zero1, "
                                             "zero2, zero3, hsdp, fsdp1 and zero_redundancy alone"),
        ("dp_shard = 4", "all_reduce = 3", "x.toml: strategy.all_reduce: an option of hsdp alone"),
        ('"auto", sync', '"atuo", sync', 'x.toml: strategy.reshard_after_forward: expected '
                                         '"auto", true, false or a whole number'),
        ("all_gathers", "all_gather", "x.toml: expect.all_gather: unknown key, did you mean "
                                      "all_gathers?"),
        ("all_gathers = 18", 'peak_memory = "<= 80G"', "x.toml: expect.peak_memory: "),
        ('"gpt-tiny"', '"gpt-tinny"', 'unknown model "gpt-tinny", did you mean gpt-tiny?'),
        ('"cpu-gloo"', '"cpu-glo"', 'x.toml: cluster.preset: unknown cluster "cpu-glo", did you '
                                    'mean cpu-gloo?'),
        ('"gpt-tiny"', '"gpt-tiny", num_layers = 5', "x.toml: model.num_layers: expected 1 to 4"),
        ("steps = 4", "steps = 4.5", "x.toml: steps: expected a whole number, found 4.5"),
        ("steps = 4", "steps = true", "x.toml: steps: expected a whole number, found true"),
        ("steps = 4", "steps = 0", "x.toml: steps: expected at least 1, found 0"),
        ("steps = 4", 'steps = "0"', 'x.toml: steps: expected a whole number, found "0"'),
        ("steps = 4", "steps = [1, [2]]", "x.toml: steps: expected a whole number, found [1, …]"),
        ("steps = 4", "steps = { a = true }", "x.toml: steps: expected a whole number, found { a "
                                              "= true }"),
        ("steps = 4", "steps = 2020-01-02", "x.toml: steps: expected a whole number, found "
                                            "2020-01-02"),
        ("steps = 4", 'steps = 4\nfrozen = "["', 'x.toml: frozen: expected a list, found "["'),
        ("momentum = 0.9", "momentum = nan", "x.toml: optimizer.momentum: expected a finite "
                                             "number, found nan"),
        ("momentum = 0.9", "momentum = 1e999", "x.toml: optimizer.momentum: expected a finite "
                                               "number, found inf"),
        ("steps = 4", "steps = 0x" + "f" * 40, "x.toml: steps: expected an integer of at most 64 "
                                               "bits"),
        ("steps = 4", "steps = " + "9" * 5000, "x.toml: not TOML: "),
        ("steps = 4", "steps = 1\nsteps = 2", "x.toml: not TOML: "),
        ("steps = 4", "steps = 2020-13-45", "x.toml: not TOML: "),
        ("accumulation = 2", "accumulation = 0", "x.toml: batch.accumulation: expected at least "
                                                 "1, found 0"),
        ('preset = "gpt-tiny"', 'family = "gpt"', "x.toml: model.sizes.num_layers: expected a "
                                                  "value, found nothing"),
        ('preset = "gpt-tiny"', 'family = "gtp"', 'x.toml: model.family: unknown family "gtp", '
                                                  'did you mean gpt?'),
        ('preset = "gpt-tiny"', "", "x.toml: model: expected one of preset, family, huggingface "
                                    "or traced, found none of them"),
        ('preset = "gpt-tiny"', 'huggingface = "none.json"', "x.toml: model.huggingface: "
                                                             "none.json: no such file"),
        ('preset = "gpt-tiny"', 'preset = "mlp-tiny"', "x.toml: batch.sequence_length: expected "
                                                       "1 for an mlp"),
        ("sequence_length = 64", "sequence_length = 4096", "x.toml: batch.sequence_length: "
                                                           "expected at most "),
    ],
)
def test_a_bad_key_is_named_with_its_file_and_the_remedy(old, new, wanted):
    text = changed(old, new)
    if "at most " in wanted and "4096" in new:
        text = text.replace("gpt-tiny", "gpt-2-124m")
    assert any(wanted in problem for problem in problems(text)), problems(text)


def test_all_problems_are_listed_at_once():
    text = (
        changed("steps = 4", "stepps = 4")
        .replace("micro_batch", "micro_batsh")
        .replace("dp_shard", "dp_shrad")
        .replace("gpt-tiny", "gpt-tinny")
    )
    assert problems(text) == (
        "x.toml: stepps: unknown key, did you mean steps?",
        "x.toml: batch.micro_batch: expected a value, found nothing",
        "x.toml: batch.micro_batsh: unknown key, did you mean micro_batch?",
        "x.toml: strategy.dp_shrad: unknown key, did you mean dp_shard?",
        'x.toml: model.preset: unknown model "gpt-tinny", did you mean gpt-tiny?',
    )


def test_an_int_for_reshard_after_forward_must_divide_the_ranks():
    with pytest.raises(ZsimError, match="3"):
        plan(parse(changed('"auto"', "3")), device="cpu")


def test_an_axis_of_one_that_the_strategy_does_not_use_may_stand_there():
    assert parse(changed("dp_shard = 4", "dp_shard = 4, dp_replicate = 1")).mesh == Mesh(dp_shard=4)


def test_the_only_axis_is_filled_from_the_cluster():
    assert parse(changed("dp_shard = 4, ", "")).mesh == Mesh(dp_shard=4)


def test_too_much_work_is_refused_before_it_begins():
    text = changed("accumulation = 2", "accumulation = 10000").replace("ranks = 4", "ranks = 4000")
    assert (
        "param groups × micro-batches"
        in problems(text.replace("dp_shard = 4", "dp_shard = 4000"))[0]
    )


def test_sizes_of_a_family_make_a_model():
    sizes = "{ num_layers = 2, hidden_size = 8, num_heads = 2, vocabulary = 11 }"
    case = parse(changed('preset = "gpt-tiny"', f'family = "gpt", sizes = {sizes}'))
    assert (case.model.family, len(case.model.units)) == ("gpt", 3)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2"])
def test_a_hugging_face_config_makes_a_model(tmp_path, kind):
    config = {
        "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16
    }
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"model_type": kind, "vocab_size": 11})
    )
    text = changed('preset = "gpt-tiny"', 'huggingface = "config.json"')
    case = scenario.parse(text.encode(), where="x.toml", folder=tmp_path)
    blocks = 2 * (2 * 8 + 4 * 8 * 8 + 3 * 8 * 16 + (3 * 8 if kind == "qwen2" else 0))
    assert case.model.num_parameters == 2 * 11 * 8 + 8 + blocks


@pytest.mark.parametrize("name", ["missing.toml", ".", "\0.toml"])
def test_a_path_that_is_no_file_is_refused(name):
    with pytest.raises(ScenarioError):
        scenario.load(name)


def test_a_link_to_a_scenario_is_read(tmp_path):
    (tmp_path / "link.toml").symlink_to(FILES[0])
    assert scenario.load(tmp_path / "link.toml").name == "link"


def damage(text: str, rng: random.Random) -> bytes:
    """One to four random changes: bytes cut, doubled, replaced, lines swapped, numbers grown, words
    of TOML put in."""
    data = bytearray(text.encode())
    for _ in range(rng.randint(1, 4)):
        index = rng.randrange(len(data) + 1)
        length = rng.choice([1, 1, 2, 5, 20])
        change = rng.randrange(7)
        if change == 0:
            del data[index : index + length]
        elif change == 1:
            data[index:index] = data[index : index + length] * rng.choice([1, 2, 50])
        elif change == 2:
            data[index : index + 1] = bytes([rng.randrange(256)])
        elif change == 3:
            data[index:index] = rng.choice(WORDS)
        elif change == 4:
            digits = [i for i, byte in enumerate(data) if 48 <= byte <= 57]
            if digits:
                data[rng.choice(digits) : rng.choice(digits)] = str(rng.randint(-1, 10**6)).encode()
        elif change == 5:
            lines = data.split(b"\n")
            rng.shuffle(lines)
            data = bytearray(b"\n".join(lines))
        else:
            other = rng.choice(TEXTS).encode()
            start = rng.randrange(len(other))
            data[index : index + length] = other[start : start + length]
        if not data:
            break
    return bytes(data)


WORDS = [
    b'"', b"'", b"[", b"]", b"{", b"}", b"=", b".", b"\n", b"[[a]]", b"nan", b"-inf", b"true",
    b"[expect]", b"#",
]
WORDS += [
    b"1979-05-27", b"0x7fffffffffffffff", b"1e400", b"a.b.c.d = 1\n", b'"""', b"\\u0000",
    b"tp = 2, ", b"\xff",
]
TEXTS = [file.read_text() for file in FILES]


@pytest.mark.parametrize("copies", [2_500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_damaged_scenarios_are_read_or_refused_in_words(copies):
    """Each damaged copy is a valid scenario or a ScenarioError whose every line names the file;
    none is slow."""
    rng = random.Random(20)
    refused, slowest = [], 0.0
    for i in range(copies):
        data = damage(TEXTS[i % len(TEXTS)], rng)
        began = time.thread_time()
        try:
            scenario.parse(data, where="x.toml", folder=ROOT)
        except ScenarioError as error:
            refused.append(error.problems)
        slowest = max(slowest, time.thread_time() - began)
    assert len(refused) > copies // 2
    assert all(
        complaints and all(problem.startswith("x.toml: ") for problem in complaints)
        for complaints in refused
    )
    assert slowest < 5


def test_damage_that_survives_reading_still_plans_or_is_refused():
    rng = random.Random(21)
    planned, refused = 0, []
    for i in range(300):
        text = TEXTS[i % len(TEXTS)]
        digits = [
            index
            for index, letter in enumerate(text)
            if letter.isdigit() and index < text.index("optimizer =")
        ]
        index = rng.choice(digits)
        damaged = text[:index] + str(rng.randrange(10)) + text[index + 1 :]
        try:
            case = scenario.parse(damaged.encode(), where="x.toml", folder=ROOT)
            if case.world_size * len(case.model.units) < 500:
                plan(case, device="cpu")
                planned += 1
        except ZsimError as error:
            refused.append(str(error))
    assert planned > 30
    assert all(refused)


def test_a_damaged_file_is_still_toml_sometimes():
    """The meta-test: the damage is neither so light that all survive nor so heavy that nothing
    parses."""
    rng, parsed = random.Random(22), 0
    for i in range(500):
        try:
            tomllib.loads(damage(TEXTS[i % len(TEXTS)], rng).decode())
            parsed += 1
        except ValueError:
            pass
    assert 25 < parsed < 475


def test_a_table_without_a_mistake_is_read_at_once_as_key_by_key():
    for file in FILES[::5]:
        table = tomllib.loads(file.read_text())
        right, wrong = [], []
        parts = table_checks.parts(table, right)
        assert parts == table_checks.parts({**table, "no-such-key": 1}, wrong)
        assert not right
        assert len(wrong) == 1


def test_no_mistake_hides_another():
    """A number, a type, a unit, a model, a mesh, an option on its mesh, a reserved axis and an
    expectation, all at once."""
    text = """
model = { preset = "gpt-tiny", num_layers = 99 }
batch = { micro_batch = 2, sequence_length = 8 }
cluster = { preset = "cpu-gloo", ranks = 4 }
strategy = { name = "fsdp2", dp_shard = 4, reshard_after_forward = 3, tp = 1 }
optimizer = { name = "adamw", learning_rate = nan }
steps = 0
seed = -1
stepps = 3
expect = { peak_memory = "<= 80G", flurb = 3 }
"""
    complaints = problems(text)
    assert [problem.split(": ")[1] for problem in complaints] == [
        "optimizer.learning_rate",
        "stepps",
        "steps",
        "seed",
        "strategy.tp",
        "model.num_layers",
        "expect.peak_memory",
        "expect.flurb",
    ]
    complaints = problems(text.replace("nan", "0.1"))
    assert (
        "x.toml: strategy.reshard_after_forward: expected a divisor of dp_shard = 4, found 3"
        in complaints
    )


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        ("900", "expected text, found 900"),
        ('"0 KiB"', 'expected "unit", "parameter" or a size as "25 MiB", found "0 KiB"'),
        ('"25M"', 'expected "unit", "parameter" or a size as "25 MiB", found "25M"'),
    ],
)
def test_a_bucket_size_has_a_unit(written, wanted):
    text = changed('name = "fsdp2"', f'name = "zero2", granularity = {written}').replace(
        ', reshard_after_forward = "auto"', ""
    )
    assert any(problem.endswith(f"strategy.granularity: {wanted}") for problem in problems(text)), (
        problems(text)
    )
    assert parse(text.replace(written, '"25 MiB"')).options.granularity == 25 * 1024**2


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a" * 61, f'"{"a" * 60}…"'),
        (10**70, "an integer of 233 bits"),
        ('say "é"\n', '"say \\"é\\"\\n"'),
        (list(range(9)), "[0, 1, 2, 3, 4, 5, 6, 7, …]"),
        (("a" * 59, "b", 1), f'["{"a" * 59}…]'),
        ({}, "{}"),
        (None, "null"),
        (float("nan"), "nan"),
    ],
)
def test_a_value_is_shown_as_toml_writes_it_and_cut_where_it_is_long(value, text):
    assert shown(value) == text


def test_a_byte_order_mark_is_no_part_of_the_text():
    assert parse("\ufeff" + WHOLE).steps == 4


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ("dims = []", "model.sizes.dims: expected the widths before, between and after blocks, "
                      "found none"),
        (f"dims = {[1] * 5000}", "model.sizes: expected at most 4,096 layers, found more"),
    ],
)
def test_an_mlp_has_some_layers_and_not_too_many(sizes, wanted):
    text = f"""
model = {{ family = "mlp", sizes = {{ {sizes}, hidden = 4, num_classes = 2 }} }}
batch = {{ micro_batch = 2 }}
cluster = {{ preset = "cpu-gloo", ranks = 1 }}
strategy = {{ name = "ddp" }}
"""
    assert problems(text) == (f"x.toml: {wanted}",)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("seed = 7", "seed = 8"),
        ("momentum = 0.9", "momentum = 0.8"),
        ('reduce = "fp32"', 'reduce = "bf16"'),
        ('reshard_after_forward = "auto"', "reshard_after_forward = true"),
        ("micro_batch = 2", "micro_batch = 3"),
        ('preset = "gpt-tiny"', 'preset = "llama-tiny"'),
    ],
)
def test_another_training_has_another_fingerprint(old, new):
    assert parse(changed(old, new)).fingerprint != parse(WHOLE).fingerprint


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("FSDP2 on four ranks", "the same"), ("all_gathers = 18", "all_gathers = 19"),
        ("cpu-gloo", "dgx-h100"),
    ],
)
def test_the_same_training_elsewhere_has_the_same_fingerprint(old, new):
    assert parse(changed(old, new)).fingerprint == parse(WHOLE).fingerprint


def test_the_reference_of_keys_is_in_step():
    """`python -m zsim.scenario.keys.reference > scenarios/README.md` writes it anew."""
    assert (ROOT / "scenarios" / "README.md").read_text() == reference.reference()


def test_every_key_and_figure_has_a_meaning():
    rows = [line for line in reference.reference().splitlines() if line.startswith("| `")]
    assert len(rows) > 130
    assert [row for row in rows if row.endswith("|  |")] == []
    meanings = [row.rsplit("|", 2)[1] for row in rows]
    assert [meaning for meaning in meanings if len(meaning.split()) > 25] == []


def test_defaults_are_those_of_the_objects_that_tables_become():
    made = parse(
        'model = { preset = "gpt-tiny" }\nbatch = { micro_batch = 2 }\n'
        'cluster = { preset = "cpu-gloo", ranks = 4 }\nstrategy = { name = "fsdp2" }\n'
    )
    assert made.batch == Batch(micro_batch=2)
    assert (made.precision, made.optimizer) == (Precision(), Optimizer())
    assert (made.checkpointing, made.wrapping, made.execution) == (
        Checkpointing(), Wrapping(), Execution()
    )


def test_a_derived_scenario_is_refused_by_the_very_list_of_files():
    """The one list holds for whole Scenarios too: none of the project's is refused."""
    for file in FILES[::6]:
        assert refusals.problems(scenario.load(file)) == ()
    stepped = derived(parse(WHOLE), optimizer=Optimizer(momentum=0.9))
    with pytest.raises(ScenarioError) as caught:
        scenario.parse(stepped.to_toml().encode(), where="x.toml")
    assert caught.value.problems == tuple(
        f"x.toml: {problem}" for problem in refusals.problems(stepped)
    )


def test_fsdp1_shards_over_all_ranks_where_no_axis_has_a_size() -> None:
    scenario = zsim.Scenario(
        model={"preset": "gpt-tiny"}, batch={"micro_batch": 1, "sequence_length": 16},
        cluster={"preset": "cpu-gloo", "ranks": 4}, strategy={"name": "fsdp1"},
    )
    assert (scenario.mesh.dp_replicate, scenario.mesh.dp_shard) == (1, 4)


@pytest.mark.parametrize("key", ["dropout", "attention_dropout", "residual_dropout"])
def test_dropout_of_a_preset_says_where_dropout_is(key: str) -> None:
    told = problems(WHOLE.replace('preset = "gpt-tiny"', f'preset = "gpt-tiny", {key} = 0.1'))
    assert any("sizes = { …, " in line for line in told)
