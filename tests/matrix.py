"""The matrix of memory scenarios: every strategy with all its options × families × precision × optimizer × checkpointing × ranks.

Models are deep (six layers and more), so that keeping everything gathered cannot pass for resharding, and narrow with a
small vocabulary, so that the peak is often a collective's buffer rather than the logits. Sizes are uneven on purpose.
Each draw is a scenario's text, so that a recorded one can be run again without hypothesis.
"""

from __future__ import annotations

import json

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

NUM_RANKS = (1, 2, 3, 4, 8, 64, 1024)
NUM_DRAWS = {"ddp": 5, "zero_redundancy": 5, "zero1": 7, "zero2": 6, "zero3": 7, "fsdp2": 8, "hsdp": 7}
"""Draws of the committed matrix for each number of ranks, by strategy: 315 in all."""
FLAT = ('"unit"', '"parameter"', '"900 B"', '"6 KiB"')
PRECISIONS = (("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16"))
OPTIMIZERS = (
    'name = "adamw"',
    'name = "adamw", implementation = "for-loop"',
    'name = "adamw", implementation = "fused"',
    'name = "sgd"',
    'name = "sgd", implementation = "for-loop", weight_decay = 0.0',
    'name = "sgd", momentum = 0.9',
    'name = "sgd", momentum = 0.9, implementation = "for-loop"',
)
BUCKETS = ("", ", bucket_cap_mb = 0.001", ", bucket_cap_mb = 0.01")
VIEWS = ("", ", gradient_as_bucket_view = true")


def _choice(draw: st.DrawFn, *values: str) -> str:
    return draw(st.sampled_from(values))


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _sizes(draw: st.DrawFn, family: str, attention: str) -> str:
    layers = draw(st.integers(6, 8))
    width = draw(st.sampled_from([8, 12, 20] if family == "gpt" else [8, 16, 24]))
    if family == "mlp":
        dims = draw(st.lists(st.integers(3, 33), min_size=layers + 1, max_size=layers + 1))
        return f"dims = {dims}, hidden = {draw(st.integers(2, 41))}, num_classes = {draw(st.integers(2, 9))}"
    tied = _choice(draw, "true", "false")
    common = f'num_layers = {layers}, hidden_size = {width}, tied = {tied}, attention = "{attention}"'
    vocabulary = draw(st.sampled_from([5, 13, 101]))
    if family == "gpt":
        return f"{common}, num_heads = {draw(st.sampled_from([1, 2, 4]))}, vocabulary = {vocabulary}"
    heads, kv_heads = draw(st.sampled_from([(4, 4), (4, 2), (2, 1)]))
    wide = draw(st.integers(7, 50))
    return f"{common}, num_heads = {heads}, num_kv_heads = {kv_heads}, feed_forward = {wide}, vocabulary = {vocabulary}"


def _model(draw: st.DrawFn, family: str, attention: str) -> str:
    length = "" if family == "mlp" else f", sequence_length = {draw(st.sampled_from([2, 5, 16]))}"
    batch = f"micro_batch = {draw(st.integers(1, 3))}{length}, accumulation = {draw(st.integers(1, 3))}"
    sizes = _sizes(draw, family, attention)
    return f'model = {{ family = "{family}", sizes = {{ {sizes} }} }}\nbatch = {{ {batch} }}\n'


def _checkpointing(draw: st.DrawFn, family: str, attention: str) -> str:
    own = {"mlp": ["gelu"], "gpt": ["attention", "layer_norm", "gelu"], "llama": ["attention", "swiglu", "rms_norm"]}
    forms = ["", "", 'mode = "full"', 'mode = "full", every = 2']
    forms.append(f'mode = "selective", recompute = {json.dumps([draw(st.sampled_from(own[family]))])}')
    saved = [["linear"], ["linear", "attention"]] if family != "mlp" else [["linear"]]
    if family == "mlp" or attention == "sdpa":
        forms.append(f'mode = "selective", save = {json.dumps(draw(st.sampled_from(saved)))}')
    form = _choice(draw, *forms)
    return f"activation_checkpointing = {{ {form} }}\n" if form else ""


def _strategy(draw: st.DrawFn, strategy: str, ranks: int) -> str:
    if strategy in ("ddp", "zero_redundancy"):
        return _choice(draw, *BUCKETS) + _choice(draw, *VIEWS)
    if strategy in ("zero1", "zero2", "zero3"):
        form = {"zero1": f', form = "{_choice(draw, "all_reduce", "reduce_scatter")}"', "zero2": ""}
        own = form.get(strategy) or (f", lookahead = {draw(st.integers(0, 3))}" if strategy == "zero3" else "")
        return f"{own}, granularity = {_choice(draw, *FLAT)}"
    replicas = draw(st.sampled_from(_divisors(ranks)[:4])) if strategy == "hsdp" else 1
    shards = ranks // replicas
    parts = [str(n) for n in _divisors(shards)]
    reshard = _choice(draw, '"auto"', "true", "false", _choice(draw, *parts))
    mesh = f", dp_replicate = {replicas}, dp_shard = {shards}" if strategy == "hsdp" else ""
    return f"{mesh}, reshard_after_forward = {reshard}"


@st.composite
def scenario_texts(draw: st.DrawFn, strategy: str, *, ranks: int) -> str:
    """A whole scenario file of `strategy` on `ranks` ranks."""
    family = _choice(draw, "gpt", "llama", "mlp")
    attention = _choice(draw, "explicit", "sdpa")
    parameters, reduce = draw(st.sampled_from(PRECISIONS))
    options = _strategy(draw, strategy, ranks)
    return (
        _model(draw, family, attention)
        + _checkpointing(draw, family, attention)
        + f'cluster = {{ preset = "cpu-gloo", ranks = {ranks} }}\n'
        + f'strategy = {{ name = "{strategy}"{options}, sync = "{_choice(draw, "every", "last")}" }}\n'
        + f'precision = {{ parameters = "{parameters}", reduce = "{reduce}" }}\n'
        + f"optimizer = {{ {_choice(draw, *OPTIMIZERS)} }}\n"
    )


def draws(strategy: str, *, ranks: int, number: int) -> tuple[str, ...]:
    """`number` different scenario texts, the same for the same version of hypothesis."""
    found: dict[str, None] = {}

    @seed(1_000_000 * list(NUM_DRAWS).index(strategy) + ranks)
    @settings(
        max_examples=number,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(scenario_texts(strategy, ranks=ranks))
    def collect(text: str) -> None:
        found.setdefault(text)

    collect()
    return tuple(found)


def matrix() -> tuple[str, ...]:
    """All draws; the strategies take turns, so that any stretch of it has each of them."""
    columns = [
        [text for ranks in NUM_RANKS for text in draws(strategy, ranks=ranks, number=number)]
        for strategy, number in NUM_DRAWS.items()
    ]
    longest = max(len(column) for column in columns)
    return tuple(column[i] for i in range(longest) for column in columns if i < len(column))
