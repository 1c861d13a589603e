"""The matrix of memory scenarios: every strategy and its options × other keys × ranks.

Other keys are families, precision and autocast, optimizers and clipping, checkpointing, wrapping,
frozen and unused parts, blocks used twice, and several forwards before one backward. What torch
refuses together is never drawn together. Each draw is a scenario's text, so that a recorded one can
be run again without hypothesis.

Models have six layers and more, so that keeping everything unsharded cannot pass for resharding.
They are narrow with a small vocabulary, so that the peak is often a collective's buffer, not the
logits. Sizes are uneven.

The first draws are each of one kind. Later ones mix all kinds and nest units in units. The last
nest units in blocks that are recomputed whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from hypothesis import HealthCheck, Phase, given, reject, seed, settings
from hypothesis import strategies as st

from zsim.errors import ScenarioError
from zsim.scenario.scenario import parse

NUM_RANKS = (1, 2, 3, 4, 8, 64, 1024)
NUM_DRAWS = {
    "ddp": 6, "zero_redundancy": 6, "zero1": 7, "zero2": 6, "zero3": 7, "fsdp2": 8, "hsdp": 7,
    "fsdp1": 15, "single": 20,
}
"""Draws of one kind for each number of ranks, by strategy. That of a plain module is one."""
AT_MOST = {4: 6, 8: 6, 64: 5, 1024: 2}
"""Most draws of a strategy by number of ranks: one of fully_shard on 1,024 takes a minute."""
FULLY_SHARDED = {4: 14, 8: 12}
"""The same as `AT_MOST`, for fsdp1, whose steps are cheaper to run. It is never on one rank, where
torch shards nothing."""
TRACED = {"encoder": (2, 16), "adapters": (2, 16), "decoders": (2, 1)}
"""Modules of tests/zreal/tracing/user_modules.py that are drawn traced, with their micro-batch and
length; under what torch itself has."""
NUM_TOGETHER = {
    "ddp": 1, "zero_redundancy": 1, "zero1": 1, "zero2": 1, "zero3": 1, "fsdp2": 4, "hsdp": 3,
    "fsdp1": 6, "single": 6,
}
"""Draws of all kinds together for each number of ranks: 118 more."""
NUM_RECOMPUTED = {"fsdp2": 3, "hsdp": 3}
"""Draws of all kinds together with units in blocks that are recomputed whole, for each number of
ranks up to 64: 36 more."""
KINDS = ("plain", "repeated", "autocast", "frozen", "unused")
"""Kinds of scenarios: blocks that run again, autocast, untrained parts; alone or together."""
TOGETHER = "together"
WITH_TRACED = ("ddp", "fsdp2", "hsdp", "zero_redundancy", "fsdp1", "single")
FLAT = ('"unit"', '"parameter"', '"900 B"', '"6 KiB"')
PRECISIONS = (
    ("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16"), ("fp16", "fp32"), ("fp16", "fp16"),
    ("fp32", "bf16"),
)
OPTIMIZERS = (
    'name = "adamw"', 'name = "adamw", implementation = "for-loop"',
    'name = "adamw", implementation = "fused"', 'name = "sgd"',
    'name = "sgd", implementation = "for-loop", weight_decay = 0.0', 'name = "sgd", momentum = 0.9',
    'name = "sgd", momentum = 0.9, implementation = "for-loop"',
)
BUCKETS = ("", ", bucket_cap_mb = 0.001", ", bucket_cap_mb = 0.01")
VIEWS = ("", ", gradient_as_bucket_view = true")
PREFETCH = (
    "", "", ", forward_prefetch = 1", ", backward_prefetch = 2",
    ", forward_prefetch = 2, backward_prefetch = 1",
)
USES = ("2", "3", '{ times = 2, order = "stack" }')
FROZEN = {
    "mlp": ('["*.bias"]', '["*.fc2.weight"]', '["blocks.0.*", "*.fc1.bias"]'),
    "gpt": (
        '["*.ln_1.*", "*.mlp.fc.weight"]', '["*.bias"]', '["wte.*", "wpe.*", "blocks.0.*"]',
        '["*.attn.*", "w?e.*"]',
    ),
    "llama": (
        '["blocks.*.weight"]', '["*.attn.[qk].*"]', '["wte.*", "blocks.0.*"]',
        '["*.attn.[qk].*", "wte.*"]',
    ),
}
"""Patterns by family; the last ones leave the first block no backward."""
FROZEN_UNITS = {
    "mlp": ('["blocks.[1-3].*"]', '["head.*", "blocks.0.*"]'), "gpt": ('["blocks.[024].*"]',),
    "llama": ('["blocks.[13].*"]',),
}
"""Patterns of whole units, which fsdp1 takes without use_orig_params too."""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Options that decide which others may be drawn."""

    strategy: str
    ranks: int
    kind: str
    family: str
    attention: str
    tied: bool
    layers: int
    accumulation: int
    uses: str
    unused: str
    frozen: str
    forwards: int
    autocast: bool

    finds: bool
    """True where DDP searches for unused parameters."""
    recomputed: bool = False
    """True where units lie in blocks that are recomputed whole."""

    @property
    def together(self) -> bool:
        """True for a mix of all kinds."""
        return self.kind == TOGETHER

    @property
    def part(self) -> bool:
        """True where some ranks may be left without parameters."""
        return self.together or self.frozen in ("", *FROZEN.get(self.family, ())[:2])


