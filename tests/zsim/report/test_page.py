"""The page as a file: its data read back, nothing loaded, nothing run but its own, never too large.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

import zsim
from tests.support.folders import PARITY, ROOT
from zsim.cli.main import main
from zsim.ir.ops import COLLECTIVES, MEMORY_KINDS, OP_KINDS
from zsim.report import data_of, html_page, of_scenario, report
from zsim.report.html_page import MOST_BYTES, escaped_json

pytest.importorskip("mpld3", reason="the package that carries D3 is not installed")

EVIL = "</script><script>alert(1)</script><!--"


@pytest.fixture(scope="module")
def text() -> str:
    return report([of_scenario(zsim.load(PARITY / "fsdp2-mlp-4.toml"))])


def data_in(text: str) -> Any:
    """The data of a page, as a browser reads them."""
    (block,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    return json.loads(block)


def test_the_page_has_the_data_of_its_sides_and_equal_sides_give_equal_pages(text):
    side = of_scenario(zsim.load(PARITY / "fsdp2-mlp-4.toml"))
    assert data_in(text) == json.loads(json.dumps(data_of([side])))
    assert report([side]) == text


def test_the_policy_lets_in_the_scripts_and_style_of_the_page_and_nothing_else(text):
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    named = set(re.findall(r"'sha256-([^']+)'", policy))
    inline = re.findall(r"<(?:script|style)>(.*?)</(?:script|style)>", text, re.S)
    hashes = {base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in inline}
    assert named == hashes
    assert len(inline) == 3
    assert policy.startswith("default-src 'none'; ")
    assert not {"unsafe", "http", "*"} & set(re.findall(r"unsafe|http|\*", policy))


def test_the_page_names_nothing_to_load(text):
    outside = re.sub(r"<script.*?</script>|<style>.*?</style>", "", text, flags=re.S)
    assert re.findall(r"(?:src|href|url)\s*[=(]", outside) == []


def test_names_that_end_scripts_stay_names():
    scenario = zsim.Scenario(
        model={"preset": "mlp-tiny"}, batch={"micro_batch": 2, "sequence_length": 1},
        cluster={"preset": "cpu-gloo", "ranks": 2}, strategy={"name": "ddp"}, name=EVIL,
    )
    made = report([of_scenario(scenario)])
    assert data_in(made)["sides"][0]["name"] == f"{EVIL}, simulated"
    assert "alert(1)</script>" not in made
    assert "<title>&lt;/script&gt;" in made


def test_every_script_is_on_the_page_and_every_kind_has_a_colour():
    folder = ROOT / "zsim" / "report" / "web"
    assert {file.stem for file in folder.glob("*.js")} == set(html_page.SCRIPTS)
    style = (folder / "page.css").read_text(encoding="utf-8")
    coloured = set(re.findall(r"--(\w+): #", style))
    assert coloured >= {*MEMORY_KINDS, *COLLECTIVES, "allocated"}
    assert coloured >= set(OP_KINDS) - {"alloc", "free", "host_wait", "send", "recv"}


@pytest.mark.parametrize("value", ["</script>", "<!--", "a\u2028b", "&amp;", '"\\', "{{data}}"])
def test_escaped_json_is_read_back_as_it_was(value):
    written = escaped_json({value: [value]})
    assert json.loads(written) == {value: [value]}
    assert "<" not in written
    assert "\u2028" not in written


def test_64_ranks_that_all_differ_make_a_page_below_the_limit():
    jitter = {"kind": "jitter", "mean": "20 us"}
    scenario = zsim.load(PARITY / "fsdp2-mlp-4.toml").with_(
        cluster={"ranks": 64}, strategy={"dp_shard": 64}
    )
    side = of_scenario(scenario.with_(faults=[jitter]))
    assert len(side.record.ranks) == 64
    data = data_of([side])
    assert len(data["timeline"]["ranks"]) == 64
    assert len(html_page.page(data, title="64").encode()) < MOST_BYTES


def test_a_page_that_is_too_large_is_refused_with_its_size(monkeypatch):
    monkeypatch.setattr(html_page, "MOST_BYTES", 1000)
    with pytest.raises(html_page.ReportError, match=r"at most 1,000 B, found \d{3},\d{3} B"):
        html_page.page({}, title="large")


def test_the_command_writes_a_page_of_scenarios_and_saved_runs(tmp_path: Path, capsys):
    scenario = str(PARITY / "zero3-mlp-4.toml")
    run, out = tmp_path / "run.json", tmp_path / "report.html"
    assert main(["run", scenario, "--save", str(run)]) == 0
    assert main(["report", scenario, str(run), "-o", str(out)]) == 0
    sides = data_in(out.read_text(encoding="utf-8"))["sides"]
    assert [side["name"] for side in sides] == [
        "zero3-mlp-4, simulated", "zero3-mlp-4, simulated, saved"
    ]
    assert "report.html" in capsys.readouterr().err
    assert main(["report", scenario, "-o", str(out)]) == 0  # it replaces a page
    assert main(["report", scenario, "-o", scenario]) == 2  # and nothing else


def test_more_sides_than_a_page_can_show_are_refused(tmp_path, capsys):
    scenario = str(PARITY / "zero3-mlp-4.toml")
    out = tmp_path / "report.html"
    assert main(["report", *[str(tmp_path / "run.json")] * 8, scenario, "-o", str(out)]) == 2
    assert "at most 8 scenarios and Runs, found 9" in capsys.readouterr().err


def test_without_the_package_that_carries_d3_the_command_says_how_to_get_it(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(html_page, "CARRIER", "zsim_has_no_such_package")
    out = tmp_path / "report.html"
    assert main(["report", str(PARITY / "zero3-mlp-4.toml"), "-o", str(out)]) == 2
    assert "pip install 'zsim[report]'" in capsys.readouterr().err
    assert not out.exists()
