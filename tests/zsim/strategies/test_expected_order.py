"""Order, counts and bytes of collectives that torch's own tests of fully_shard and FSDP expect.

The table of all its expectations is tests/torch_expectations.md. Each docstring here names torch's
file, and in it the subject of the test.
"""

from __future__ import annotations

import re
from collections import Counter

import pytest

from tests.support.folders import ROOT
from zsim.ir.ops import COLLECTIVES, Alloc, Free, Op
from zsim.scenario.plan import plan
from zsim.scenario.scenario import parse

SIGNS = {"all_gather": "+", "reduce_scatter": "~", "all_reduce": "="}
FULL = 'activation_checkpointing = { mode = "full" }'
WHOLE = 'name = "fsdp2", reshard_after_forward = true'


def ops(
    strategy: str, *, layers: int = 3, ranks: int = 2, model: str = "", batch: str = "",
    more: str = ""
) -> tuple[Op, ...]:
    """The steady step of rank 0, of a small gpt whose first block's input needs a gradient."""
    text = f"""
model = {{ family = "gpt", sizes = {{ num_layers = {layers}, hidden_size = 8, num_heads = 2, vocabulary = 13{model} }} }}
batch = {{ micro_batch = 2, sequence_length = 4{batch} }}
cluster = {{ preset = "dgx-h100", ranks = {ranks} }}
strategy = {{ {strategy} }}
{more}
"""  # noqa: E501
    return plan(parse(text.encode(), where="expected.toml"), device="cuda").of_rank(0).steady


def events(step: tuple[Op, ...], *, signs: str = "+-~") -> str:
    """The step as torch's tests record it: "+" for a unit's unshard, "-" for its reshard, "~" for
    its reduction; of these only `signs`."""
    recorded = []
    for op in step:
        resharded = any(
            isinstance(event, Free) and event.buffer.endswith(".unsharded") for event in op.memory
        )
        sign = SIGNS.get(op.kind, "-" if resharded else "")
        if sign and sign in signs:
            recorded.append(sign + op.unit.removeprefix("blocks."))
    return " ".join(recorded)


def counts(step: tuple[Op, ...]) -> dict[str, int]:
    """Number of collectives by kind."""
    return dict(Counter(op.kind for op in step if op.kind in COLLECTIVES))


BACKWARD = "+root +3 +2 -3 ~3 +1 -2 ~2 +0 -1 ~1 -0 ~0 -root ~root"
TWO_BACK = "+root +3 +2 +1 -3 ~3 +0 -2 ~2 -1 ~1 -0 ~0 -root ~root"
FORWARD = "+root +0 -0 +1 -1 +2 -2 +3 -3 -root"


@pytest.mark.parametrize("more", ["", FULL])
@pytest.mark.parametrize(("prefetch", "forward", "backward"), [
    ("forward_prefetch = 1", "+root +0 +1 -0 +2 -1 +3 -2 -3 -root", BACKWARD),
    ("forward_prefetch = 2", "+root +0 +1 +2 -0 +3 -1 -2 -3 -root", BACKWARD),
    ("backward_prefetch = 1", FORWARD, BACKWARD), ("backward_prefetch = 2", FORWARD, TWO_BACK),
])
def test_explicit_prefetch_unshards_that_many_ahead_and_reshards_as_ever(
    prefetch: str, forward: str, backward: str, more: str
) -> None:
    """test_fully_shard_comm.py, modules to prefetch in forward and in backward."""
    step = ops(f"{WHOLE}, {prefetch}", layers=4, more=more)
    assert events(step) == f"{forward} {backward}"


FIRST_PASS = "+2 +1 -2 +0 -1 -0"
SECOND_PASS = "+2 +1 -2 ~2 +0 -1 ~1 -0 ~0 -root ~root"


