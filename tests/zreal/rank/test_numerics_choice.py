"""Numerics are checked as fully as memory and time allow, and what is left out says why."""

from __future__ import annotations

import pytest

from zreal.processes import host_memory
from zreal.processes.reference_cost import reference_cost
from zreal.rank import choice as numerics_choice
from zsim.errors import BackendUnavailableError
from zsim.scenario.scenario import Scenario


def scenario(model: str = "gpt-tiny", *, optimizer: str = "adamw") -> Scenario:
    return Scenario(
        model={"preset": model}, batch={"micro_batch": 1, "sequence_length": 64},
        cluster={"preset": "cpu-gloo", "ranks": 4}, strategy={"name": "fsdp2"},
        optimizer={"name": optimizer}, name="chosen",
    )


def choice(case: Scenario, *, asked=None, timeout_s: float = 120.0):
    return numerics_choice.choose_numerics(
        case, requested=asked, backend="gloo", processes=4, timeout_s=timeout_s, device="cpu"
    )


@pytest.fixture
def available(monkeypatch):
    """Sets the bytes that this machine can still give."""

    def set_to(nbytes: int) -> None:
        for module in (host_memory, numerics_choice):
            monkeypatch.setattr(module, "available_nbytes", lambda: nbytes)

    return set_to


def test_a_small_model_is_compared_on_every_rank_and_the_run_says_nothing_of_it():
    assert choice(scenario()).mode == "full"
    assert choice(scenario()).provenance == {}


@pytest.mark.parametrize("mode", ["full", "sampled", "none"])
def test_the_fullest_mode_with_room_is_taken(mode, available):
    case = scenario()
    available(host_memory.needed_nbytes(case, processes=4, numerics=mode))
    assert choice(case).mode == mode


def test_what_is_left_out_for_its_bytes_and_time_names_both(available, monkeypatch):
    available(200 * 2**30)
    monkeypatch.setattr(numerics_choice, "available_cores", lambda: 4)
    left_out = choice(scenario("llama-3-8b"), timeout_s=60.0).provenance["numerics"]
    assert left_out == (
        "none: a single-process reference of 8,030,261,248 parameters needs about 809.27 GiB of "
        "this machine's 200.00 GiB and 1.4 h, of which --timeout allows 30.0 s"
    )


def test_a_short_timeout_alone_leaves_the_reference_out():
    left_out = choice(scenario(), timeout_s=0.1)
    assert left_out.mode == "none"
    assert "--timeout allows 0.1 s" in left_out.reason


def test_what_is_asked_for_is_not_made_less(available):
    case = scenario()
    available(host_memory.needed_nbytes(case, processes=4, numerics="full") - 1)
    with pytest.raises(BackendUnavailableError, match="--numerics none") as error:
        choice(case, asked="full")
    assert error.value.exit_code == 3
    assert choice(case, asked="sampled").mode == "sampled"
    assert choice(case, asked="none").reason == "not asked for (--numerics none)"


def test_adamw_and_two_bytes_cost_more_than_sgd():
    adamw, sgd = (
        reference_cost(scenario(optimizer=name), device="cpu") for name in ("adamw", "sgd")
    )
    rounded = reference_cost(scenario().with_(precision={"parameters": "bf16"}), device="cpu")
    assert rounded.nbytes > adamw.nbytes > sgd.nbytes
    assert rounded.seconds > adamw.seconds == sgd.seconds
    assert reference_cost(scenario(), cores=2, device="cpu").seconds < adamw.seconds
