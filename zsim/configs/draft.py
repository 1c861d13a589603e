"""A scenario in the making: tables from a config, answers of the user, and what is still open.

A config knows neither its model nor its cluster, and often not its batch. The user answers these by
options. Nothing is guessed: an open key is a question in the error, with the option that answers
it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zsim.cluster.cluster import ClusterSpec
from zsim.configs.notes import Notes
from zsim.errors import ScenarioError, ZsimError, complaint_of, shown
from zsim.models.families import FAMILIES, preset, presets
from zsim.models.families.aliases import llama, mpt
from zsim.scenario.keys.tables import ClusterTable
from zsim.scenario.parts.cluster_table import made_cluster
from zsim.scenario.scenario import Scenario, from_tables

OPTIONS = {
    "model": "--model PRESET, or a config.json",
    "cluster": "--cluster PRESET, or a cluster's file",
    "cluster.nodes": "--nodes N",
    "cluster.ranks": "--ranks N",
    "batch.sequence_length": "--sequence-length N",
    "batch.micro_batch": "--micro-batch N",
    "batch.accumulation": "--accumulation N",
}
"""The option that answers each key; any other is answered by --set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Answers of the user to what a config leaves open: a model, a cluster, and any other key of a
    scenario, as "batch.micro_batch"."""

    model: str | None = None
    cluster: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    folder: Path = Path(".")
    """Folder of the scenario, to which files that it names are relative."""
    dropped: tuple[str, ...] = ()
    """Keys of the config that are left out though nobody knows them."""


class Draft:
    """Tables of a scenario, put together key by key."""

    def __init__(self, notes: Notes, answers: Answers) -> None:
        self.notes, self.answers = notes, answers
        self.tables: dict[str, Any] = {
            "model": {}, "batch": {}, "cluster": {}, "strategy": {}, "precision": {},
        }
        self._total: tuple[str, int] | None = None
        self._processes: int | None = None
        self._asked: dict[str, str] = {}
        self._checks: list[Callable[[Scenario], None]] = []
        self._preferred: list[tuple[str, Any, str, str]] = []
        self._without_model = "no config says it"
        if answers.model:
            self.tables["model"] = model_table(answers.model, answers.folder)
        if answers.cluster:
            self.tables["cluster"] = _cluster_table(answers.cluster, answers.folder)

    def put(self, key: str, value: Any) -> None:
        """Put a value of the config at a scenario's `key`; None puts nothing."""
        if value is None:
            return
        *path, name = key.split(".")
        table = self.tables
        for part in path:
            table = table.setdefault(part, {})
        table[name] = value

    def get(self, key: str) -> Any:
        """The value at a scenario's `key`, from the config or the user; None for none."""
        value = self._here(key)
        return self.answers.settings.get(key) if value is None else value

    def _here(self, key: str) -> Any:
        value: Any = self.tables
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def ask(self, key: str, reason: str) -> None:
        """Ask the user for `key`, unless there is an answer."""
        self._asked.setdefault(key, reason)

    def check(self, check: Callable[[Scenario], None]) -> None:
        """Have `check` note what is wrong once the scenario is there, as it takes its model."""
        self._checks.append(check)

    def prefer(self, key: str, value: Any, *, source: str, assumed: str) -> None:
        """Put the value of the config's key `source` at a scenario's `key`, as is then `assumed`.

        Where the scenario would be refused for it, `source` is ignored, with the reason.
        """
        self._preferred.append((key, value, source, assumed))

    def put_model(self, table: dict[str, Any], source: str) -> None:
        """Put the model that the config describes; --model takes its place."""
        if self.answers.model:
            self.notes.assume(f"model: {self.answers.model}, by --model, in place of {source}")
        else:
            self.tables["model"] = table

    def name_model(self, name: str | None, key: str) -> None:
        """Put the preset of the model that the config's `key` names by its name on the Hub, where
        there is one and no --model."""
        if not name or self.answers.model:
            return
        if known := _preset_of(name.rpartition("/")[2]):
            self.tables["model"] = {"preset": known}
            self.notes.assume(f"model: the preset {known}, for {key} {name[:80]}")
        else:
            self._without_model = f"{key} is {name[:80]}, which no preset is"

    def batch(
        self, *, micro: int | None, accumulation: int | None, total: int | None = None,
        total_key: str = "",
    ) -> None:
        """Put the batch of a rank. Of micro-batch, accumulation and the `total` of all ranks two
        define the third."""
        self.put("batch.micro_batch", micro)
        self.put("batch.accumulation", accumulation)
        self._total = (total_key, total) if total and total > 0 else None

    def processes(self, number: int | None, *, key: str, machines: int | None = None) -> None:
        """Put the number of ranks that the config starts, on so many machines."""
        if not number or number < 1:
            return
        self._processes = number
        if machines and number % machines:
            self.notes.problem(
                key, f"contradictory: expected a multiple of the {machines} machines, found "
                     f"{number}"
            )
        else:
            self._place(number, key=key, machines=machines)

    @property
    def cluster(self) -> ClusterSpec | None:
        """The cluster that the user names, one node of it; None where there is none."""
        table = {key: self.tables["cluster"][key] for key in ("preset", "file")
                 if key in self.tables["cluster"]}
        if not table:
            return None
        try:
            return made_cluster(ClusterTable(**table), self.answers.folder)
        except ZsimError as error:
            self.notes.problem("--cluster", complaint_of(str(error)))
            self.notes.require_none()
        return None

    @property
    def hidden_size(self) -> int | None:
        """Width of the model's residual stream; None where the model has none, or is not known."""
        model = self.tables["model"]
        if "preset" in model:
            return getattr(preset(model["preset"]).sizes, "hidden_size", None)
        if "sizes" in model:
            return model["sizes"].get("hidden_size")  # type: ignore[no-any-return]
        if "huggingface" in model:
            from zsim.configs.documents import json_config, text_of  # start-up: of few models

            file = self.answers.folder / model["huggingface"]
            config = json_config(text_of(file), where=str(file))
            sizes = config.get("text_config", config)
            size = sizes.get("hidden_size", sizes.get("n_embd"))
            return size if isinstance(size, int) else None
        return None

    @property
    def ends_can_be_apart(self) -> bool:
        """True for a model whose head has a weight of its own, by its sizes."""
        model = self.tables["model"]
        if model.get("preset") in presets():
            return not getattr(preset(model["preset"]).sizes, "tied", True)
        return "sizes" in model and not model["sizes"].get("tied", model["family"] == "gpt")

    def finish(self, *, name: str, as_scenario: str = "as a scenario: ") -> Scenario:
        """The scenario; ScenarioError with all that is wrong, contradictory or open. Words
        `as_scenario` stand before what no config has wrong."""
        for key, value in self.answers.settings.items():
            self._answer(key, value)
        self._require_model_and_cluster()
        self._require_batch()
        for key, reason in self._asked.items():
            refused = key.startswith("model") and self.notes.refused("model")
            if self.get(key) is None and not refused and not self.notes.variables:
                option = OPTIONS.get(key, f"--set {key}=…")
                self.notes.problem(key, f"missing: {reason}; give {option}")
        self.notes.require_none()
        tables = {key: table for key, table in self.tables.items() if table != {}}
        try:
            scenario = from_tables(tables, where=name, folder=self.answers.folder)
        except ScenarioError as error:
            where = self.notes.where
            raise ScenarioError(tuple(
                f"{where}: {as_scenario}{problem}" for problem in error.under(name)
            )) from None
        for check in self._checks:
            check(scenario)
        self.notes.require_none()
        for key, value, source, assumed in self._preferred:
            table, _, name = key.partition(".")
            if self.get(key) is not None:
                continue
            try:
                changed: Any = {table: {name: value}}
                scenario = scenario.with_(**changed)
                self.notes.assume(assumed)
            except ScenarioError as error:
                self.notes.ignored[source] = complaint_of(error.problems[0])
        return scenario

    def _answer(self, key: str, value: Any) -> None:
        here = self._here(key)
        if here is not None and here != value:
            self.notes.problem(
                key, f"contradictory: the config has {shown(here)}, the option {shown(value)}; "
                     "drop either"
            )
        else:
            self.put(key, value)

    def _place(self, ranks: int, *, key: str, machines: int | None = None) -> None:
        """Put so many ranks on the cluster: on whole nodes of GPUs, on some GPUs of one node, or on
        a CPU host."""
        cluster = self.cluster
        if cluster is None:
            return
        each = ranks if cluster.kind == "cpu" else cluster.devices_per_node
        if cluster.kind == "cpu" or (ranks < each and machines in (None, 1)):
            self.put("cluster.ranks", ranks)
        elif ranks % each or machines not in (None, ranks // each):
            on = f" on {machines} machines" if machines else ""
            self.notes.problem(
                key, f"expected whole nodes of {cluster.name}, {each} GPUs each, found {ranks} "
                     f"ranks{on}; name another --cluster, or --drop {key}"
            )
        else:
            self.put("cluster.nodes", ranks // each)

    def _require_model_and_cluster(self) -> None:
        if not self.tables["model"] and not self.notes.refused("model"):
            self.notes.problem("model", f"missing: {self._without_model}; give {OPTIONS['model']}")
        if not any(key in self.tables["cluster"] for key in ("preset", "file")):
            self.notes.problem("cluster", f"missing: no config says it; give {OPTIONS['cluster']}")

    def _require_batch(self) -> None:
        """Resolve micro-batch, accumulation, total and ranks, as DeepSpeed does; ask for what stays
        open."""
        micro, accumulation = self.get("batch.micro_batch"), self.get("batch.accumulation")
        world = self.world
        if self._total and world is None and micro and accumulation:
            key, total = self._total
            each = micro * accumulation
            if total % each:
                self._contradiction(micro, accumulation, None)
            else:
                self._place(total // each, key=key)
                world = self.world
        if self._total and world:
            micro, accumulation = self._third(micro, accumulation, world)
        if accumulation is None:
            self.notes.assume("batch.accumulation = 1, as the config names no other")
        self.put("batch.micro_batch", micro)
        self.put("batch.accumulation", accumulation or 1)
        self.ask("batch.micro_batch", "the trainer fills it in")
        self.ask("batch.sequence_length", "no config of this kind says it")
        if world is None and self.cluster is not None:
            on_cpu = self.cluster.kind == "cpu"
            self.ask(f"cluster.{'ranks' if on_cpu else 'nodes'}", "the launcher says it")

    def _third(
        self, micro: int | None, accumulation: int | None, replicas: int
    ) -> tuple[int | None, int | None]:
        """Micro-batch and accumulation, of which the total defines what is missing."""
        assert self._total
        total = self._total[1]
        if micro is None and accumulation is None:
            self.notes.assume("batch.accumulation = 1, as only the batch of all ranks is given")
            accumulation = 1
        if micro and accumulation:
            if micro * accumulation * replicas != total:
                self._contradiction(micro, accumulation, replicas)
            return micro, accumulation
        known = (micro or accumulation or 1) * replicas
        if total % known or total < known:
            self._contradiction(micro, accumulation, replicas)
            return micro, accumulation
        return (micro, total // known) if micro else (total // known, accumulation)

    def _contradiction(
        self, micro: int | None, accumulation: int | None, replicas: int | None
    ) -> None:
        assert self._total
        key, total = self._total
        parts = [
            f"micro-batch {micro}" if micro else "",
            f"accumulation {accumulation}" if accumulation else "",
            f"{replicas} data-parallel ranks" if replicas else "",
        ]
        known = " × ".join(filter(None, parts))
        self.notes.problem(
            key or "batch", f"contradictory: expected a multiple of {known}, which all of them "
                            f"make, found {total}"
        )

    @property
    def replicated(self) -> str:
        """The strategy where nothing is sharded: a plain module on one rank, DDP on several."""
        return "single" if self.world == 1 else "ddp"

    @property
    def world(self) -> int | None:
        """Ranks in all; None where the cluster's size is open."""
        cluster = self.cluster
        if cluster is None:
            return self._processes
        ranks, nodes = self.get("cluster.ranks"), self.get("cluster.nodes")
        if isinstance(ranks, int) or cluster.kind == "cpu":
            return ranks  # type: ignore[no-any-return]
        return nodes * cluster.devices_per_node if isinstance(nodes, int) else None


def _preset_of(model: str) -> str:
    """The preset that `model` is or spells; "" for none."""
    return next((name for name in (model, llama(model), mpt(model)) if name in presets()), "")


def model_table(model: str, folder: Path) -> dict[str, Any]:
    """The `model` table of a preset's name, in any spelling, or of a file."""
    if known := _preset_of(model):
        return {"preset": known}
    if model in FAMILIES or not model.endswith(".json"):
        return {"preset": model}  # the scenario says which is near
    relative = os.path.relpath(model, folder)
    with Path(model).open("rb") if Path(model).is_file() else open(os.devnull, "rb") as file:
        is_config = b'"model_type"' in file.read(1024 * 1024)
    return {"huggingface" if is_config or not Path(model).is_file() else "traced": relative}


def _cluster_table(cluster: str, folder: Path) -> dict[str, Any]:
    """The `cluster` table of a preset's name, or of a file."""
    if cluster.endswith(".toml"):
        return {"file": os.path.relpath(cluster, folder)}
    return {"preset": cluster}
