"""The property kit for shard math: correct functions pass, seeded defects break their laws."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy
import pytest

from zsim.errors import ArgumentError
from zsim.ir.sharding import shard as interval
from zsim.testing.sharding import LAWS, ShardLawError, by_numel, check_sharding

Pieces = list[list[Any]]


def size_of(tensor: list[Any], world: int) -> int:
    """Rows of a full shard, as torch.chunk has them."""
    return -(-len(tensor) // world)


def rows(tensor: list[Any], rank: int, world: int) -> list[Any]:
    size = size_of(tensor, world)
    return tensor[rank * size : (rank + 1) * size]


def join(pieces: Pieces) -> list[Any]:
    return [row for piece in pieces for row in piece]


def recut(pieces: Pieces, world: int) -> Pieces:
    whole = join(pieces)
    return [rows(whole, rank, world) for rank in range(world)]


def padded(tensor: Any, rank: int, world: int) -> Any:
    """A shard of a flat numpy array, padded with zeros to equal size."""
    flat = tensor.reshape(-1)
    size = size_of(flat, world)
    piece = flat[rank * size : (rank + 1) * size]
    return numpy.concatenate([piece, numpy.zeros(size - len(piece), dtype=flat.dtype)])


def unpadded(pieces: list[Any], shape: tuple[int, ...]) -> Any:
    number = int(numpy.prod(shape))
    return numpy.concatenate(pieces)[:number].reshape(shape)


def test_the_rows_of_fully_shard_hold_every_law() -> None:
    assert check_sharding(rows, join, recut) == 256


def test_a_flat_buffer_with_padding_holds_every_law() -> None:
    number = check_sharding(padded, unpadded, make=numpy.array, gives_shape=True)
    assert number == 3 * 256  # in float32 and float16 too


def test_the_projects_own_shards_hold_every_law() -> None:
    def own(tensor: list[Any], rank: int, world: int) -> list[Any]:
        held = interval(len(tensor), num_shards=world, rank=rank)
        return tensor[held.start : held.stop]

    assert check_sharding(own, join) == 256


def floor(tensor: list[Any], rank: int, world: int) -> list[Any]:
    size = len(tensor) // world
    return tensor[rank * size : (rank + 1) * size]


def overlapping(tensor: list[Any], rank: int, world: int) -> list[Any]:
    size = size_of(tensor, world)
    return tensor[rank * size : (rank + 1) * size + (rank == 0 and world > 1)]


def reversed_join(pieces: Pieces) -> list[Any]:
    return join(pieces[::-1])


def reading_padding(pieces: list[Any], shape: tuple[int, ...]) -> Any:
    whole = unpadded(pieces, shape)
    if whole.size and len(pieces) > 1:
        padding = numpy.concatenate(pieces)[whole.size:]
        whole = whole + padding.sum()
    return whole


def popping(pieces: Pieces) -> list[Any]:
    joined = join(pieces)
    for piece in pieces:
        piece.clear()
    return joined


def last_takes_the_rest(tensor: list[Any], rank: int, world: int) -> list[Any]:
    size = len(tensor) // world
    return tensor[rank * size : (rank + 1) * size if rank < world - 1 else len(tensor)]


def recut_without_last(pieces: Pieces, world: int) -> Pieces:
    return [*recut(pieces, world)[:-1], []] if world > 1 else recut(pieces, world)


def in_float(pieces: list[Any], shape: tuple[int, ...]) -> Any:
    return unpadded(pieces, shape).astype("float32")


def through_half(tensor: Any, rank: int, world: int) -> Any:
    """A shard that is float16 on its way."""
    with numpy.errstate(over="ignore"):
        return padded(tensor.astype("float16").astype(tensor.dtype), rank, world)


def remembering() -> Callable[..., Any]:
    """A shard that leaves out the first element in every second cut."""
    cuts: list[int] = []

    def shard(tensor: list[Any], rank: int, world: int) -> list[Any]:
        cuts.extend([rank] * (rank == 0))
        return rows(tensor, rank, world)[len(cuts) % 2 * (rank == 0):]

    return shard


Broken = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any] | None, dict[str, Any]]
FLAT = {"make": numpy.array, "gives_shape": True}
DEFECTS: dict[str, Broken] = {
    "a_tensor_is_cut_alike_each_time": (remembering(), join, None, {}),
    "elements_are_held_once": (floor, join, None, {}),
    "shards_join_to_the_tensor": (rows, reversed_join, None, {}),
    "padding_is_never_read": (padded, reading_padding, None, FLAT),
    "the_tensor_is_left_as_it_was": (
        lambda tensor, rank, world: list(rows(tensor, rank, world)), popping, None, {}
    ),
    "pieces_are_equal_or_smaller_later": (last_takes_the_rest, join, None, {}),
    "dtypes_are_kept": (padded, in_float, None, FLAT),
    "resharding_is_sharding_anew": (rows, join, recut_without_last, {}),
    "values_are_kept_to_the_bit": (through_half, unpadded, None, FLAT | {"dtypes": ["float32"]}),
}


def test_every_law_has_a_seeded_defect() -> None:
    assert set(DEFECTS) == set(LAWS)


@pytest.mark.quality
@pytest.mark.parametrize("law", LAWS)
def test_a_seeded_defect_breaks_its_law(law: str) -> None:
    shard, unshard, reshard, more = DEFECTS[law]
    with pytest.raises(ShardLawError) as caught:
        check_sharding(shard, unshard, reshard, **more)
    assert caught.value.where == law
    assert re.search(r"shape .* rank.*: .*\branks? ", str(caught.value))


@pytest.mark.quality
def test_the_smallest_failing_shape_is_told() -> None:
    with pytest.raises(ShardLawError) as caught:
        check_sharding(overlapping, join)
    assert str(caught.value) == (
        "elements_are_held_once: expected it to hold, found shape 2 over 2 ranks: the element at "
        "index 1 is in pieces of ranks 0, 1"
    )


def test_an_error_of_the_users_function_names_law_and_shape() -> None:
    def failing(tensor: list[Any], rank: int, world: int) -> list[Any]:
        if world > len(tensor) > 2:
            raise IndexError(rank)
        return rows(tensor, rank, world)

    with pytest.raises(IndexError) as caught:
        check_sharding(failing, join)
    told = "in the law a_tensor_is_cut_alike_each_time, shape 3 over 4 ranks"
    assert caught.value.__notes__ == ["in shard(tensor, rank=0, world=4)", told]


@pytest.mark.parametrize(("part", "call"), [
    ("unshard", "in unshard(pieces of 2 ranks)"),
    ("reshard", "in reshard(pieces of 2 ranks, world=3)"),
])
def test_an_error_of_the_users_function_names_the_call(part: str, call: str) -> None:
    def failing(pieces: Pieces, *_: int) -> Any:
        raise ZeroDivisionError

    functions = {"unshard": join, "reshard": recut, part: failing}
    with pytest.raises(ZeroDivisionError) as caught:
        check_sharding(rows, functions["unshard"], functions["reshard"], worlds=[2, 3])
    assert caught.value.__notes__[0] == call
    assert "shape 0 over 2 ranks" in caught.value.__notes__[1]


def test_a_name_that_is_no_law_is_refused() -> None:
    with pytest.raises(ArgumentError, match="without: expected a_tensor_is_cut_alike_.*'parity'"):
        check_sharding(rows, join, without=["parity"])
    with pytest.raises(ArgumentError, match="without: expected a law to be left, found every law"):
        check_sharding(rows, join, without=LAWS)


@pytest.mark.parametrize(("arguments", "problem"), [
    ({"worlds": ()}, r"worlds: expected numbers of ranks from 1, found \[\]; as worlds="),
    ({"worlds": 4}, "worlds: expected numbers of ranks from 1, found 4"),
    ({"worlds": [0]}, r"worlds: expected numbers of ranks from 1, found \[0\]"),
    ({"worlds": [True]}, r"worlds: expected numbers of ranks from 1, found \[True\]"),
    ({"shapes": ()}, r"shapes: expected shapes, each of sizes from 0, found \[\]; as shapes="),
    ({"shapes": [5]}, r"shapes: expected shapes, each of sizes from 0, found \[5\]"),
    ({"shapes": [(-1,)]}, r"shapes: expected shapes, each of sizes from 0, found \[\(-1,\)\]"),
    ({"shapes": [()]}, "shapes: expected a dimension in each shape of lists, found a scalar"),
    ({"dtypes": ["float16"]}, "dtypes: expected dtypes that make= takes .*, found float16"),
    ({"dtypes": (), "make": numpy.array}, r"dtypes: expected dtypes, found \[\]"),
    ({"dtypes": ["uint8"], "make": numpy.array}, "hold -1 to 186, found uint8; check smaller"),
])
def test_a_check_of_nothing_and_other_mistakes_are_refused(
    arguments: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ArgumentError, match=problem):
        check_sharding(rows, join, **arguments)


def test_a_scalar_is_cut_as_one_element() -> None:
    shapes = [(), (2,)]
    number = check_sharding(padded, unpadded, make=numpy.array, gives_shape=True, shapes=shapes)
    assert number == 3 * 2 * 8
    with pytest.raises(ShardLawError, match="found a scalar over 1 rank: 1 of 1 elements"):
        check_sharding(
            lambda tensor, rank, world: tensor.reshape(-1)[:0], unpadded, make=numpy.array,
            gives_shape=True, shapes=shapes,
        )


def half_as_single(tensor: Any, rank: int, world: int) -> Any:
    """A shard that widens half precision."""
    piece = padded(tensor, rank, world)
    return piece.astype("float32") if piece.dtype == "float16" else piece


@pytest.mark.quality
def test_a_shard_that_casts_halves_is_found() -> None:
    with pytest.raises(ShardLawError) as caught:
        check_sharding(half_as_single, unpadded, make=numpy.array, gives_shape=True)
    assert str(caught.value) == (
        "dtypes_are_kept: expected it to hold, found shape 0 of float16 over 1 rank: the piece of "
        "rank 0 is of float32, the tensor of float16"
    )
    single: dict[str, Any] = {"make": numpy.array, "gives_shape": True, "dtypes": ["float32"]}
    assert check_sharding(half_as_single, unpadded, **single) == 256


@pytest.mark.quality
@pytest.mark.parametrize(("dtype", "narrower"), [
    ("float64", "float32"), ("float32", "float16"), ("int64", "float64"), ("int32", "float32"),
    ("int16", "int8"),
])
@pytest.mark.parametrize("part", ["shard", "unshard", "reshard"])
def test_a_way_through_a_narrower_dtype_and_back_is_found(
    dtype: str, narrower: str, part: str
) -> None:
    def through(value: Any) -> Any:
        with numpy.errstate(all="ignore"):
            return value.astype(narrower).astype(dtype)

    def cut(tensor: Any, rank: int, world: int) -> Any:
        piece = rows(tensor, rank, world)
        return through(piece) if part == "shard" else piece

    def joined(pieces: list[Any]) -> Any:
        whole = numpy.concatenate(pieces)
        return through(whole) if part == "unshard" else whole

    def moved(pieces: list[Any], world: int) -> list[Any]:
        whole = numpy.concatenate(pieces)
        whole = through(whole) if part == "reshard" else whole
        return [rows(whole, rank, world) for rank in range(world)]

    shapes = [(1,), (5,)]
    with pytest.raises(ShardLawError, match="values_are_kept_to_the_bit: .* shape 1 of") as caught:
        check_sharding(cut, joined, moved, make=numpy.array, dtypes=[dtype], shapes=shapes)
    assert "rank" in str(caught.value)


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16", "int64"])
def test_torchs_way_through_another_half_is_found(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    own = getattr(torch, dtype)
    narrow = torch.float16 if dtype == "bfloat16" else torch.bfloat16

    def lossy(tensor: Any, rank: int, world: int) -> Any:
        return rows(tensor.to(narrow).to(own), rank, world)

    more: dict[str, Any] = {"make": torch.tensor, "dtypes": [own], "shapes": [(5,), (31, 3)]}
    assert check_sharding(rows, torch.cat, **more) == 16
    with pytest.raises(ShardLawError, match="values_are_kept_to_the_bit"):
        check_sharding(lossy, torch.cat, **more)


def test_large_shapes_are_left_out_of_float16_alone() -> None:
    """float16 holds each integer up to 2048, and a law fills a tensor with the next numbers."""
    more: dict[str, Any] = {"make": numpy.array, "gives_shape": True, "worlds": [2]}
    assert check_sharding(padded, unpadded, shapes=[(1024,)], **more) == 3
    assert check_sharding(padded, unpadded, shapes=[(1025,)], **more) == 2


def test_functions_of_tensors_that_get_lists_are_told_of_make() -> None:
    def sizes(tensor: Any, rank: int, world: int) -> Any:
        return tensor.chunk(world)[rank]

    with pytest.raises(AttributeError) as caught:
        check_sharding(sizes, join)
    assert caught.value.__notes__[-1] == (
        "tensors are nested lists here; make=torch.tensor makes torch's, and "
        "*zsim.testing.sharding.by_numel(shard) is for a shard(numel, rank, world)"
    )


def test_functions_of_a_number_of_elements_are_checked_by_their_bounds_or_counts() -> None:
    def counted(numel: int, rank: int, world: int) -> int:
        return numel // world + (rank < numel % world)

    def overlapping(numel: int, rank: int, world: int) -> tuple[int, int]:
        size = -(-numel // world)
        return rank * size, (rank + 1) * size + 1

    flat = [(numel,) for numel in (0, 1, 5, 8)]
    assert check_sharding(*by_numel(counted), shapes=flat) == 4 * 8
    with pytest.raises(ShardLawError, match="elements_are_held_once: .*shape 2 over 2 ranks"):
        check_sharding(*by_numel(overlapping), shapes=[(1,), (2,)])
    with pytest.raises(ShardLawError, match="in no piece"):
        check_sharding(*by_numel(lambda numel, rank, world: numel // world), shapes=flat)
    with pytest.raises(ArgumentError, match=r"numel=0, .*: expected \(start, stop\)"):
        check_sharding(*by_numel(lambda numel, rank, world: "all"), shapes=flat)


@pytest.mark.quality
def test_a_single_world_is_resharded_to_another() -> None:
    def lazy(pieces: Pieces, world: int) -> Pieces:
        return pieces if len(pieces) == 4 else recut(pieces, world)

    with pytest.raises(ShardLawError, match="resharded from 4 to 5 ranks"):
        check_sharding(rows, join, lazy, worlds=[4], shapes=[(8,)])
