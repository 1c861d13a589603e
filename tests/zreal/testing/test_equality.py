"""Equality of values on all ranks: what differs is named, with the ranks in the minority."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.zreal.testing.conftest import RankSessions
from zreal.testing.names import named
from zreal.testing.on_rank.equality import (
    differing_element,
    differing_part,
    digested,
    parts,
    report,
)
from zsim.errors import ArgumentError

pytest_plugins = ["pytester"]


@dataclass
class State:
    step: int
    weights: dict[str, Any]


def compared(*of_ranks: object) -> str:
    """The report on the values of ranks; "" where all are equal."""
    forms = differing_part([[digested(*part) for part in parts(value)] for value in of_ranks])
    return report(forms) if forms else ""


def tensor(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize(
    "make",
    [
        lambda: tensor(float("nan"), 1), lambda: torch.ones(4, 4).T[1:], lambda: torch.ones(()),
        lambda: torch.ones(3, dtype=torch.bfloat16), lambda: torch.tensor([True, False]),
        lambda: torch.empty(0, 3), lambda: tensor(1, 2, dtype=torch.complex64).conj(),
        lambda: {"b": {1, "x"}, "a": [1, 2.0, None]}, lambda: State(1, {"w": tensor(1)}),
        lambda: OrderedDict(x=b"1"), lambda: range(4), lambda: torch.float32,
    ],
)
def test_equal_values_are_equal(make) -> None:
    assert compared(make(), make(), make()) == ""


def test_the_order_of_keys_does_not_matter() -> None:
    assert compared({"a": 1, "b": 2}, {"b": 2, "a": 1}) == ""


def test_the_minority_is_named_with_the_path_and_the_values() -> None:
    values = [State(1, {"w": tensor(1, 2)}) for _ in range(4)]
    values[2].weights["w"][1] = 3
    assert compared(*values) == (
        "value.weights['w'] differs between ranks\n"
        "  ranks 0, 1, 3: float32 [2] [1.0, 2.0]\n"
        "  rank 2: float32 [2] [1.0, 3.0]  <- the minority"
    )


@pytest.mark.parametrize(
    ("left", "right", "said"),
    [
        (1, 2, "value differs between ranks\n  rank 0: 1\n  rank 1: 2"),
        (1, True, "value differs between ranks\n  rank 0: 1\n  rank 1: True"),
        ([1], [1, 2], "len(value) differs between ranks\n  rank 0: 1\n  rank 1: 2"),
        ({"a": 1}, {"b": 1}, "value.keys() differs between ranks"),
        (tensor(0.0), tensor(-0.0), "  rank 0: float32 [1] [0.0]\n  rank 1: float32 [1] [-0.0]"),
        (tensor(1), tensor(1, dtype=torch.int64), "  rank 1: int64 [1] [1]"),
        (torch.ones(2, 3), torch.ones(3, 2), "  rank 0: float32 [2, 3] [[1.0"),
        ("x" * 400, "y" * 400, f"  rank 0: '{'x' * 299}…\n"),
    ],
)
def test_values_that_differ_are_shown(left, right, said) -> None:
    assert said in compared(left, right)


def test_the_first_element_that_differs_is_told_with_its_index() -> None:
    left = torch.arange(6.0).reshape(2, 3)
    right = left.clone()
    right[1, 1:] = 7
    data = [each.numpy().tobytes() for each in (left, right)]
    assert differing_element(data, like=left) == ("[1, 1]", "4.0", "7.0")


def test_what_has_no_bytes_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"assert_all_equal: value\[0\]: expected something"):
        compared([lambda: 1])


def test_ranks_are_named_in_short() -> None:
    assert [named(ranks) for ranks in ([2], [0, 1], [0, 1, 2], [0, 2, 3])] == [
        "rank 2", "ranks 0, 1", "ranks 0-2", "ranks 0, 2, 3",
    ]


@pytest.mark.gloo
def test_ranks_compare_values_and_all_of_them_fail(sessions: RankSessions) -> None:
    sessions.end_when(lambda ranks: all(rank.error for rank in ranks))
    reports = sessions.reports("""
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

@pytest.mark.ranks(3)
def test_tensors(rank):
    rank.assert_all_equal({"step": 1})
    weight = torch.arange(100.0).reshape(10, 10)
    weight[5, 5] += rank.index == 1
    rank.assert_all_equal({"weight": [weight]})

@pytest.mark.ranks(2)
def test_kinds(rank):
    rank.assert_all_equal(torch.ones(2) if rank.index else None)

@pytest.mark.ranks(1)
def test_dtensor(rank):
    rank.assert_all_equal(distribute_tensor(torch.ones(4), rank.mesh, [Shard(0)]))
""")
    texts = {name: report.longreprtext for name, report in reports.items()}
    assert texts["test_tensors"].startswith("ranks 0-2 of 3 failed alike: AssertionError: value['w")
    assert (
        "E       AssertionError: value['weight'][0] differs between ranks\n"
        "E         ranks 0, 2: float32 [10, 10]\n"
        "E         rank 1: float32 [10, 10]  <- the minority\n"
        "E         first at [5, 5]: 55.0 on rank 0, 56.0 on rank 1\n"
    ) in texts["test_tensors"]
    kinds = "E         rank 0: None\nE         rank 1: float32 [2] [1.0, 1.0]\n"
    assert kinds in texts["test_kinds"]
    assert "found a DTensor; compare its full_tensor(), or its to_local()" in texts["test_dtensor"]