@pytest.mark.parametrize("more", ["", FULL])
@pytest.mark.parametrize(("keep", "first"), [
    ('"auto"', f"+root +0 -0 +1 -1 +2 -2 +0 -0 +1 -1 +2 -2 {FIRST_PASS}"),
    ("true", f"{2 * '+root +0 -0 +1 -1 +2 -2 -root '}+root {FIRST_PASS}"),
    ("2", f"{2 * '+root +0 -0 +1 -1 +2 -2 -root '}+root {FIRST_PASS}"),
    ("false", "+root +0 +1 +2 -2 -1 -0"),
])
def test_two_forwards_before_one_backward_unshard_every_block_in_each_and_the_root_until_its_end(
    keep: str, first: str, more: str
) -> None:
    """test_fully_shard_comm.py, backward prefetch with multiple forwards. A reshard of backward is
    torch's post-backward hook. Kept blocks are unsharded once more, since the first pass reshards
    them; gradients of both passes are reduced once."""
    step = ops(
        f'name = "fsdp2", reshard_after_forward = {keep}', ranks=4, batch=", forwards = 2",
        more=more,
    )
    assert events(step) == f"{first} {SECOND_PASS}"


def test_each_group_prefetches_the_one_before_it_where_modules_share_groups() -> None:
    """test_fully_shard_comm.py, backward prefetch of several modules in a group. Its last group is
    kept; ours is gathered anew, for the option is the model's."""
    step = ops('name = "fsdp2"', layers=5, model=", tied = false",
               more='wrapping = { every = 2, ends = "apart" }')  # fmt: skip
    tables, first, second, third, head = (
        "wte..wpe", "0..blocks.1", "2..blocks.3", "4", "ln_f..lm_head"
    )
    assert events(step, signs="+~").split() == [
        *(f"+{unit}" for unit in (tables, first, second, third, head)),
        f"+{head}", f"+{third}", f"~{head}", f"+{second}", f"~{third}", f"+{first}", f"~{second}",
        f"+{tables}", f"~{first}", f"~{tables}",
    ]  # fmt: skip


def test_a_unit_in_a_recomputed_block_prefetches_the_block_before() -> None:
    """test_fully_shard_comm.py, prefetch in backward inside activation checkpointing, by default.
    """
    step = ops(WHOLE, model=", tied = false",
               more=f'wrapping = {{ ends = "apart", nested = ["mlp.fc"] }}\n{FULL}')  # fmt: skip
    order = events(step, signs="+-").replace("mlp.", "").split()
    assert order[order.index("-ln_f..lm_head") + 1 :] == [
        "+ln_f..lm_head", "+2", "-ln_f..lm_head", "+2.fc", "+1", "-2.fc", "-2", "+1.fc", "+0",
        "-1.fc", "-1", "+0.fc", "+wte..wpe", "-0.fc", "-0", "-wte..wpe",
    ]  # fmt: skip


MICRO_BATCHES, UNITS = 3, 4


@pytest.mark.parametrize("keep", ["true", "false", "2"])
@pytest.mark.parametrize(("mesh", "sync", "scatters", "reduces"), [
    ('"fsdp2"', "every", MICRO_BATCHES, 0), ('"fsdp2"', "last", 1, 0),
    ('"fsdp2", offload = true', "last", 1, 0),
    ('"hsdp", dp_replicate = 2, dp_shard = 2', "every", MICRO_BATCHES, MICRO_BATCHES),
    ('"hsdp", dp_replicate = 2, dp_shard = 2', "last", 1, 1),
    ('"hsdp", dp_replicate = 2, dp_shard = 2, all_reduce = "last"', "every", MICRO_BATCHES, 1),
])
def test_accumulation_reduces_once_or_each_time_and_gathers_each_time(
    mesh: str, sync: str, scatters: int, reduces: int, keep: str
) -> None:
    """test_fully_shard_training.py, gradient accumulation in its mode "all" and, for replicas,
    with reduce-scatters only until the last micro-batch."""
    step = ops(
        f'name = {mesh}, sync = "{sync}", reshard_after_forward = {keep}', ranks=4,
        batch=f", accumulation = {MICRO_BATCHES}",
    )
    assert counts(step) == {
        "all_gather": UNITS * MICRO_BATCHES * (1 if keep == "false" else 2),
        "reduce_scatter": UNITS * scatters,
        **({"all_reduce": UNITS * reduces} if reduces else {}),
    }


