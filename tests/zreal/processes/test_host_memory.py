"""A run that this machine has no memory for is refused before it starts, with what it needs and
what there is."""

from __future__ import annotations

import pytest

from zreal.processes import host_memory
from zsim.errors import BackendUnavailableError
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


def test_every_process_needs_its_peak_or_the_reference_whichever_is_more() -> None:
    case = scenario("gpt-tiny")
    memory = replay(plan(case, device="cpu").ranks[0])
    peak, reference = (
        max(memory[phase].peak_bytes for phase in PHASES), 20 * case.model.num_parameters,
    )

    assert (
        host_memory.needed_nbytes(case, processes=1, parity=False)
        == peak + host_memory.PROCESS_NBYTES
    )
    assert host_memory.needed_nbytes(case, processes=2, parity=True) == 2 * (
        max(peak, reference) + host_memory.PROCESS_NBYTES
    )


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
