"""Backends are found by entry point, listed without importing them, and say how to get them when
they are missing."""

from importlib.metadata import EntryPoint

import pytest

from tests.support.folders import SCENARIOS
from zsim.cluster.cluster_presets import load_cluster
from zsim.errors import BackendUnavailableError
from zsim.ir.ops import MEMORY_KINDS
from zsim.ir.program import PHASES
from zsim.runs import registry
from zsim.runs.backend import RunOptions
from zsim.runs.figures import metrics
from zsim.runs.simulator import WorkError
from zsim.scenario import scenario


def load(name: str) -> scenario.Scenario:
    return scenario.load(SCENARIOS / f"{name}.toml")


def simulated(name: str, *, device: str | None = None, **options):
    return registry.SimBackend(device).run(load(name), options=RunOptions(**options))


def offer(monkeypatch, **named: str):
    entries = [
        EntryPoint(name=name, value=value, group=registry.GROUP) for name, value in named.items()
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: entries)


def test_the_simulator_is_found_even_where_nothing_is_installed(monkeypatch):
    offer(monkeypatch)
    assert registry.names() == {"sim": "zsim.runs.registry:SimBackend"}
    assert registry.find("sim").name == "sim"


def test_anybodys_package_can_add_a_backend(monkeypatch):
    offer(monkeypatch, mine="zsim.runs.registry:SimBackend")
    assert list(registry.names()) == ["mine", "sim"]
    assert isinstance(registry.find("mine"), registry.SimBackend)


def test_a_backend_that_does_not_import_says_how_to_install_it(monkeypatch):
    offer(monkeypatch, gloo="a_package_that_is_not_there.backends:GlooBackend")
    with pytest.raises(BackendUnavailableError) as caught:
        registry.find("gloo")
    assert caught.value.exit_code == 3
    assert str(caught.value) == (
        "backend gloo (a_package_that_is_not_there.backends:GlooBackend): expected a class that "
        "can be imported and made "
        "without arguments, found no a_package_that_is_not_there; pip install 'zsim[real]'"
    )


def test_listing_imports_no_backend(monkeypatch):
    offer(monkeypatch, broken="a_package_that_is_not_there:Backend")
    assert registry.names()["broken"] == "a_package_that_is_not_there:Backend"


def test_an_unknown_backend_is_bad_usage_with_a_suggestion(monkeypatch):
    offer(monkeypatch, gloo="x:y")
    with pytest.raises(registry.UnknownBackendError, match="expected gloo or sim, found "
                                                           "\"glo\"; did you mean gloo"):
        registry.find("glo")
    with pytest.raises(registry.UnknownBackendError, match="expected gloo or sim, found a list"):
        registry.find(["gloo"])


def test_a_simulated_run_has_every_phase_with_memory_and_collectives():
    run = simulated("parity/fsdp2-gpt-4")
    (rank, *_) = run.ranks
    assert tuple(rank.phases) == PHASES
    assert sum(rank.stands_for for rank in run.ranks) == run.world_size == 4
    steady = rank.phases["steady"]
    assert [record.op for record in steady.collectives].count("all_gather") == 9
    assert tuple(steady.memory.by_kind) == MEMORY_KINDS
    assert sum(steady.memory.by_kind.values()) == steady.memory.peak_bytes
    assert steady.memory.start_bytes == steady.memory.end_bytes


def test_all_ranks_unfold_to_what_the_folded_ones_stand_for():
    folded, whole = (
        simulated("parity/fsdp2-uneven-4"), simulated("parity/fsdp2-uneven-4", all_ranks=True),
    )
    assert [rank.rank for rank in whole.ranks] == [0, 1, 2, 3]
    assert [rank.stands_for for rank in whole.ranks] == [1, 1, 1, 1]
    by_rank = {rank.rank: rank for rank in whole.ranks}
    for rank in folded.ranks:
        assert rank.phases == by_rank[rank.rank].phases


