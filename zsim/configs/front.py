"""The functions of `import zsim` for configs of other tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from zsim.configs.draft import Answers
from zsim.configs.exported import Exported
from zsim.configs.exporters import EXPORTERS
from zsim.configs.imported import Imported
from zsim.configs.importers import IMPORTERS
from zsim.configs.reading import read_config
from zsim.io.arguments import choice_of, path_of
from zsim.scenario.scenario import Scenario
from zsim.scenario.scenario_argument import require_scenario


def import_config(
    path: str | PathLike[str],
    *,
    kind: str | None = None,
    model: str | None = None,
    cluster: str | None = None,
    settings: Mapping[str, Any] | None = None,
    recipe: str = "",
    drop: Sequence[str] = (),
) -> Imported:
    """The scenario in a config of another tool, with what was ignored and what was assumed.

    `kind`: the tool, by default the one whose config it looks like. `model`, `cluster`: presets or
    files. `settings`: any other key of a scenario that the config leaves open, by its name, as
    "batch.micro_batch". `recipe`: the function of a Python config. `drop`: keys to leave out.
    ScenarioError names every key that is open, unknown or contradictory.
    """
    file = path_of(path, where="path", expected="the path of a config")
    if kind is not None:
        choice_of(kind, IMPORTERS, where="kind")
    answers = Answers(
        model=model, cluster=cluster, settings=dict(settings or {}), dropped=tuple(drop)
    )
    return read_config(file, answers, kind=kind, recipe=recipe)


def export_config(scenario: Scenario, kind: str) -> Exported:
    """A scenario as a config of another tool, with the keys that it has no words for.

    ScenarioError where the tool does not have the scenario's strategy.

    >>> from zsim.scenario.scenario import load
    >>> print(export_config(load("scenarios/parity/ddp-mlp-2.toml"), "accelerate").text)
    compute_environment: LOCAL_MACHINE
    distributed_type: MULTI_GPU
    mixed_precision: 'no'
    num_machines: 1
    machine_rank: 0
    num_processes: 2
    main_training_function: main
    <BLANKLINE>
    """
    require_scenario(scenario)
    return EXPORTERS[choice_of(kind, EXPORTERS, where="kind")](scenario)
