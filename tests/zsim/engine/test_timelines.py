"""Golden timelines, worked out by hand in nanoseconds: FSDP1's prefetching and its limiter, FSDP2's
rules, DDP's buckets.

Blocks are equal, the root takes no time, the host none but where a test says so, and nothing
contends but for streams and queues.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.programs.timelines import Toy, over, timeline, training
from zsim.ir.ops import Op
from zsim.models.training_options import Precision
from zsim.strategies import ddp, fsdp1, fsdp2

FAST = {"all_gather": 10, "reduce_scatter": 15, "all_reduce": 20}
SLOW = {"all_gather": 40, "reduce_scatter": 60}


def starts(rows: list[tuple[str, int, int]], kind: str) -> list[tuple[str, int]]:
    """Block and start of each op of one kind."""
    return [
        (name.removeprefix(f"{kind} "), start)
        for name, start, _ in rows
        if name.startswith(f"{kind} ")
    ]


def of_fsdp1(
    toy: Toy, *, blocks: int = 3, forward: int = 20, backward: int = 40,
    options: fsdp1.Options | None = None,
) -> list[tuple[str, int, int]]:
    """The timeline of fsdp1 on two ranks."""
    case = training(blocks, forward=forward, backward=backward)
    return timeline(
        fsdp1.plan(case, mesh=over(dp_shard=2), options=options or fsdp1.Options()), toy
    )


def concatenating(op: Op) -> int:
    """A host that takes 70 for each concatenation of a block's gradients and the hooks after it."""
    return 70 if op.kind == "copy" and op.stream == "compute" and op.unit != "root" else 0


def test_fsdp1_prefetches_before_backward_so_that_a_gather_goes_ahead_of_a_reduction() -> None:
    """Block 1's gather is issued before block 2 runs; block 0's after block 2's reduce-scatter, for
    which it queues (125 to 135)."""
    assert of_fsdp1(Toy(collectives=FAST)) == [
        ("all_gather 0", 0, 10),
        ("forward 0", 10, 30),
        ("all_gather 1", 10, 20),
        ("all_gather 2", 20, 30),
        ("forward 1", 30, 50),
        ("forward 2", 50, 70),
        ("all_gather 2", 50, 60),
        ("all_gather 1", 60, 70),
        ("backward 2", 70, 110),
        ("reduce_scatter 2", 110, 125),
        ("backward 1", 110, 150),
        ("all_gather 0", 125, 135),
        ("reduce_scatter 1", 150, 165),
        ("backward 0", 150, 190),
        ("reduce_scatter 0", 190, 205),
    ]


def test_fsdp1_without_prefetch_gathers_each_block_behind_the_next_ones_reduction() -> None:
    rows = of_fsdp1(Toy(collectives=FAST), options=fsdp1.Options(backward_prefetch="none"))

    assert rows[7:] == [
        ("backward 2", 70, 110),
        ("reduce_scatter 2", 110, 125),
        ("all_gather 1", 125, 135),
        ("backward 1", 135, 175),
        ("reduce_scatter 1", 175, 190),
        ("all_gather 0", 190, 200),
        ("backward 0", 200, 240),
        ("reduce_scatter 0", 240, 255),
    ]


@pytest.mark.parametrize(
    ("when", "rows"),
    [
        (
            "pre",
            [
                ("all_gather 2", 50, 60),
                ("all_gather 1", 60, 70),
                ("backward 2", 70, 110),
                ("reduce_scatter 2", 120, 135),
                ("backward 1", 120, 160),
                ("all_gather 0", 135, 145),
                ("reduce_scatter 1", 190, 205),
                ("backward 0", 190, 230),
                ("reduce_scatter 0", 260, 275),
            ],
        ),
        (
            "post",
            [
                ("all_gather 2", 50, 60),
                ("backward 2", 70, 110),
                ("all_gather 1", 120, 130),
                ("reduce_scatter 2", 130, 145),
                ("backward 1", 130, 170),
                ("all_gather 0", 190, 200),
                ("reduce_scatter 1", 200, 215),
                ("backward 0", 200, 240),
                ("reduce_scatter 0", 260, 275),
            ],
        ),
    ],
)
def test_fsdp1_prefetching_after_backward_comes_late_on_a_busy_host_and_ahead_of_the_reduction(
    when: str, rows: list[tuple[str, int, int]]
) -> None:
    options = fsdp1.Options(backward_prefetch="post" if when == "post" else "pre")
    assert of_fsdp1(Toy(collectives=FAST, issue=concatenating), options=options)[6:] == rows