def test_a_folded_run_sends_what_the_busiest_of_its_ranks_does_in_a_steady_step():
    """DDP on three ranks, which do not divide its bucket: chunks of a third rounded up, and a last
    one of the rest.

    A rank of a ring's all-reduce sends all chunks twice but its own and its successor's. So rank 0
    sends less than 1 and 2. What the first step broadcasts besides, as buckets are rebuilt,
    is no part of it.
    """
    text = (
        load("parity/ddp-gpt-4-accumulate-every")
        .to_toml()
        .replace("ranks = 4", "ranks = 3")
        .replace("dp_replicate = 4", "dp_replicate = 3")
    )
    asked = scenario.parse(text.partition("[expect]")[0].encode(), where="three")
    bucket = 4 * asked.model.num_parameters
    chunk = -(-bucket // 3)
    rest = bucket - 2 * chunk
    assert rest < chunk
    sent = [
        2 * (2 * bucket - own - following)
        for own, following in ((chunk, chunk), (chunk, rest), (rest, chunk))
    ]
    folded, whole = (
        registry.SimBackend().run(asked, options=RunOptions(all_ranks=every))
        for every in (False, True)
    )
    assert [rank.bytes_sent for rank in whole.ranks] == sent
    assert [(rank.stands_for, rank.bytes_sent) for rank in folded.ranks] == [(3, max(sent))]


def test_only_the_ranks_asked_for_are_returned():
    assert [rank.rank for rank in simulated("scale/fsdp2-gpt-1024", ranks=(1023, 0)).ranks] == [
        0, 1023
    ]


def test_the_same_scenario_gives_the_same_run():
    assert simulated("parity/hsdp-gpt-2x2") == simulated("parity/hsdp-gpt-2x2")


def test_another_device_replaces_the_cluster_and_says_so():
    run = simulated("published/llama-3-8b-8-h100", device="cpu")
    assert (run.provenance["cluster"], run.provenance["device"]) == ("cpu-gloo", "cpu")


def test_the_default_clusters_exist():
    for kind, name in (("cpu", "cpu-gloo"), ("cuda", "dgx-h100")):
        assert load_cluster(name).kind == kind


def test_all_ranks_of_too_large_a_scenario_are_refused(monkeypatch):
    monkeypatch.setattr("zsim.scenario.checks.work_limits.MAX_WORK", 19)
    with pytest.raises(WorkError, match="take fewer of one of them"):
        simulated("parity/fsdp2-gpt-4", all_ranks=True)


def test_a_time_from_assumed_constants_has_a_band_around_it():
    """A band of no width would promise what no assumed constant can."""
    run = simulated("published/llama-3-8b-8-h100")
    figures = metrics.figures(run, load("published/llama-3-8b-8-h100"))

    low, high = figures.step_time_band_ns
    assert low < 0.95 * run.step_time_ns
    assert high > 1.05 * run.step_time_ns


class NotABackend:
    """A backend without run()."""

    name = "hollow"

    def capabilities(self):
        return None


class Nameless(NotABackend):
    """A backend whose name raises."""

    @property
    def name(self):
        raise ValueError("no name yet")


class Demanding(NotABackend):
    """A backend that is not made without an argument."""

    def __init__(self, argument):
        self.argument = argument


@pytest.mark.parametrize(("value", "complaint"), [
    (f"{__name__}:NotABackend", "no run"), (f"{__name__}:Demanding", "TypeError"),
    (f"{__name__}:Nameless", "ValueError: no name yet"), (f"{__name__}:Absent", "AttributeError"),
])
def test_a_package_that_offers_no_backend_is_named_and_not_a_traceback(
    monkeypatch, value, complaint
):
    offer(monkeypatch, theirs=value)
    with pytest.raises(BackendUnavailableError, match=complaint) as caught:
        registry.find("theirs")
    assert caught.value.where == f"backend theirs ({value})"
