"""Explanations of hangs, from dumps in the form that torch 2.13 writes."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from zsim.analysis.flight_recorder import dump_file
from zsim.analysis.flight_recorder.dump_file import DumpError, read
from zsim.analysis.flight_recorder.explain import Explanation, explain
from zsim.cli.main import main

Call = tuple[str, str]
"""A collective and its group."""


def dump_table(calls: list[Call], *, state: str = "completed", apart_ns: int = 0) -> dict[str, Any]:
    """A dump of these calls; the last one of each group has not completed unless `state` says so.
    """
    counts: dict[str, int] = {}
    entries = []
    for number, (op, group) in enumerate(calls):
        counts[group] = counts.get(group, 0) + 1
        entries.append({
            "collective_seq_id": counts[group], "p2p_seq_id": 0, "op_id": number, "is_p2p": False,
            "process_group": [group, "default_pg" if group == "0" else "undefined"], "pg_id": 0,
            "profiling_name": f"nccl:{op}", "record_id": number, "retired": False,
            "input_sizes": [[8]], "output_sizes": [[8]],
            "input_dtypes": ["Float"], "output_dtypes": ["Float"],
            "state": state, "time_created_ns": 10**18 + number * 10**9 + apart_ns,
            "time_discovered_started_ns": 0, "time_discovered_completed_ns": 0,
            "timeout_ms": 600000, "thread_id": "1", "thread_name": "python",
            "frames": [
                {"filename": "/env/torch/distributed/c10d.py", "line": 1, "name": "all_reduce"},
                {"filename": "train.py", "line": 10 + number, "name": "step"},
            ],
        })
    for group in counts:
        last = max(number for number, call in enumerate(calls) if call[1] == group)
        entries[last]["state"] = "started" if state == "completed" else state
    return {
        "version": "2.10", "comm_lib_version": "2.27", "entries": entries, "nccl_comm_state": {},
        "pg_config": {"0": {"desc": "default_pg", "name": "0", "ranks": "[0, 1, 2]"}},
        "pg_status": {},
    }


def explained(folder: Path, *tables: dict[str, Any]) -> Explanation:
    for rank, table in enumerate(tables):
        (folder / f"rank_{rank}.json").write_text(json.dumps(table))
    return explain([read(folder / f"rank_{rank}.json") for rank in range(len(tables))])


STEP: list[Call] = [("all_gather", "0"), ("reduce_scatter", "0"), ("all_reduce", "0")]


def test_ranks_that_issue_the_same_have_nothing_to_explain(tmp_path: Path) -> None:
    told = explained(tmp_path, *[dump_table(STEP)] * 3)
    assert (told.findings, told.waits, told.collectives, told.groups) == ((), (), 3, 1)


def test_the_rank_with_another_collective_is_named_with_its_line(tmp_path: Path) -> None:
    other = [*STEP[:2], ("broadcast", "0")]
    told = explained(tmp_path, dump_table(STEP), dump_table(other), dump_table(STEP))
    (finding,) = told.findings
    assert (finding.kind, finding.seq, finding.ranks) == ("other op", 3, (1,))
    assert finding.text == (
        "#3 of default_pg 0: rank 1 issued broadcast at train.py:12; ranks 0, 2 issued all_reduce "
        "at train.py:12"
    )


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [("input_sizes", [[9]], "other size"), ("input_dtypes", ["BFloat16"], "other dtype")],
)
def test_another_size_or_dtype_is_named(
    tmp_path: Path, key: str, value: list[Any], kind: str
) -> None:
    other = dump_table(STEP)
    other["entries"][1][key] = value
    told = explained(tmp_path, dump_table(STEP), dump_table(STEP), other)
    assert [(each.kind, each.seq, each.ranks) for each in told.findings] == [(kind, 2, (2,))]


def test_uneven_sizes_of_an_all_to_all_are_no_mistake(tmp_path: Path) -> None:
    calls = [("all_to_all", "0"), ("all_reduce", "0")]
    uneven = dump_table(calls)
    uneven["entries"][0]["input_sizes"] = [[3]]
    assert explained(tmp_path, dump_table(calls), dump_table(calls), uneven).findings == ()


def test_a_rank_that_never_came_is_named_with_what_it_did_last(tmp_path: Path) -> None:
    told = explained(tmp_path, dump_table(STEP), dump_table(STEP), dump_table(STEP[:2]))
    (finding,) = told.findings
    assert (finding.kind, finding.ranks) == ("missing", (2,))
    assert finding.text == (
        "#3 of default_pg 0: rank 2 never entered all_reduce, in which ranks 0, 1 wait; rank 2 "
        "last issued reduce_scatter #2 of 0 at train.py:11"
    )
    assert [(wait.rank, wait.absent) for wait in told.waits] == [(0, (2,)), (1, (2,))]


def test_two_groups_in_opposite_order_are_a_ring(tmp_path: Path) -> None:
    first = dump_table([("all_reduce", "5")], state="started")
    second = dump_table([("all_gather", "6")], state="started")
    for table in (first, second):
        table["pg_config"] = {name: {"ranks": "[0, 1]"} for name in ("5", "6")}
    told = explained(tmp_path, first, second)
    assert told.findings[0].kind == "opposite order"
    assert told.findings[0].text == (
        "groups are used in another order by other ranks: rank 0 waits in all_reduce #1 of 5; "
        "rank 1 waits in all_gather #1 of 6"
    )


def test_older_entries_that_some_ranks_have_overwritten_are_not_missing(tmp_path: Path) -> None:
    cut = dump_table(STEP)
    cut["entries"] = cut["entries"][1:]
    assert explained(tmp_path, dump_table(STEP), cut, dump_table(STEP)).findings == ()


def test_a_rank_that_is_always_last_is_late(tmp_path: Path) -> None:
    calls = [("all_reduce", "0")] * 20
    late = dump_table(calls, apart_ns=7_000_000)
    (finding,) = explained(tmp_path, dump_table(calls), dump_table(calls), late).findings
    assert finding.kind == "late"
    assert finding.text.startswith(
        "rank 2 comes last to 20 of 20 collectives of 0, by 7.000 ms in the median"
    )


def test_what_is_no_dump_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = json.dumps(dump_table(STEP))
    cases = {
        "cut_1.json": (whole[:200].encode(), "found JSON that was cut"),
        "pickled_1.json": (pickle.dumps({"version": "2.10"}), "found a pickle; a pickle can run"),
        "old_1.json": (whole.replace("2.10", "1.5").encode(), "dump of version 2.x, found \"1.5\""),
        "list_1.json": (b"[]", "found other JSON"),
        "rankless.json": (whole.encode(), "expected a rank at the end of the file's name"),
        "deep_1.json": (b"[" * 100_000, "found JSON that was cut"),
        "twice_1.json": (b'{"version": "2", "version": "2"}', "the key 'version' twice"),
        "strange_1.json": (b'{"version": "2.1", "entries": [{"a": 1}]}', "collective as entry 0"),
        "many_1.json": (b'{"version": "2.1", "entries": {}}', "entries in a list"),
    }
    for name, (data, expected) in cases.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DumpError) as caught:
            read(tmp_path / name)
        assert expected in str(caught.value), name
    monkeypatch.setattr(dump_file, "MAX_BYTES", 100)
    (tmp_path / "large_1.json").write_text(whole)
    with pytest.raises(DumpError, match="expected at most 100 B, found"):
        read(tmp_path / "large_1.json")


def test_names_from_a_dump_cannot_steer_a_terminal(tmp_path: Path) -> None:
    hostile = dump_table([("all_reduce\x1b[2J", "0")])
    told = explained(tmp_path, dump_table([("all_reduce", "0")]), hostile)
    assert "\x1b" not in told.findings[0].text


def test_the_command_explains_what_it_can_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    explained(tmp_path, dump_table(STEP), dump_table(STEP), dump_table(STEP[:2]))
    (tmp_path / "rank_3.json").write_text("{")
    assert main(["explain", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"not read: {tmp_path / 'rank_3.json'}: expected JSON")
    assert lines[1] == "3 ranks, 3 collectives of 1 group: 1 found"
    assert lines[-1] == "    rank    1  all_reduce #3 of 0  for 2  train.py:12"
    assert main(["explain", str(tmp_path / "rank_0.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"] == []
    assert main(["explain", str(tmp_path / "rank_3.json")]) == 2