def _choice(draw: st.DrawFn, *values: str) -> str:
    return draw(st.sampled_from(values))


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


@st.composite
def frames(
    draw: st.DrawFn, strategy: str, *, ranks: int, together: bool, recomputed: bool = False
) -> Frame:
    """The kind of scenario, and the parts that it leaves untrained or runs again."""
    kind = TOGETHER if together else _choice(draw, *KINDS)
    family, layers = _choice(draw, "gpt", "llama", "mlp"), draw(st.integers(6, 8))
    unused = (
        f"blocks.{draw(st.integers(0, layers - 1))}"
        if kind == "unused" or (together and draw(st.booleans()))
        else ""
    )
    patterns = FROZEN[family] + (FROZEN_UNITS[family] if strategy == "fsdp1" else ())
    frozen = (
        _choice(draw, *patterns)
        if kind == "frozen" or ((unused or together) and draw(st.booleans()))
        else ""
    )
    finds = strategy in ("ddp", "zero_redundancy") and _choice(draw, "", "", "finds") == "finds"
    if (
        unused and strategy in ("ddp", "zero_redundancy") and not finds
    ):  # DDP waits for every gradient
        frozen = f'["{unused}.*"]'
    return Frame(
        strategy=strategy, ranks=ranks, kind=kind, family=family,
        attention=_choice(draw, "explicit", "sdpa", "math"),
        tied=family != "mlp" and draw(st.booleans()), layers=layers + bool(unused),
        accumulation=draw(st.integers(1, 2 if together else 3)),
        uses=_choice(draw, "1", *USES)
        if kind == "repeated"
        else _choice(draw, "1", "1", "2", USES[-1])
        if together
        else "1", unused=unused, frozen=frozen,
        forwards=draw(st.sampled_from([1, 1, 2])) if together else 1,
        autocast=kind == "autocast" or (together and draw(st.booleans())), finds=finds,
        recomputed=recomputed,
    )


def _sizes(draw: st.DrawFn, frame: Frame) -> str:
    loss = _choice(draw, "", "", ', loss_dtype = "float32"')
    if frame.family == "mlp":
        width = st.integers(3, 33)
        alike = frame.unused or frame.uses != "1"
        dims = (
            [draw(width)] * (frame.layers + 1)
            if alike
            else [draw(width) for _ in range(frame.layers + 1)]
        )
        return (
            f"dims = {dims}, hidden = {draw(st.integers(2, 41))}, num_classes = "
            f"{draw(st.integers(2, 9))}{loss}"
        )
    width, vocabulary = (
        draw(st.sampled_from([8, 12, 20] if frame.family == "gpt" else [8, 16, 24])),
        draw(st.sampled_from([5, 13, 101])),
    )
    tied = "true" if frame.tied else "false"
    common = (
        f'num_layers = {frame.layers}, hidden_size = {width}, tied = {tied}, attention = '
        f'"{frame.attention}"'
    )
    if frame.family == "gpt":
        return (
            f"{common}, num_heads = {draw(st.sampled_from([1, 2, 4]))}, vocabulary = "
            f"{vocabulary}{loss}"
        )
    heads, kv_heads = draw(st.sampled_from([(4, 4), (4, 2), (2, 1)]))
    wide = draw(st.integers(7, 50))
    return (
        f"{common}, num_heads = {heads}, num_kv_heads = {kv_heads}, feed_forward = {wide}, "
        f"vocabulary = {vocabulary}{loss}"
    )


