"""Random scenarios for hypothesis: every strategy with its options, small odd models, CPU and GPU
clusters."""

from __future__ import annotations

import json
import re

from hypothesis import settings
from hypothesis import strategies as st

from zsim.scenario.scenario import Scenario, parse

NUM_RANKS = st.sampled_from([1, 2, 3, 4, 6, 8])
FLAT = ['granularity = "unit"', 'granularity = "parameter"', 'granularity = "900 B"']

WHOLE = settings(max_examples=25)
"""Settings of tests that plan, replay or simulate a whole scenario: each draw takes a tenth of a
second, not a microsecond."""

FAMILIES = ("mlp", "gpt", "llama")
STRATEGIES = ("ddp", "zero_redundancy", "zero1", "zero2", "zero3", "fsdp2", "hsdp", "fsdp1")


@st.composite
def models(draw: st.DrawFn, families: tuple[str, ...]) -> str:
    """A mlp of uneven widths, a gpt or a llama, of 1 to 5 blocks."""
    layers = draw(st.integers(1, 5))
    family = draw(st.sampled_from(families))
    tied = draw(st.sampled_from(["true", "false"]))
    attention = draw(st.sampled_from(["explicit", "sdpa"]))
    uses = draw(st.sampled_from(["1", "1", "2", '{ times = 2, order = "stack" }']))
    forwards = draw(st.sampled_from([1, 1, 2]))
    if family == "mlp":
        dims = draw(st.lists(st.integers(1, 9), min_size=layers + 1, max_size=layers + 1))
        uses = uses if len(set(dims)) == 1 else "1"
        sizes = f"dims = {dims}, hidden = {draw(st.integers(1, 11))}, num_classes = 3"
    elif family == "gpt":
        sizes = (
            f'num_layers = {layers}, hidden_size = 8, num_heads = 2, vocabulary = 13, tied = '
            f'{tied}, attention = "{attention}"'
        )
    else:
        sizes = (
            f"num_layers = {layers}, hidden_size = 8, num_heads = 4, num_kv_heads = 2, "
            f"feed_forward = 10, vocabulary = 13, "
            f'tied = {tied}, attention = "{attention}"'
        )
    alike = family != "mlp" or len(set(dims)) == 1
    passed_by = (
        draw(st.sampled_from([None, None, draw(st.integers(0, layers - 1))]))
        if alike and layers > 1
        else None
    )
    unused = "" if passed_by is None else f', unused = ["blocks.{passed_by}"]'
    batch = "" if family == "mlp" else ", sequence_length = 4"
    accumulation = draw(st.integers(1, 3))
    return (
        f'model = {{ family = "{family}", sizes = {{ {sizes} }}, uses = {uses} {unused}}}\n'
        f"batch = {{ micro_batch = 2{batch}, accumulation = {accumulation}, forwards = {forwards} "
        f"}}\n"
    )


@st.composite
def strategy_tables(draw: st.DrawFn, ranks: int, strategies: tuple[str, ...]) -> str:
    """One of `strategies` for `ranks` ranks with options drawn, without `sync`."""
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    flat = draw(st.sampled_from(FLAT))
    reshard = draw(st.sampled_from(['"auto"', "true", "false"]))
    replicas = draw(st.sampled_from(divisors))
    shards = ranks // replicas
    part = draw(
        st.sampled_from([reshard, *(str(n) for n in range(1, shards + 1) if shards % n == 0)])
    )
    bucket = draw(st.sampled_from(["", ", bucket_cap_mb = 0.001", ", gradient_as_bucket_view = "
                                                                  "true"]))
    form = draw(st.sampled_from(["all_reduce", "reduce_scatter"]))
    when = draw(st.sampled_from(["", ', all_reduce = "last"']))
    ahead = draw(st.sampled_from(
        ["", "", ", forward_prefetch = 1", ", forward_prefetch = 2, backward_prefetch = 2"]
    ))
    tables = {
        "ddp": f'name = "ddp"{bucket}', "zero_redundancy": f'name = "zero_redundancy"{bucket}',
        "zero1": f'name = "zero1", form = "{form}", {flat}', "zero2": f'name = "zero2", {flat}',
        "zero3": f'name = "zero3", lookahead = {draw(st.integers(0, 3))}, {flat}',
        "fsdp2": f'name = "fsdp2", reshard_after_forward = {reshard}{ahead}',
        "hsdp": f'name = "hsdp", dp_replicate = {replicas}, dp_shard = {shards}, '
                f'reshard_after_forward = {part}{ahead}{when}',
    }
    some = draw(st.sampled_from([n for n in divisors if n < ranks] or [1]))
    asked = [
        "", ', sharding = "grad_op"', ', backward_prefetch = "post"',
        ', backward_prefetch = "none", limit_all_gathers = false',
    ]
    flat_options = draw(st.sampled_from(asked)) + draw(
        st.sampled_from(["", ", forward_prefetch = true", ", use_orig_params = true"])
    )
    tables["fsdp1"] = (
        f'name = "fsdp1", dp_replicate = {some}, dp_shard = {ranks // some}{flat_options}'
    )
    return tables[draw(st.sampled_from(strategies))]