def test_fsdp1_gathers_a_block_only_when_the_one_two_before_it_has_been_freed() -> None:
    """Block 2 still meets frees of the step before; block 3 waits for block 0's forward, which ends
    at 110."""
    limited = of_fsdp1(Toy(collectives=FAST), blocks=4, forward=100)
    free = of_fsdp1(
        Toy(collectives=FAST), blocks=4, forward=100, options=fsdp1.Options(limit_all_gathers=False)
    )

    assert starts(limited, "all_gather") == [
        ("0", 0), ("1", 10), ("2", 20), ("3", 110), ("3", 310), ("2", 320), ("1", 465), ("0", 505)
    ]
    assert starts(free, "all_gather") == [
        ("0", 0), ("1", 10), ("2", 20), ("3", 30), ("3", 40), ("2", 50), ("1", 465), ("0", 505)
    ]
    assert [row for row in limited if "all_gather" not in row[0]] == [
        row for row in free if "all_gather" not in row[0]
    ]


def launching(op: Op) -> int:
    """A host that takes 30 to launch a block's forward."""
    return 30 if op.kind == "forward" and op.unit != "root" else 0


def test_fsdp1_prefetching_in_forward_gathers_before_the_launch_and_reduces_a_block_later() -> None:
    """Block 1's gather no longer waits for the launch of block 0; block 2 reduces after block 1's
    backward (190), not its own (150)."""
    toy = Toy(collectives=FAST, issue=launching)
    plain = of_fsdp1(toy, options=fsdp1.Options(limit_all_gathers=False))
    ahead = of_fsdp1(toy, options=fsdp1.Options(limit_all_gathers=False, forward_prefetch=True))

    assert starts(plain, "all_gather")[:3] == [("0", 0), ("1", 30), ("2", 60)]
    assert starts(ahead, "all_gather")[:3] == [("0", 0), ("1", 10), ("2", 30)]
    assert plain[8:] == [
        ("backward 2", 110, 150),
        ("reduce_scatter 2", 150, 165),
        ("backward 1", 150, 190),
        ("all_gather 0", 165, 175),
        ("reduce_scatter 1", 190, 205),
        ("backward 0", 190, 230),
        ("reduce_scatter 0", 230, 245),
    ]
    assert ahead[8:] == [
        ("backward 2", 110, 150),
        ("all_gather 0", 110, 120),
        ("backward 1", 150, 190),
        ("reduce_scatter 2", 190, 205),
        ("backward 0", 190, 230),
        ("reduce_scatter 1", 230, 245),
        ("reduce_scatter 0", 245, 260),
    ]


def test_fsdp2_forward_gathers_two_ahead_behind_copies_and_exposes_the_first() -> None:
    """F1 to F3: a shard is copied in (2) and an output copied out (4) on the compute stream.

    A gather follows the gather before it and the copy-out two blocks back. Block 2's follows block
    0's copy-out (16), block 3's follows block 1's (70).
    """
    case = training(4, forward=50, backward=60)
    rows = timeline(
        fsdp2.plan(case, mesh=over(dp_shard=2), options=fsdp2.Options()),
        Toy(collectives=FAST, copies=4),
    )

    assert rows[:15] == [
        ("copy 0", 0, 2),
        ("all_gather 0", 2, 12),
        ("copy 1", 2, 4),
        ("copy 0", 12, 16),
        ("all_gather 1", 12, 22),
        ("forward 0", 16, 66),
        ("copy 2", 16, 18),
        ("all_gather 2", 22, 32),
        ("copy 1", 66, 70),
        ("forward 1", 70, 120),
        ("copy 3", 70, 72),
        ("all_gather 3", 72, 82),
        ("copy 2", 120, 124),
        ("forward 2", 124, 174),
        ("copy 3", 174, 178),
    ]