@pytest.mark.parametrize("keep", ["true", "false"])
@pytest.mark.parametrize(("sync", "all_reduce", "reduces"), [
    ("every", "every", MICRO_BATCHES), ("last", "every", 1), ("every", "last", 1),
])
def test_replicas_without_shards_gather_and_scatter_nothing(
    sync: str, all_reduce: str, reduces: int, keep: str
) -> None:
    """_composable/test_replicate_training.py, gradient accumulation in its mode "all": its mesh is
    that of HSDP without shards."""
    step = ops(
        f'name = "hsdp", dp_replicate = 4, dp_shard = 1, sync = "{sync}", '
        f'all_reduce = "{all_reduce}", reshard_after_forward = {keep}',
        ranks=4, batch=f", accumulation = {MICRO_BATCHES}",
    )
    assert counts(step) == {"all_reduce": UNITS * reduces}


@pytest.mark.parametrize("keep", ["true", "false", "2"])
def test_only_trained_biases_are_reduced_and_every_block_still_in_its_turn(keep: str) -> None:
    """test_fully_shard_frozen.py, groups of frozen and of trained parameters: bytes of each
    reduce-scatter, and none delayed to the end of backward but the first block's."""
    text = f"""
model = {{ family = "mlp", sizes = {{ dims = [32, 32, 32, 32], hidden = 32, num_classes = 32 }} }}
batch = {{ micro_batch = 2 }}
cluster = {{ preset = "dgx-h100", ranks = 4 }}
strategy = {{ name = "fsdp2", reshard_after_forward = {keep} }}
frozen = ["*.weight"]
"""
    step = plan(parse(text.encode(), where="frozen.toml"), device="cuda").of_rank(0).steady
    reduced = {op.unit: op.nbytes for op in step if op.kind == "reduce_scatter"}
    gathered = {op.unit: op.nbytes for op in step if op.kind == "all_gather"}
    last = {op.unit: op.index for op in step if op.kind == "backward"}
    first_reduction = {op.unit: op.index for op in step if op.kind == "reduce_scatter"}

    blocks = [f"blocks.{i}" for i in range(3)]
    assert reduced == {"root": 4 * 32, **dict.fromkeys(blocks, 4 * (32 + 32))}
    assert gathered == {"root": 4 * 32 * 33, **dict.fromkeys(blocks, 4 * 2 * 32 * 33)}
    assert first_reduction["blocks.2"] < last["blocks.1"] < first_reduction["blocks.1"]
    assert first_reduction["blocks.1"] < last["blocks.0"]


@pytest.mark.parametrize(("parameters", "reduce", "gathered", "reduced"), [
    ("fp32", "fp32", 4, 4), ("bf16", "bf16", 2, 2), ("fp16", "fp16", 2, 2),
    ("bf16", "fp32", 2, 4), ("fp32", "bf16", 4, 2),
])
def test_blocks_are_gathered_in_the_compute_dtype_and_reduced_in_their_own(
    parameters: str, reduce: str, gathered: int, reduced: int
) -> None:
    """test_fully_shard_mixed_precision.py, compute dtype and reduce dtype."""
    step = ops(
        'name = "fsdp2"', more=f'precision = {{ parameters = "{parameters}", reduce = "{reduce}" }}'
    )
    block = 12 * 8 * 8 + 13 * 8
    assert {
        (op.kind, op.nbytes) for op in step if op.kind in COLLECTIVES and op.unit != "root"
    } == {("all_gather", gathered * block), ("reduce_scatter", reduced * block)}


