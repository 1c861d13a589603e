"""Explanations of hangs, from dumps in the form that torch 2.13 writes."""

from __future__ import annotations

import json
import pickle
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zsim.analysis.flight_recorder import dump_file
from zsim.analysis.flight_recorder.dump_file import Dump, DumpError, read
from zsim.analysis.flight_recorder.explain import Explanation, explain
from zsim.cli.main import main

Call = tuple[str, str]
"""A collective and its group."""


def dump_table(
    calls: list[Call], *, state: str = "completed", last: str = "", apart_ns: int = 0,
    ranks: int = 3,
) -> dict[str, Any]:
    """A dump of these calls, all in one state, the last of each group in state `last`."""
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
                {"filename": "/env/site-packages/torch/distributed/c10d.py", "line": 1, "name": op},
                {"filename": "train.py", "line": 10 + number, "name": "step"},
            ],
        })
    for group in counts:
        at = max(number for number, call in enumerate(calls) if call[1] == group)
        entries[at]["state"] = last or state
    return {
        "version": "2.10", "comm_lib_version": "2.27", "entries": entries, "nccl_comm_state": {},
        "pg_config": {"0": {"desc": "default_pg", "name": "0", "ranks": str([*range(ranks)])}},
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
    other = dump_table([*STEP[:2], ("broadcast", "0")], last="started")
    waits = dump_table(STEP, last="started")
    told = explained(tmp_path, waits, other, waits)
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
    (finding,) = told.findings
    assert (finding.kind, finding.seq, finding.ranks) == (kind, 2, (2,))
    assert str(value).strip("[]'") in finding.text


def test_uneven_sizes_of_an_all_to_all_are_no_mistake(tmp_path: Path) -> None:
    calls = [("all_to_all", "0"), ("all_reduce", "0")]
    uneven = dump_table(calls)
    uneven["entries"][0]["input_sizes"] = [[3]]
    assert explained(tmp_path, dump_table(calls), dump_table(calls), uneven).findings == ()


def test_a_rank_that_never_came_is_named_with_what_it_did_last(tmp_path: Path) -> None:
    waits = dump_table(STEP, last="started")
    told = explained(tmp_path, waits, waits, dump_table(STEP[:2]))
    (finding,) = told.findings
    assert (finding.kind, finding.ranks) == ("missing", (2,))
    assert finding.text == (
        "#3 of default_pg 0: rank 2 never entered all_reduce, in which ranks 0, 1 wait; rank 2 "
        "last issued reduce_scatter #2 of 0 at train.py:11"
    )
    assert [(wait.rank, wait.absent) for wait in told.waits] == [(0, (2,)), (1, (2,))]


def in_order(*calls: Call) -> dict[str, Any]:
    """A dump of collectives none of which has ended, in groups of ranks 0 and 1."""
    table = dump_table(list(calls), state="started")
    table["pg_config"] = {group: {"ranks": "[0, 1]"} for _, group in calls}
    return table


DP, TP = ("all_reduce", "dp"), ("all_gather", "tp")


def test_two_groups_in_opposite_order_are_a_ring(tmp_path: Path) -> None:
    told = explained(tmp_path, in_order(DP), in_order(TP))
    assert told.findings[0].kind == "opposite order"
    assert told.findings[0].text == (
        "groups are used in another order by other ranks: rank 0 waits in all_reduce #1 of "
        "undefined dp at train.py:10 and has not entered all_gather #1 of undefined tp; rank 1 "
        "waits in all_gather #1 of undefined tp at train.py:10 and has not entered all_reduce #1 "
        "of undefined dp"
    )


def test_two_groups_enqueued_in_opposite_order_are_a_ring(tmp_path: Path) -> None:
    told = explained(tmp_path, in_order(DP, TP, DP), in_order(TP, DP, DP))
    (finding,) = told.findings
    assert (finding.kind, finding.ranks) == ("opposite order", (0, 1))
    assert finding.text == (
        "groups are used in another order by other ranks: rank 0 enqueued all_reduce #1 of "
        "undefined dp at train.py:10 before all_gather #1 of undefined tp; rank 1 enqueued "
        "all_gather #1 of undefined tp at train.py:10 before all_reduce #1 of undefined dp"
    )
    (same,) = {each.kind for each in explained(tmp_path, *[in_order(DP, TP)] * 2).findings}
    assert same == "unfinished"


def test_three_groups_in_a_ring_name_each_rank_once(tmp_path: Path) -> None:
    first, then, last = (("all_reduce", name) for name in "abc")
    tables = [in_order(first, then), in_order(then, last), in_order(last, first)]
    for table in tables:
        table["pg_config"] = {}
    (finding,) = explained(tmp_path, *tables).findings
    assert (finding.kind, finding.ranks) == ("opposite order", (0, 1, 2))
    assert finding.text.count("enqueued") == 3


def test_older_entries_that_some_ranks_have_overwritten_are_not_missing(tmp_path: Path) -> None:
    cut = dump_table(STEP)
    cut["entries"] = cut["entries"][1:]
    assert explained(tmp_path, dump_table(STEP), cut, dump_table(STEP)).findings == ()


def test_a_rank_that_left_no_dump_is_the_cause(tmp_path: Path) -> None:
    waits = dump_table(STEP, last="started")
    told = explained(tmp_path, waits, waits)
    assert [(each.kind, each.seq, each.ranks) for each in told.findings] == [("no dump", 3, (2,))]
    assert told.findings[0].text == (
        "#3 of default_pg 0: no dump of rank 2, for which ranks 0, 1 wait in all_reduce at "
        "train.py:12"
    )
    assert [(wait.rank, wait.absent) for wait in told.waits] == [(0, (2,)), (1, (2,))]


def test_a_rank_without_a_dump_has_entered_what_another_has_completed(tmp_path: Path) -> None:
    told = explained(tmp_path, dump_table(STEP), dump_table(STEP, last="started"))
    assert [(each.kind, each.ranks) for each in told.findings] == [("unfinished", (1,))]
    assert "rank 1 has not completed all_reduce at train.py:12; ranks 0, 2 are past it" in (
        told.findings[0].text
    )
    first = dump_table([("broadcast", "0")])
    rooted = explained(tmp_path, first, dump_table([("broadcast", "0")], state="started"))
    assert [(each.kind, each.ranks) for each in rooted.findings] == [("no dump", (2,))]


def test_a_collective_that_all_ranks_are_in_is_unfinished(tmp_path: Path) -> None:
    (finding,) = explained(tmp_path, *[dump_table(STEP, last="started")] * 3).findings
    assert (finding.kind, finding.seq, finding.ranks) == ("unfinished", 3, (0, 1, 2))
    assert "ranks 0, 1, 2 have entered all_reduce at train.py:12 and none has completed it" in (
        finding.text
    )


def test_a_later_missing_rank_is_a_consequence_of_what_all_ranks_are_in(tmp_path: Path) -> None:
    ahead, behind = dump_table(STEP, state="started"), dump_table(STEP[:2], state="started")
    (finding,) = explained(tmp_path, ahead, ahead, behind).findings
    assert (finding.kind, finding.seq) == ("unfinished", 1)


def test_one_dump_alone_asks_for_the_others(tmp_path: Path) -> None:
    alone = dump_table(STEP, last="started")
    (finding,) = explained(tmp_path, alone).findings
    assert (finding.kind, finding.ranks) == ("no dump", (1, 2))
    alone["pg_config"] = {}
    (finding,) = explained(tmp_path, alone).findings
    assert finding.kind == "unfinished"
    assert finding.text.endswith("the dumps of the other ranks would tell why")


def test_an_entry_older_than_what_other_ranks_still_have_is_not_lost(tmp_path: Path) -> None:
    late, cut = dump_table(STEP), dump_table(STEP)
    late["entries"][0]["state"] = "started"
    cut["entries"] = cut["entries"][1:]
    (finding,) = explained(tmp_path, late, cut, cut).findings
    assert (finding.kind, finding.seq, finding.ranks) == ("unfinished", 1, (0,))


def test_an_unfinished_send_or_receive_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = [dump_table([*STEP, ("recv 0<-1", "0")]), dump_table(STEP), dump_table(STEP)]
    tables[0]["entries"][-1] |= {"is_p2p": True, "p2p_seq_id": 4, "state": "started"}
    told = explained(tmp_path, *tables)
    assert [(each.kind, each.seq, each.ranks, each.text) for each in told.findings] == [(
        "point-to-point", 4, (0,),
        "in default_pg 0 rank 0 has not completed recv 0<-1 at train.py:13",
    )]
    assert told.collectives == 3
    assert main(["explain", str(tmp_path)]) == 1
    assert "point-to-point" in capsys.readouterr().out


def test_roots_of_gather_and_scatter_are_no_mistake(tmp_path: Path) -> None:
    calls = [("gather", "0"), ("scatter", "0"), ("barrier", "0")]
    root, other = dump_table(calls), dump_table(calls)
    other["entries"][0] |= {"output_sizes": [], "output_dtypes": []}
    other["entries"][1] |= {"input_sizes": [], "input_dtypes": []}
    other["entries"][2] |= {"input_dtypes": [], "output_dtypes": []}
    assert explained(tmp_path, root, other, other).findings == ()


def test_a_difference_that_all_ranks_completed_hides_no_cause(tmp_path: Path) -> None:
    waits, absent = dump_table(STEP, last="started"), dump_table(STEP[:2])
    absent["entries"][0]["output_sizes"] = [[2, 4]]
    told = explained(tmp_path, waits, waits, absent)
    assert [(each.kind, each.seq, each.completed) for each in told.findings] == [
        ("missing", 3, False), ("other size", 1, True)
    ]
    assert told.findings[1].text.startswith(
        "#1 of default_pg 0, which all have completed: rank 2 issued all_gather of [[8]] into "
        "[[2, 4]] at"
    )


def test_the_entry_that_differs_is_told_of_several_under_one_number(tmp_path: Path) -> None:
    calls = [("all_reduce", "0"), ("all_reduce", "0")]
    same, other = dump_table(calls), dump_table(calls)
    for table in (same, other):
        table["entries"][1]["collective_seq_id"] = 1
    other["entries"][1]["input_dtypes"] = ["Half"]
    (finding,) = explained(tmp_path, same, same, other).findings
    assert "rank 2 issued all_reduce of Float, Half at train.py:11" in finding.text
    other["entries"].pop()
    (finding,) = explained(tmp_path, same, same, other).findings
    assert "rank 2 issued no more under this number" in finding.text


def test_a_gloo_entry_has_ended_once_it_is_retired(tmp_path: Path) -> None:
    table = dump_table(STEP, state="scheduled")
    for entry in table["entries"]:
        entry |= {"profiling_name": entry["profiling_name"].replace("nccl", "gloo")}
        entry["retired"] = True
    assert explained(tmp_path, *[table] * 3).findings == ()
    failed = {**table, "entries": table["entries"][:2]}
    assert explained(tmp_path, table, table, failed).findings[0].kind == "missing"
    for entry in table["entries"]:
        entry |= {"profiling_name": entry["profiling_name"].replace("gloo", "nccl")}
    assert explained(tmp_path, *[table] * 3).findings[0].kind == "unfinished"


@pytest.mark.parametrize(
    ("name", "rank"),
    [("rank_1_v2.json", 1), ("job7_Rank-2_try0.json", 2), ("a_rank1.json", 1), ("t3_2.json", 2)],
)
def test_the_rank_is_the_number_after_the_word_rank(tmp_path: Path, name: str, rank: int) -> None:
    (tmp_path / name).write_text(json.dumps(dump_table(STEP)))
    assert read(tmp_path / name).rank == rank


def test_the_work_grows_with_the_entries_and_not_with_their_square(tmp_path: Path) -> None:
    """Works of gloo have no state, so each is looked at; 8 x 5,000 took 6.6 s before."""
    entry = read_one(tmp_path)
    dumps = [
        replace(entry, rank=rank, entries=tuple(
            replace(entry.entries[0], seq=seq, completed=False) for seq in range(1, 5001)
        )) for rank in range(8)
    ]
    began = time.process_time()
    assert explain(dumps).findings == ()
    assert time.process_time() - began < 3


def read_one(folder: Path) -> Dump:
    (folder / "rank_0.json").write_text(json.dumps(dump_table(STEP[:1], ranks=8)))
    return read(folder / "rank_0.json")


def test_a_users_folder_named_torch_is_not_torch(tmp_path: Path) -> None:
    table = dump_table(STEP)
    for entry in table["entries"]:
        entry["frames"][1]["filename"] = "/home/ada/torch/train.py"
    (tmp_path / "rank_0.json").write_text(json.dumps(table))
    assert read(tmp_path / "rank_0.json").entries[0].at == "/home/ada/torch/train.py:10"


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
        "text_1.json": (pickle.dumps({"version": "2.10"}, protocol=0), "found a pickle; a pickle"),
        "brace_1.json": (whole[:whole.index("}") + 1].encode(), "found JSON that was cut"),
        "old_1.json": (whole.replace("2.10", "1.5").encode(), "dump of version 2.x, found \"1.5\""),
        "list_1.json": (b"[]", "found other JSON"),
        "rankless.json": (whole.encode(), "expected a rank in the file's name"),
        "deep_1.json": (b"[" * 100_000, "found JSON that was cut"),
        "twice_1.json": (b'{"version": "2", "version": "2"}', "the key 'version' twice"),
        "strange_1.json": (b'{"version": "2.1", "entries": [{"a": 1}]}', "collective as entry 0"),
        "many_1.json": (b'{"version": "2.1", "entries": {}}', "entries in a list"),
        "group_1.json": (
            json.dumps({**dump_table(STEP), "pg_config": {"0": []}}).encode(),
            'expected a table as pg_config "0", found []',
        ),
        "groups_1.json": (
            json.dumps({**dump_table(STEP), "pg_config": [1]}).encode(), "groups by name"
        ),
        "rank_7.json": (whole.encode(), "found one whose default_pg has 3 ranks, none of them 7"),
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


def test_a_folder_of_torchs_own_dumps_is_told_to_hold_pickles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(2):
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump_table(STEP)))
    assert main(["explain", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "found 2 pickles, as nccl_trace_rank_0; a pickle can run code" in error


def test_dumps_of_two_jobs_are_refused_by_their_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, ranks in {"a_rank_0": 3, "b_rank_0": 3, "a_rank_1": 3, "c_rank_2": 4}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(dump_table(STEP, ranks=ranks)))

    def told(*names: str) -> str:
        files = [str(tmp_path / f"{name}.json") for name in names]
        assert main(["explain", *files]) == 2
        return capsys.readouterr().err.replace(f"{tmp_path}/", "")

    expected = "expected dumps of one job, one of each rank, found"
    remedy = "explain each job by itself"
    assert f"b_rank_0.json: {expected} two of rank 0, as a_rank_0.json and this; {remedy}" in told(
        "a_rank_0", "a_rank_1", "b_rank_0"
    )
    jobs = "jobs of 3 and of 4 ranks, as a_rank_1.json and this"
    assert f"c_rank_2.json: {expected} {jobs}; {remedy}" in told("a_rank_0", "a_rank_1", "c_rank_2")
    same = str(tmp_path / "a_rank_0.json")
    assert main(["explain", same, same, str(tmp_path / "a_rank_1.json")]) == 0


def test_ranks_that_begin_long_after_all_others_have_ended_may_be_of_another_job(
    tmp_path: Path
) -> None:
    later = dump_table(STEP, apart_ns=3600 * 10**9)
    told = explained(tmp_path, dump_table(STEP), dump_table(STEP), later)
    assert [(finding.kind, finding.ranks, finding.text) for finding in told.findings] == [(
        "other job", (2,),
        "rank 2 issued nothing until 3,598.000 s after the last of ranks 0, 1: if these are dumps "
        "of two jobs, explain each by itself",
    )]


def test_names_from_a_dump_cannot_steer_a_terminal(tmp_path: Path) -> None:
    hostile = dump_table([("all_reduce\x1b[2J", "0")])
    told = explained(tmp_path, dump_table([("all_reduce", "0")]), hostile)
    assert "\x1b" not in told.findings[0].text


def test_the_command_explains_what_it_can_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    waits = dump_table(STEP, last="started")
    explained(tmp_path, waits, waits, dump_table(STEP[:2]))
    (tmp_path / "rank_3.json").write_text("{")
    assert main(["explain", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"not read: {tmp_path / 'rank_3.json'}: expected JSON")
    assert lines[1] == "3 ranks, 3 collectives of 1 group: 1 found"
    assert lines[-1] == "    rank    1  all_reduce #3 of 0  for 2  train.py:12"
    assert main(["explain", str(tmp_path / "rank_2.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"] == []
    assert main(["explain", str(tmp_path / "rank_3.json")]) == 2
