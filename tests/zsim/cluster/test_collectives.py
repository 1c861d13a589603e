"""Collectives: closed forms against explicit steps, bytes against what every rank must come to
hold."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zsim.cluster.collectives
from tests.support.cases.sampling import collectives
from zsim.cluster.collectives import LIBRARIES, gloo, ring
from zsim.cluster.collectives.ring import BROADCAST_SLICE_NBYTES, Send, step_ns
from zsim.ir.sharding import shards
from zsim.testing.strategies import world_sizes

libraries = st.sampled_from(sorted(LIBRARIES))
messages = st.one_of(st.integers(0, 10_000), st.integers(2**22 - 2, 40 * 2**20))


def test_every_file_of_the_package_is_in_the_table_or_a_part_of_one_that_is() -> None:
    folder = Path(zsim.cluster.collectives.__path__[0])
    files = {file.stem for file in folder.iterdir()} - {"__init__", "__pycache__"}
    assert {stem.partition("_")[0] for stem in files} == set(LIBRARIES) <= files


@given(
    library=libraries, op=collectives, nbytes=messages, size=world_sizes(),
    alpha=st.integers(0, 10**5), rate=st.integers(1, 10**12),
)
def test_the_closed_form_equals_the_sum_of_its_steps_to_the_nanosecond(
    library: str, op: str, nbytes: int, size: int, alpha: int, rate: int
) -> None:
    algorithms = LIBRARIES[library]
    total = sum(
        max(step_ns(send.nbytes, alpha_ns=alpha, bytes_per_s=rate) for send in step)
        for step in algorithms.steps(op, nbytes, group_size=size)
    )
    assert (
        algorithms.duration_ns(op, nbytes, group_size=size, alpha_ns=alpha, bytes_per_s=rate)
        == total
    )


@given(library=libraries, op=collectives, nbytes=messages, size=world_sizes(), data=st.data())
def test_the_bytes_of_each_rank_equal_what_its_steps_send(
    library: str, op: str, nbytes: int, size: int, data: st.DataObject
) -> None:
    root = data.draw(st.integers(0, size - 1)) if op == "broadcast" else 0
    algorithms = LIBRARIES[library]
    sent = [0] * size
    for step in algorithms.steps(op, nbytes, group_size=size, root=root):
        for send in step:
            sent[send.source] += send.nbytes
    expected = [
        algorithms.bytes_sent(op, nbytes, group_size=size, rank=rank, root=root)
        for rank in range(size)
    ]
    assert sent == expected


@given(op=collectives, nbytes=messages, size=world_sizes())
def test_on_a_ring_everybody_receives_what_the_collective_must_deliver(
    op: str, nbytes: int, size: int
) -> None:
    received = [0] * size
    for step in LIBRARIES["ring"].steps(op, nbytes, group_size=size):
        for send in step:
            received[send.destination] += send.nbytes
    chunks = [part.numel for part in shards(nbytes, size)]
    previous = [chunks[rank - 1] for rank in range(size)]
    needed = {
        "all_gather": [nbytes - own for own in chunks],
        "reduce_scatter": [nbytes - chunk for chunk in previous],
        "all_reduce": [
            2 * nbytes - own - chunk for own, chunk in zip(chunks, previous, strict=True)
        ],
        "broadcast": [0] + [nbytes] * (size - 1),
        "all_to_all": [chunk * (size - 1) for chunk in chunks],
    }
    assert received == (needed[op] if size > 1 else [0])


@given(nbytes=messages, size=world_sizes(), rank=st.integers(0, 16))
def test_reduce_scatter_and_all_gather_together_send_what_all_reduce_sends(
    nbytes: int, size: int, rank: int
) -> None:
    sent = {
        op: LIBRARIES["ring"].bytes_sent(op, nbytes, group_size=size, rank=rank % size)
        for op in ("reduce_scatter", "all_gather", "all_reduce")
    }
    assert sent["reduce_scatter"] + sent["all_gather"] == sent["all_reduce"]


@given(nbytes=messages, size=world_sizes(), rank=st.integers(0, 16))
def test_a_reduce_scatter_on_gloo_sends_as_much_as_an_all_reduce(
    nbytes: int, size: int, rank: int
) -> None:
    sent = LIBRARIES["gloo"].bytes_sent
    assert sent("reduce_scatter", nbytes, group_size=size, rank=rank % size) == sent(
        "all_reduce", nbytes, group_size=size, rank=rank % size
    )


@given(library=libraries, op=collectives, nbytes=messages)
def test_one_rank_alone_sends_nothing_and_takes_no_time(library: str, op: str, nbytes: int) -> None:
    algorithms = LIBRARIES[library]
    assert algorithms.bytes_sent(op, nbytes, group_size=1) == 0
    assert algorithms.duration_ns(op, nbytes, group_size=1, alpha_ns=5, bytes_per_s=7) == 0
    assert list(algorithms.steps(op, nbytes, group_size=1)) == []


@given(
    op=collectives, nbytes=messages, size=world_sizes(), rate=st.integers(1, 10**12),
    more=st.integers(0, 10**12),
)
def test_more_bandwidth_is_never_slower(
    op: str, nbytes: int, size: int, rate: int, more: int
) -> None:
    for algorithms in LIBRARIES.values():
        slow = algorithms.duration_ns(op, nbytes, group_size=size, alpha_ns=10, bytes_per_s=rate)
        assert algorithms.duration_ns(
            op, nbytes, group_size=size, alpha_ns=10, bytes_per_s=rate + more
        ) <= slow


def test_a_reduce_scatter_of_three_uneven_chunks_ends_with_each_rank_s_own() -> None:
    assert list(LIBRARIES["ring"].steps("reduce_scatter", 7, group_size=3)) == [
        (Send(0, 1, 1), Send(1, 2, 3), Send(2, 0, 3)),
        (Send(0, 1, 3), Send(1, 2, 1), Send(2, 0, 3)),
    ]


def test_a_gloo_broadcast_to_five_ranks_doubles_who_has_the_message() -> None:
    assert list(LIBRARIES["gloo"].steps("broadcast", 9, group_size=5, root=3)) == [
        (Send(3, 4, 9),), (Send(3, 0, 9), Send(4, 1, 9)), (Send(3, 2, 9),),
    ]


@pytest.mark.parametrize(
    ("size", "sent"), [(2, [1, 0]), (4, [2, 1, 0, 0]), (8, [3, 2, 1, 1, 0, 0, 0, 0])]
)
def test_the_root_of_a_gloo_broadcast_sends_log2_n_messages_and_leaves_none(
    size: int, sent: list[int]
) -> None:
    sizes = [
        LIBRARIES["gloo"].bytes_sent("broadcast", 100, group_size=size, rank=rank)
        for rank in range(size)
    ]
    assert sizes == [100 * count for count in sent]


@given(library=libraries, op=collectives, nbytes=messages, size=world_sizes())
def test_the_number_of_steps_is_known_without_making_them(
    library: str, op: str, nbytes: int, size: int
) -> None:
    num_steps = {"ring": ring.num_steps, "gloo": gloo.num_steps, "nccl": ring.num_steps}[library]
    steps = LIBRARIES[library].steps(op, nbytes, group_size=size)
    assert num_steps(op, nbytes, group_size=size) == sum(1 for _ in steps)


def test_a_ring_broadcast_is_cut_into_slices() -> None:
    nbytes = BROADCAST_SLICE_NBYTES + 10
    half = nbytes // 2
    assert list(LIBRARIES["ring"].steps("broadcast", nbytes, group_size=3)) == [
        (Send(0, 1, half),), (Send(0, 1, half), Send(1, 2, half)), (Send(1, 2, half),),
    ]


@given(nbytes=st.integers(0, 10**12), alpha=st.integers(0, 10**6), rate=st.integers(1, 10**12))
def test_a_step_is_rounded_up_once_and_takes_at_least_a_nanosecond(
    nbytes: int, alpha: int, rate: int
) -> None:
    taken = step_ns(nbytes, alpha_ns=alpha, bytes_per_s=rate)
    assert taken >= 1
    assert (taken - alpha) * rate >= nbytes * 10**9 or taken == 1 == alpha + 1
    assert taken == 1 or (taken - alpha - 1) * rate < nbytes * 10**9


@pytest.mark.parametrize("library", sorted(LIBRARIES))
def test_an_unknown_collective_is_an_error_and_not_a_guess(library: str) -> None:
    with pytest.raises(KeyError):
        LIBRARIES[library].bytes_sent("gather", 8, group_size=2)
    with pytest.raises(KeyError):
        LIBRARIES[library].duration_ns("gather", 8, group_size=2, alpha_ns=0, bytes_per_s=1)