def _model(draw: st.DrawFn, frame: Frame) -> str:
    length = (
        "" if frame.family == "mlp" else f", sequence_length = {draw(st.sampled_from([2, 5, 16]))}"
    )
    forwards = (
        draw(st.integers(1 if frame.uses != "1" else 2, 3))
        if frame.kind == "repeated"
        else frame.forwards
    )
    own = (f", uses = {frame.uses}" if frame.uses != "1" else "") + (
        f', unused = ["{frame.unused}"]' if frame.unused else ""
    )
    batch = f"micro_batch = {draw(st.integers(1, 3))}{length}, accumulation = {frame.accumulation}"
    batch += f", forwards = {forwards}" if forwards > 1 else ""
    frozen = f"frozen = {frame.frozen}\n" if frame.frozen else ""
    return (
        f'model = {{ family = "{frame.family}", sizes = {{ {_sizes(draw, frame)} }}{own} }}\nbatch '
        f'= {{ {batch} }}\n{frozen}'
    )


def _checkpointing(draw: st.DrawFn, frame: Frame) -> str:
    own = {
        "mlp": ["gelu"], "gpt": ["attention", "layer_norm", "gelu"],
        "llama": ["attention", "swiglu", "rms_norm"],
    }
    forms = ["", "", 'mode = "full"', 'mode = "full", every = 2']
    forms.append(f'mode = "selective", recompute = ["{_choice(draw, *own[frame.family])}"]')
    casts_once = (
        frame.strategy == "fsdp1"
        or not frame.autocast
        or (frame.uses == "1" and frame.forwards == 1)
    )
    if (frame.family == "mlp" or frame.attention == "sdpa") and casts_once:
        saved = (
            '["linear"]'
            if frame.family == "mlp"
            else _choice(draw, '["linear"]', '["linear", "attention"]')
        )
        forms += [
            f'mode = "selective", save = {saved}{which}' for which in ("", ", save_every = 2")
        ]
    if frame.recomputed:
        forms = [form for form in forms if form and "recompute" not in form] + [
            'mode = "full", early_stop = false'
        ]
    form = _choice(draw, *forms)
    return f"activation_checkpointing = {{ {form} }}\n" if form else ""


def _nested(draw: st.DrawFn, frame: Frame, *, checkpointing: str) -> str:
    """Units in each block's unit; a block that is recomputed whole has some or none as the frame
    says."""
    whole = checkpointing and "recompute" not in checkpointing
    nestable = frame.together and frame.strategy in ("fsdp2", "hsdp", "fsdp1")
    if not frame.recomputed and (not nestable or whole or draw(st.booleans())):
        return ""
    inner = (
        ['["fc1"]', '["fc2"]']
        if frame.family == "mlp"
        else ['["mlp"]', '["attn"]', '["attn", "mlp"]']
    )
    return f"nested = {_choice(draw, *inner)}"


def _wrapping(draw: st.DrawFn, frame: Frame, *, nested: str = "") -> str:
    if (frame.unused and not frame.together) or draw(st.booleans()):
        return f"wrapping = {{ {nested} }}\n" if nested else ""
    ends = "root" if frame.tied else _choice(draw, "root", "apart")
    more = f", {nested}" if nested else ""
    if frame.strategy == "fsdp1":  # a wrapper has one module
        form = (
            _choice(draw, 'every = "all"', 'ends = "apart"')
            if frame.family == "mlp" and not nested
            else 'every = "all"'
        )
        return f"wrapping = {{ {nested or form} }}\n"
    in_a_row = frame.uses not in ("1", USES[-1])
    every = "1" if in_a_row else _choice(draw, "2", "3", "4", "1" if ends == "apart" else '"all"')
    if in_a_row and ends == "root":
        every = '"all"'
    return f'wrapping = {{ every = {every}, ends = "{ends}"{more} }}\n'


