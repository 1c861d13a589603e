"""Config files are data: whatever is in them, nothing is built or executed, and limits hold."""

from __future__ import annotations

import pytest

from zsim import ScenarioError
from zsim.configs import documents
from zsim.io.limits import MAX_BYTES


@pytest.mark.parametrize(("text", "said"), [
    ("a: &x [1]\nb: *x\n", "line 1: expected no anchors and aliases"),
    ("a: !!python/object/apply:os.system ['true']\n", "line 1: expected no tags"),
    ("a: !mine 1\n", "line 1: expected no tags"),
    ("a: !!int 1\n", "line 1: expected no tags"),
    ("a: 1\na: 2\n", "line 2: expected each key once, found a twice"),
    ("[" * 100, "nested"),
    ("- 1\n", "expected a table of YAML"),
    ("a: [1\n", "not YAML"),
    ("a: .inf\n", "finite"),
    ("a: 99999999999999999999999\n", "64 bits"),
    ("? [1]\n: 2\n", "expected text as a key"),
    ("a: 1\n---\nb: 2\n", "not YAML"),
])
def test_yaml_that_is_more_than_plain_data_is_refused(text, said):
    with pytest.raises(ScenarioError, match=said):
        documents.yaml_config(text, where="x.yaml")


def test_plain_yaml_is_read_as_people_mean_it():
    text = "a: 'no'\nb: no\nc: 5e8\nd: 2026-01-01\ne: null\nf: [1, {g: 1.5}]\n"
    read = documents.yaml_config(text, where="x.yaml")
    assert read == {
        "a": "no", "b": False, "c": "5e8", "d": "2026-01-01", "e": None, "f": [1, {"g": 1.5}]
    }


def test_json_of_tutorials_may_have_lines_of_comments():
    assert documents.json_config('{\n  // why\n  "a": 1\n}', where="x.json") == {"a": 1}


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', "[" * 100_000, "{}}", '{"a": NaN}'])
def test_json_that_is_none_is_refused(text):
    with pytest.raises(ScenarioError):
        documents.json_config(text, where="x.json")


def test_a_file_beyond_the_limit_is_refused(tmp_path):
    file = tmp_path / "large.yaml"
    file.write_text("a" * (MAX_BYTES + 1))
    with pytest.raises(ScenarioError, match="at most"):
        documents.text_of(file)


def test_yaml_without_its_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    with pytest.raises(documents.ExtraError, match=r"pip install 'zsim\[import\]'"):
        documents.yaml_config("a: 1", where="x.yaml")