def test_fsdp2_backward_gathers_one_ahead_in_turn_with_reductions_and_exposes_the_last() -> None:
    """B1 to B3 on a slow network: block 1 is copied in after block 2's copy-out (172), and gathers
    and reductions take turns.

    Block 1's gradients wait for block 2's reduce-scatter (274). The last reduction ends 90 after
    the last backward.
    """
    case = training(3, forward=20, backward=30)
    rows = timeline(
        fsdp2.plan(case, mesh=over(dp_shard=2), options=fsdp2.Options()),
        Toy(collectives=SLOW, copies=4),
    )

    assert rows[12:] == [
        ("copy 2", 126, 128),
        ("all_gather 2", 128, 168),
        ("copy 2", 168, 172),
        ("copy 1", 172, 174),
        ("backward 2", 172, 202),
        ("all_gather 1", 174, 214),
        ("copy 2", 202, 206),
        ("reduce_scatter 2", 214, 274),
        ("copy 1", 214, 218),
        ("copy 0", 218, 220),
        ("backward 1", 218, 248),
        ("all_gather 0", 274, 314),
        ("copy 1", 274, 278),
        ("reduce_scatter 1", 314, 374),
        ("copy 0", 314, 318),
        ("backward 0", 318, 348),
        ("copy 0", 374, 378),
        ("reduce_scatter 0", 378, 438),
    ]


def test_fsdp2_gathers_the_first_block_of_a_later_micro_batch_when_all_compute_is_over() -> None:
    """F2: block 0's second gather begins where the compute stream has waited for the last
    reduce-scatter, which ends at 245."""
    case = training(2, forward=50, backward=60, accumulation=2)
    rows = timeline(
        fsdp2.plan(case, mesh=over(dp_shard=2), options=fsdp2.Options()), Toy(collectives=FAST)
    )
    forwards = [start for name, start, _ in rows if name == "forward 0"]

    assert starts(rows, "all_gather") == [
        ("0", 0), ("1", 10), ("1", 60), ("0", 110), ("0", 245), ("1", 255), ("1", 305), ("0", 355)
    ]
    assert forwards == [10, 255]


def test_ddp_reduces_a_bucket_while_the_next_fills_and_exposes_the_last() -> None:
    """Two blocks fill a bucket: 8 to copy their gradients in, 20 on the wire, 8 to copy each back.
    The first copy back runs beside the second all-reduce."""
    case = training(4, forward=20, backward=30)
    program = ddp.plan(case, mesh=over(dp_replicate=2), options=ddp.Options(bucket_cap_mb=0.0638))

    assert timeline(program, Toy(collectives=FAST, copies=4)) == [
        ("forward 0", 0, 20),
        ("forward 1", 20, 40),
        ("forward 2", 40, 60),
        ("forward 3", 60, 80),
        ("backward 3", 80, 110),
        ("backward 2", 110, 140),
        ("copy bucket.0", 140, 148),
        ("all_reduce bucket.0", 148, 168),
        ("backward 1", 148, 178),
        ("backward 0", 178, 208),
        ("copy bucket.1", 208, 216),
        ("all_reduce bucket.1", 216, 236),
        ("copy bucket.0", 216, 224),
        ("copy bucket.1", 236, 244),
    ]


def test_ddp_casts_a_bucket_back_beside_the_all_reduce_of_the_next() -> None:
    """Two blocks fill a bucket: 4 to copy their gradients in and 6 to cast them, then 20 on the
    wire. Casting each back takes 6, and copying it 4."""
    case = replace(
        training(4, forward=5, backward=5),
        precision=Precision(parameters="bfloat16", reduce="float32"),
    )
    program = ddp.plan(case, mesh=over(dp_replicate=2), options=ddp.Options(bucket_cap_mb=0.0319))
    rows = timeline(program, Toy(collectives=FAST, copies=4))

    assert [row for row in rows if row[2] > 20 and "optimizer" not in row[0]] == [
        ("backward 3", 20, 25),
        ("backward 2", 25, 30),
        ("copy bucket.0", 30, 40),
        ("all_reduce bucket.0", 40, 60),
        ("backward 1", 40, 45),
        ("backward 0", 45, 50),
        ("copy bucket.1", 50, 60),
        ("copy bucket.0", 60, 66),
        ("all_reduce bucket.1", 60, 80),
        ("copy bucket.0", 66, 70),
        ("copy bucket.1", 80, 86),
        ("copy bucket.1", 86, 90),
    ]