@pytest.mark.parametrize("keep", ["true", "false"])
def test_gradients_that_are_not_reduced_yet_are_kept_whole_in_the_reduce_dtype(keep: str) -> None:
    """test_fully_shard_mixed_precision.py, accumulation in bf16 with reductions in float32."""
    step = ops(
        f'name = "fsdp2", sync = "last", reshard_after_forward = {keep}',
        batch=", accumulation = 2", more='precision = { parameters = "bf16", reduce = "fp32" }',
    )
    live: dict[str, Alloc] = {}
    for op in step:
        if op.micro_batch == 1 and op.kind == "forward":
            break
        for event in op.memory:
            if isinstance(event, Alloc):
                live[event.buffer] = event
            else:
                live.pop(event.buffer, None)
    kept = sum(event.nbytes for event in live.values() if event.kind == "unsharded_gradients")
    embeddings_and_norm = (13 + 4 + 2) * 8
    assert kept == 4 * (3 * (12 * 8 * 8 + 13 * 8) + embeddings_and_norm)


PARAMETERS = 3 * 16 + 4
"""Three blocks of weights and biases, two tables, and the last norm's two."""


@pytest.mark.parametrize(("strategy", "all_reduces"), [
    ('name = "fsdp2"', ["dp_shard"]),
    ('name = "hsdp", dp_replicate = 2, dp_shard = 1', []),
    ('name = "hsdp", dp_replicate = 2, dp_shard = 2', ["dp_shard"]),
])
def test_clipping_all_reduces_one_norm_over_the_shards(
    strategy: str, all_reduces: list[str]
) -> None:
    """test_fully_shard_clip_grad_norm_.py: one all-reduce for each axis over which norms are parts.
    Replicas have the whole norms of a shard already."""
    ranks = 4 if "dp_shard = 2" in strategy else 2
    step = ops(strategy, ranks=ranks, more='optimizer = { name = "adamw", clip_norm = 1.0 }')
    plain = ops(strategy, ranks=ranks)
    ours, theirs = (
        [op for op in each if op.kind == "all_reduce"] for each in (step, plain)
    )
    norms = ours[len(theirs) :]
    assert [op.group for op in norms] == all_reduces
    assert all(op.nbytes == 4 * PARAMETERS for op in norms)


@pytest.mark.parametrize("sync", ["every", "last"])
@pytest.mark.parametrize(("sharding", "first", "later"), [
    ("full", 2 * UNITS - 1, 2 * UNITS - 1), ("grad_op", UNITS, UNITS),
])
def test_fsdp1_keeps_what_no_sync_lets_it_keep(
    sharding: str, first: int, later: int, sync: str
) -> None:
    """fsdp/test_fsdp_comm.py: the root is gathered once a forward. With grad_op, units that were
    not reduced stay whole for the next forward, which gathers nothing."""
    step = ops(
        f'name = "fsdp1", dp_shard = 2, dp_replicate = 1, sharding = "{sharding}", sync = "{sync}"',
        batch=f", accumulation = {MICRO_BATCHES}",
    )
    kept = sharding == "grad_op" and sync == "last"
    gathered = Counter(op.micro_batch for op in step if op.kind == "all_gather")
    reduced = Counter(op.micro_batch for op in step if op.kind == "reduce_scatter")
    assert gathered == ({0: first} if kept else {0: first, 1: later, 2: later})
    assert reduced == ({2: UNITS} if sync == "last" else {0: UNITS, 1: UNITS, 2: UNITS})


@pytest.mark.parametrize("parameters", ["fp32", "bf16", "fp16"])
def test_one_rank_divides_no_gradient(parameters: str) -> None:
    """test_fully_shard_comm.py, reductions of a world of one: no division, no collective."""
    step = ops(
        'name = "fsdp2"', ranks=1,
        more=f'precision = {{ parameters = "{parameters}", reduce = "{parameters}" }}',
    )
    assert [kernel for op in step for kernel in op.kernels if kernel.operator == "divide"] == []
    assert counts(step) == {}


def test_the_table_of_expectations_names_tests_that_are_there() -> None:
    text = (ROOT / "tests" / "torch_expectations.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)`", text))
    defined = {
        name for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert len(named) > 50
    assert named - defined == set()
