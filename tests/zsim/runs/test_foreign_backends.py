"""Whatever a backend of another package does is said in words, with one JSON object on standard
output and nothing else."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.folders import PARITY
from zsim.cli.main import main
from zsim.ir.run import RunRecord
from zsim.runs import registry
from zsim.runs.backend import Capabilities, RunOptions
from zsim.runs.registry import SimBackend
from zsim.scenario.scenario import Scenario, load

SCENARIO = str(PARITY / "fsdp2-mlp-2.toml")


class Theirs:
    """A simulator of another package, which does as it is told."""

    name = "theirs"

    def __init__(self, *, device: str = "cpu", sees: Any = None, **change: Any) -> None:
        self.device, self.sees, self.change = device, sees, change

    def capabilities(self) -> Any:
        if isinstance(self.sees, BaseException):
            raise self.sees
        return self.sees or Capabilities(
            memory=True, numerics=False, time=False, device=self.device
        )

    def run(self, scenario: Scenario, *, options: RunOptions) -> RunRecord:
        sys.stdout.write("loading …\n")
        os.write(1, b"and without Python\n")
        for error in self.change.values():
            if isinstance(error, BaseException):
                raise error
        return replace(
            SimBackend().run(scenario, options=options), **{"representatives": (), **self.change}
        )


class Fine(Theirs):
    """A simulator whose answer is no Run."""

    def run(self, scenario: Scenario, *, options: RunOptions) -> Any:
        return "fine"


def without_phases() -> RunRecord:
    run = SimBackend().run(load(SCENARIO), options=RunOptions())
    return replace(run, ranks=tuple(replace(rank, phases={}) for rank in run.ranks))


@pytest.mark.parametrize(("backend", "message"), [
    (Theirs(sees=ValueError("no idea")),
     "backend theirs: expected its capabilities, found ValueError: no idea"),
    (Theirs(sees="everything"),
     "backend theirs: expected zsim.runs.backend.Capabilities, found str"),
    (Theirs(device="tpu"),
     "backend theirs: capabilities.device: expected cpu or cuda, which plan() knows, "
     "found 'tpu'"),
    (Theirs(ranks=()), "backend theirs: expected a whole Run, found one without ranks"),
    (Theirs(ranks=None), "backend theirs: expected a whole Run, found a damaged one"),
    (Theirs(ranks=(1, 2)),
     "backend theirs: expected a whole Run, found a damaged one (run.ranks[0]: expected a "
     "table, found 1)"),
    (Theirs(ranks=without_phases().ranks), "whose rank 0 has no construction phase"),
    (Theirs(mesh=None), "backend theirs: expected a whole Run, found a damaged one"),
    (Theirs(ranks=SystemExit(0)), "backend theirs: expected a Run, found SystemExit: 0"),
    (Theirs(ranks=KeyError("flurb")), "backend theirs: expected a Run, found KeyError: 'flurb' ("),
    (Fine(), "backend theirs: expected a Run, found str"),
])
@pytest.mark.parametrize(
    "command", [["run", SCENARIO, "--backend"], ["validate", SCENARIO, "--against"]]
)
def test_a_backend_that_breaks_down_is_a_sentence(
    command: list[str], backend: Theirs, message: str, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(registry, "find", lambda name, where: backend)
    assert main([*command, "theirs", "--json"]) == 1
    printed = json.loads(capfd.readouterr().out)
    assert printed["exit_code"] == 1
    assert message in printed["error"][0]


def test_a_simulation_is_no_measurement_to_validate_against(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "find", lambda name, where: Theirs())
    assert main(["validate", SCENARIO, "--against", "theirs"]) == 1
    assert (
        "backend theirs: expected a Run that was measured, found one of the simulator"
        in capfd.readouterr().err
    )


def test_what_a_backend_prints_leaves_standard_output_to_the_report(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "find", lambda name, where: Theirs())
    assert main(["run", SCENARIO, "--backend", "theirs", "--json"]) == 0
    streams = capfd.readouterr()
    assert json.loads(streams.out)["ok"] is True
    assert "loading …\n" in streams.err
    assert "and without Python\n" in streams.err


HOSTILE = "\x1b[2J[red]x"


def test_control_characters_and_markup_of_a_scenario_are_shown_and_not_obeyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = Path(SCENARIO).read_text().splitlines()
    hostile = tmp_path / f"{HOSTILE}.toml"
    hostile.write_text("\n".join(['description = "\\u001b[2J[/red]bad"', *text[1:]]))
    broken = tmp_path / f"{HOSTILE}-broken.toml"
    broken.write_text("steps = -1")
    for tty in (False, True):
        monkeypatch.setattr(sys.stdout, "isatty", lambda tty=tty: tty, raising=False)
        assert main(["show", str(hostile)]) == 0
        assert main(["show", str(broken)]) == 2
        assert main(["run", str(hostile)]) in (0, 1)
        streams = capsys.readouterr()
        assert "\x1b[2J" not in streams.out + streams.err
        assert "?[2J[red]x" in streams.out.replace("\n", "")
        assert "?[2J[/red]bad" in streams.out
        assert "?[2J[red]x-broken" in streams.err