@st.composite
def checkpointing(draw: st.DrawFn, model: str) -> str:
    """No activation checkpointing, or some that fits `model`."""
    kinds = ["linear", "gelu"] if '"mlp"' in model else ["linear", "attention"]
    norms = (
        [] if '"mlp"' in model else ["attention", "layer_norm" if '"gpt"' in model else "swiglu"]
    )
    forms = ["", "", 'mode = "full"', f'mode = "selective", recompute = '
                                      f'{json.dumps(norms or ["gelu"])}']
    if "explicit" not in model:
        forms.append(f'mode = "selective", save = {json.dumps(kinds if norms else ["linear"])}')
    form = draw(st.sampled_from(forms))
    return f"activation_checkpointing = {{ {form} }}\n" if form else ""


FROZEN = {
    "mlp": ('["blocks.0.*"]', '["*.bias"]', '["*.fc2.weight"]'),
    "gpt": (
        '["*.attn.*", "w?e.*"]', '["wte.*", "wpe.*", "blocks.0.*"]',
        '["*.ln_1.*", "*.mlp.fc.weight"]', '["*.bias"]',
    ),
    "llama": ('["*.attn.[qk].*", "wte.*"]', '["wte.*", "blocks.0.*"]', '["blocks.*.weight"]'),
}


@st.composite
def frozen_parts(draw: st.DrawFn, model: str, *, strategy: str) -> str:
    """Nothing frozen, or some of what `model` has; DDP waits for what a block that never runs would
    have trained."""
    family = next(family for family in FROZEN if f'"{family}"' in model)
    if '"fsdp1"' in strategy:
        return ""
    unused = re.search(r'unused = \["(.*?)"\]', model)
    if unused and re.search(r'name = "(ddp|zero_redundancy)"', strategy):
        return f'frozen = ["{unused[1]}.*"]\n'
    if not draw(st.booleans()):
        return ""
    return f"frozen = {draw(st.sampled_from(FROZEN[family]))}\n"


@st.composite
def wrapping(draw: st.DrawFn, model: str, *, strategy: str, again: str) -> str:
    """No wrapping policy, or one that fits `model` and its activation checkpointing; with fsdp1, no
    unit of several modules."""
    if '"fsdp1"' in strategy:
        return draw(st.sampled_from(
            ["", 'wrapping = { every = 1, ends = "root" }\n', 'wrapping = { every = "all" }\n']
        ))
    dims = re.search(r"dims = \[([^]]*)\]", model)
    layers = dims[1].count(",") if dims else int(re.findall(r"num_layers = (\d+)", model)[0])
    ends = "root" if "tied = true" in model else draw(st.sampled_from(["root", "apart"]))
    some = "1" if "uses = 2" in model else str(draw(st.integers(1, layers)))
    every = draw(st.sampled_from([some, some, "1"] if ends == "apart" else [some, some, '"all"']))
    nests = ("fsdp2" in strategy or "hsdp" in strategy) and (not again or "recompute" in again)
    inner = ", nested = " + (
        '["fc2"]' if '"mlp"' in model else draw(st.sampled_from(['["mlp"]', '["attn", "mlp"]']))
    )
    nested = draw(st.sampled_from(["", inner])) if nests else ""
    return draw(
        st.sampled_from(["", f'wrapping = {{ every = {every}, ends = "{ends}"{nested} }}\n'])
    )


@st.composite
def scenario_texts(
    draw: st.DrawFn, families: tuple[str, ...] = FAMILIES, strategies: tuple[str, ...] = STRATEGIES
) -> str:
    """A whole scenario file."""
    ranks = draw(NUM_RANKS)
    cluster = draw(st.sampled_from(["cpu-gloo", "dgx-a100", "pcie-box"]))
    parameters = draw(st.sampled_from(["fp32", "bf16"]))
    reduce = draw(st.sampled_from(["fp32", parameters]))
    sync = draw(st.sampled_from(["every", "last"]))
    optimizer = draw(
        st.sampled_from([
            'name = "adamw"', 'name = "adamw", implementation = "for-loop", clip_norm = 1.0',
            'name = "sgd", momentum = 0.9',
        ])
    )
    model = draw(models(families))
    sync = (
        "every" if "unused" in model and parameters != reduce else sync
    )  # torch looks for gradients that never were
    autocast = (
        draw(st.sampled_from(["", "", ', autocast = "bf16"'])) if parameters == "fp32" else ""
    )
    once = "uses = 1 " in model and "forwards = 1 " in model and "unused" not in model
    flat = ranks > 1 and once and not autocast  # what fsdp1 does not refuse
    strategy = draw(
        strategy_tables(ranks, tuple(name for name in strategies if flat or name != "fsdp1"))
    )
    again = draw(checkpointing(model))
    casts_again = (
        autocast and "save" in again and not ("uses = 1 " in model and "forwards = 1 " in model)
    )  # torch refuses it
    again = "" if casts_again else again
    return (
        model
        + again
        + draw(wrapping(model, strategy=strategy, again=again))
        + draw(frozen_parts(model, strategy=strategy))
        + f'cluster = {{ preset = "{cluster}", ranks = {ranks} }}\n'
        + f'strategy = {{ {strategy}, sync = "{sync}" }}\n'
        + f'precision = {{ parameters = "{parameters}", reduce = "{reduce}"{autocast} }}\n'
        + f"optimizer = {{ {optimizer} }}\n"
    )


def scenarios() -> st.SearchStrategy[Scenario]:
    """Scenarios parsed from their text, as a user's would be."""
    return scenario_texts().map(lambda text: parse(text.encode(), where="random.toml"))
