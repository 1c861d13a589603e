"""A run that this machine has no memory for is refused before it starts, with what it needs and
what there is."""

from __future__ import annotations

import pytest

from zreal.processes import host_memory
from zsim.errors import BackendUnavailableError
from zsim.io.units import format_bytes
from zsim.ir.ledger_replay import replay
from zsim.ir.program import PHASES
from zsim.runs.backend import RunOptions
from zsim.runs.registry import find
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario, parse


def scenario(model: str) -> Scenario:
    text = f"""
model = {{ preset = "{model}" }}
batch = {{ micro_batch = 1, sequence_length = 8 }}
cluster = {{ preset = "cpu-gloo", ranks = 2 }}
strategy = {{ name = "fsdp2" }}
"""
    return parse(text.encode(), where="room.toml")


@pytest.mark.parametrize(("numerics", "references"), [("none", 0), ("sampled", 1), ("full", 3)])
def test_processes_need_their_peak_or_what_numerics_take_after_training(numerics, references):
    case = scenario("gpt-tiny")
    memory = replay(plan(case, device="cpu").ranks[0])
    peak = max(memory[phase].peak_bytes for phase in PHASES)
    rest = max(memory[phase].end_bytes for phase in PHASES) + 12 * case.model.num_parameters
    with_reference = max(peak, rest + 48 * case.model.num_parameters)
    others = max(peak, rest) if references else peak

    assert host_memory.needed_nbytes(case, processes=3, numerics=numerics) == (
        3 * host_memory.PROCESS_NBYTES + references * with_reference + (3 - references) * others
    )


def test_on_cuda_the_host_holds_one_parameter_at_a_time_on_its_way_to_the_device():
    case = scenario("gpt-tiny")
    largest = max(parameter.numel for parameter in case.model.parameters)
    assert host_memory.needed_nbytes(case, processes=2, device="cuda") == 2 * (
        12 * largest + host_memory.PROCESS_NBYTES
    )


def test_a_gpu_too_small_for_what_a_rank_allocates_is_refused_with_both_sizes():
    case = scenario("gpt-tiny")
    program = plan(case, device="cuda")
    peak = max(replay(rank)[phase].peak_bytes for rank in program.ranks for phase in PHASES)

    host_memory.require_device_memory(case, backend="nccl", present_nbytes=peak)
    with pytest.raises(BackendUnavailableError) as error:
        host_memory.require_device_memory(case, backend="nccl", present_nbytes=peak - 1)
    assert error.value.expected.startswith(f"at least {format_bytes(peak)} of device memory")
    assert error.value.found == f"{format_bytes(peak - 1)} on this machine's GPU"


def test_the_limit_of_a_container_counts_where_the_machine_has_more(tmp_path, monkeypatch):
    group = tmp_path / "job" / "step"
    group.mkdir(parents=True)
    for folder, limit in ((group, "max"), (group.parent, str(2**30))):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{3 * 2**28}\n")
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {2**20}\n")
    own = tmp_path / "own"
    own.write_text("0::/job/step\n")
    monkeypatch.setattr(host_memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(host_memory, "OWN_CGROUP", own)

    assert host_memory.available_nbytes() == 2**28 + 2**20


@pytest.mark.parametrize("backend", ["gloo", "fake"])
def test_a_model_too_large_for_this_machine_is_refused_before_anything_is_built(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "available_nbytes", lambda: 1024**2)
    with pytest.raises(BackendUnavailableError, match="of memory for room, found 1.00 MiB on "
                                                      "this machine"):
        find(backend).run(scenario("gpt-tiny"), options=RunOptions())


def test_this_machine_says_how_much_it_has_left() -> None:
    assert 2**20 < host_memory.available_nbytes() < 2**50
