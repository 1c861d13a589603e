"""The `model` table of a scenario as a ModelSpec: a preset, a family with sizes, a config.json, or
a traced module."""

from __future__ import annotations

from pathlib import Path

from zsim.errors import ScenarioError, ZsimError, shown
from zsim.io import limits
from zsim.models.families import FAMILIES, build, load_preset, preset
from zsim.models.families.size_checks import fit_problems
from zsim.models.repeats import Uses, with_uses
from zsim.models.spec import ModelSpec
from zsim.models.training_options import Batch
from zsim.scenario.keys.options import sizes_table
from zsim.scenario.keys.table_checks import did_you_mean, validated
from zsim.scenario.keys.tables import ModelTable


def named(table: ModelTable) -> ModelTable:
    """The table, where it names one model whose preset or family is there; ScenarioError, with the
    key, else. No other table is needed to tell."""
    sources = [
        key
        for key in ("preset", "family", "huggingface", "traced")
        if getattr(table, key) is not None
    ]
    if len(sources) != 1:
        several = " and ".join(sources) or "none of them"
        raise ScenarioError((f"model: expected one of preset, family, huggingface or traced, "
                             f"found {several}",))
    if table.sizes and table.family is None:
        raise ScenarioError((f"model.sizes: expected only with model.family, found with "
                             f"model.{sources[0]}",))
    of_presets = [key for key in ("num_layers", "attention", "loss_dtype") if getattr(table, key)]
    if table.preset is None and of_presets:
        keys = ", ".join(f"model.{key}" for key in of_presets)
        raise ScenarioError((f"{keys}: expected only with model.preset, found {sources[0]}",))
    if table.preset is not None:
        preset(table.preset)
    name = table.family
    if name is not None and name not in FAMILIES:
        raise ScenarioError((f"model.family: unknown family "
                             f"{shown(name)}{did_you_mean(name, list(FAMILIES))}",))
    return table


def made_model(table: ModelTable, batch: Batch, folder: Path | None) -> ModelSpec:
    """The model of a table (see `named`), whose files are relative to the scenario's `folder`."""
    length = batch.sequence_length
    if table.preset is not None:
        spec = load_preset(
            table.preset, sequence_length=length, num_layers=table.num_layers,
            attention=table.attention, loss_dtype=table.loss_dtype,
        )
    elif table.traced is not None:
        _refuse_repeated_trace(table, batch)
        return _traced(table.traced, folder, batch)
    elif table.huggingface is not None:
        from zsim.models.families import huggingface  # start-up: few models are a config.json

        spec = huggingface.load(table.huggingface, folder=folder, sequence_length=length)
    else:
        spec = _from_sizes(table, length)
    problems = fit_problems(spec, length)
    if problems:
        raise ScenarioError(problems)
    return with_uses(spec, _uses(table))


def _uses(table: ModelTable) -> Uses:
    uses = table.uses
    return Uses(times=uses) if isinstance(uses, int) else Uses(**uses.model_dump())


def _refuse_repeated_trace(table: ModelTable, batch: Batch) -> None:
    """A trace is of one forward as the module ran it, in which what it calls may run any number of
    times."""
    counts = {"model.uses": _uses(table).times, "batch.forwards": batch.forwards}
    remedy = "trace a module whose forward calls it that often"
    problems = tuple(
        f"{key}: expected 1 for a traced model, found {times}; {remedy}"
        for key, times in counts.items()
        if times > 1
    )
    if problems:
        raise ScenarioError(problems)


def _traced(path: str, folder: Path | None, batch: Batch) -> ModelSpec:
    from zsim.autograd.traced import traced_file  # start-up: the schema of files takes 20 ms

    try:
        return traced_file.load((folder or Path()) / path, batch=batch)
    except ZsimError as error:
        raise ScenarioError((f"model.traced: {error}",)) from None


def _from_sizes(table: ModelTable, length: int) -> ModelSpec:
    name = str(table.family)
    problems: list[str] = []
    checked = validated(sizes_table(name), table.sizes, prefix="model.sizes", problems=problems)
    if checked is None:
        raise ScenarioError(tuple(problems))
    if (
        max(getattr(checked, "num_layers", 0), len(getattr(checked, "dims", ())))
        > limits.MAX_LAYERS
    ):
        raise ScenarioError((f"model.sizes: expected at most {limits.MAX_LAYERS:,} layers, found "
                             f"more",))
    try:
        sizes = FAMILIES[name].sizes(**checked.model_dump())
        return build(name, sizes, name=name, sequence_length=length)
    except (ValueError, ArithmeticError, IndexError) as error:
        raise ScenarioError((f"model.sizes: {str(error)[:200]}",)) from None