def _fully_sharded(draw: st.DrawFn, frame: Frame, *, whole: bool) -> str:
    """The options of fsdp1. Parameters of which some are frozen are flattened together only where
    the original ones stay visible."""
    replicas = draw(
        st.sampled_from([n for n in _divisors(frame.ranks)[:3] if frame.ranks // n > 1])
    )
    uniform = not frame.frozen or (frame.frozen in FROZEN_UNITS.get(frame.family, ()) and not whole)
    original = "true" if not uniform else _choice(draw, "false", "true")
    prefetch = (
        f'backward_prefetch = "{_choice(draw, "pre", "post", "none")}", forward_prefetch = '
        f'{_choice(draw, "false", "true")}'
    )
    mesh = f"dp_replicate = {replicas}, dp_shard = {frame.ranks // replicas}"
    limiter = _choice(draw, "", ", limit_all_gathers = false")
    return (
        f', {mesh}, sharding = "{_choice(draw, "full", "grad_op")}", use_orig_params = {original}, '
        f'{prefetch}{limiter}'
    )


def _strategy(draw: st.DrawFn, frame: Frame, *, offload: bool, wrapping: str = "") -> str:
    strategy, ranks = frame.strategy, frame.ranks
    if strategy == "single":
        return ""
    if strategy == "fsdp1":
        return _fully_sharded(draw, frame, whole='"all"' in wrapping)
    if strategy in ("ddp", "zero_redundancy"):
        return _choice(draw, *BUCKETS) + _choice(draw, *VIEWS) + (", find_unused_parameters = "
                                                                  "true" if frame.finds else "")
    if strategy in ("zero1", "zero2", "zero3"):
        form = {"zero1": f', form = "{_choice(draw, "all_reduce", "reduce_scatter")}"', "zero2": ""}
        own = form.get(strategy) or (
            f", lookahead = {draw(st.integers(0, 3))}" if strategy == "zero3" else ""
        )
        return f"{own}, granularity = {_choice(draw, *FLAT)}"
    replicas = draw(st.sampled_from(_divisors(ranks)[:4])) if strategy == "hsdp" else 1
    shards = ranks // replicas
    parts = [_choice(draw, *(str(n) for n in _divisors(shards)))] if frame.part else []
    reshard = _choice(draw, '"auto"', "true", "false", *parts)
    mesh = f", dp_replicate = {replicas}, dp_shard = {shards}" if strategy == "hsdp" else ""
    when = _choice(draw, "", ', all_reduce = "last"') if strategy == "hsdp" else ""
    return (
        f"{mesh}{when}, reshard_after_forward = "
        f"{reshard}{_choice(draw, *PREFETCH)}{', offload = true' if offload else ''}"
    )


def _sync(draw: st.DrawFn, strategy: str, *others: str) -> str:
    """The key sync, "every" or one of `others`; a plain module has none."""
    return "" if strategy == "single" else f', sync = "{_choice(draw, "every", *others)}"'


@st.composite
def scenario_texts(
    draw: st.DrawFn, strategy: str, *, ranks: int, together: bool = False, recomputed: bool = False
) -> str:
    """A whole scenario file of `strategy` on `ranks` ranks."""
    frame = draw(frames(strategy, ranks=ranks, together=together, recomputed=recomputed))
    parameters, reduce = ("fp32", "fp32") if frame.autocast else draw(st.sampled_from(PRECISIONS))
    # fully_shard looks for gradients of what never ran where some wait in another dtype
    never_ran = frame.unused and parameters != reduce and strategy != "fsdp1"
    sync = _sync(draw, strategy, *(() if never_ran else ("last",)))
    offload = strategy in ("fsdp2", "hsdp") and draw(st.integers(0, 3)) == 3
    clip = "" if offload and not together else _choice(draw, "", "", ", clip_norm = 1.0")
    autocast = f', autocast = "{_choice(draw, "bf16", "fp16")}"' if frame.autocast else ""
    model, checkpointing = _model(draw, frame), _checkpointing(draw, frame)
    wrapping = _wrapping(draw, frame, nested=_nested(draw, frame, checkpointing=checkpointing))
    return (
        model
        + checkpointing
        + wrapping
        + f'cluster = {{ preset = "cpu-gloo", ranks = {ranks} }}\n'
        + f'strategy = {{ name = '
          f'"{strategy}"{_strategy(draw, frame, offload=offload, wrapping=wrapping)}{sync} }}\n'
        + f'precision = {{ parameters = "{parameters}", reduce = "{reduce}"{autocast} }}\n'
        + f"optimizer = {{ {_choice(draw, *OPTIMIZERS)}{clip} }}\n"
    )


@st.composite
def traced_texts(draw: st.DrawFn, strategy: str, *, ranks: int) -> str:
    """A scenario of a traced module. DDP casts its parameters in an order that a trace does not
    tell, so there they stay float32."""
    module = _choice(
        draw, *(TRACED if strategy != "fsdp1" else ["encoder"])
    )  # which takes no trace with frozen parts
    micro_batch, length = TRACED[module]
    precisions = PRECISIONS[:3] if strategy in ("fsdp2", "hsdp", "fsdp1") else PRECISIONS[:1]
    parameters, reduce = draw(st.sampled_from(precisions))
    frame = Frame(
        strategy=strategy, ranks=ranks, kind="traced", family="traced", attention="", tied=False,
        layers=6, accumulation=draw(st.integers(1, 2)), uses="1", unused="", frozen="", finds=False,
        forwards=1, autocast=False,
    )
    offload = strategy in ("fsdp2", "hsdp") and draw(st.booleans())
    return (
        f'model = {{ traced = "{module}-{parameters}.json" }}\n'
        f"batch = {{ micro_batch = {micro_batch}, sequence_length = {length}, accumulation = "
        f"{frame.accumulation} }}\n"
        f'cluster = {{ preset = "cpu-gloo", ranks = {ranks} }}\n'
        f'strategy = {{ name = "{strategy}"{_strategy(draw, frame, offload=offload)}'
        f'{_sync(draw, strategy, "last")} }}\n'
        f'precision = {{ parameters = "{parameters}", reduce = "{reduce}" }}\n'
        f"optimizer = {{ {_choice(draw, *OPTIMIZERS)} }}\n"
    )


def draws(
    strategy: str, *, ranks: int, number: int, together: bool = False, traced: bool = False,
    recomputed: bool = False,
) -> tuple[str, ...]:
    """`number` different scenario texts, the same for the same version of hypothesis."""
    texts: dict[str, None] = {}

    @seed(1_000_000 * list(NUM_DRAWS).index(strategy) + ranks)
    @settings(
        max_examples=number, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        traced_texts(strategy, ranks=ranks)
        if traced
        else scenario_texts(strategy, ranks=ranks, together=together, recomputed=recomputed)
    )
    def collect(text: str) -> None:
        if recomputed and _is_refused(text):
            reject()
        texts.setdefault(text)

    collect()
    return tuple(texts)


def _is_refused(text: str) -> bool:
    """True where torch refuses to recompute its blocks with the hooks of units in them
    (tests/zreal/agreement/test_together.py)."""
    try:
        parse(text.encode(), where="matrix.toml")
    except ScenarioError:
        return True
    return False


@cache
def matrix() -> tuple[str, ...]:
    """All draws; the strategies take turns, so that any part of it has each of them."""
    pairs = [
        (name, ranks) for ranks in NUM_RANKS for name in WITH_TRACED if ranks in _num_ranks(name)
    ]
    columns = [
        [
            text
            for name, ranks in pairs
            for text in draws(name, ranks=ranks, number=4, traced=True)[-1:]
        ]
    ]
    columns += _columns(NUM_DRAWS, together=False)
    recomputed = [
        [
            text
            for ranks in NUM_RANKS[:-1]
            for text in draws(name, ranks=ranks, number=number + 1, together=True, recomputed=True)[
                1:
            ]
        ]
        for name, number in NUM_RECOMPUTED.items()
    ]
    return (
        *_in_turn(columns), *_in_turn(_columns(NUM_TOGETHER, together=True)), *_in_turn(recomputed)
    )


def _num_ranks(strategy: str) -> tuple[int, ...]:
    """Numbers of ranks that a strategy may have."""
    return (1,) if strategy == "single" else NUM_RANKS[strategy == "fsdp1" :]


def _columns(numbers: dict[str, int], *, together: bool) -> list[list[str]]:
    # the first that hypothesis draws is the simplest, which has nothing together
    first = int(together)
    return [
        [
            text
            for ranks in _num_ranks(strategy)
            for text in draws(
                strategy, ranks=ranks, number=_number(strategy, number, ranks) + first,
                together=together,
            )[first:]
        ]
        for strategy, number in numbers.items()
    ]


def _number(strategy: str, number: int, ranks: int) -> int:
    most = AT_MOST | FULLY_SHARDED if strategy == "fsdp1" else AT_MOST
    return min(number, most.get(ranks, number))


def _in_turn(columns: list[list[str]]) -> tuple[str, ...]:
    longest = max(len(column) for column in columns)
    return tuple(column[i] for i in range(longest) for column in columns if i < len(column))
