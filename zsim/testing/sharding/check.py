"""`check_sharding`: laws of shard math on a user's own functions, and the smallest breach."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

from zsim.errors import ArgumentError, ZsimError, listed
from zsim.io.arguments import described
from zsim.testing.sharding.laws import LAWS, Law, ShardCase
from zsim.testing.sharding.values import Cut, Make

__tracebackhide__ = True  # reports of pytest end at the user's own line
WORLDS = (1, 2, 3, 4, 5, 7, 8, 16)
"""World sizes by default: one rank, powers of two, primes."""
ROWS = (0, 1, 2, 3, 5, 7, 8, 13, 16, 31)
"""First dimensions by default: none, fewer than ranks, primes, multiples."""
SHAPES: tuple[tuple[int, ...], ...] = tuple(
    sorted(
        [*((rows,) for rows in ROWS), *((rows, columns) for rows in ROWS for columns in (1, 3)),
         (2, 3, 2), (5, 2, 2)],
        key=lambda shape: (prod(shape), len(shape), shape),
    )
)
MAKERS = {"torch": ("tensor", "as_tensor"), "numpy": ("array", "asarray")}
"""Makers by library, checked with their own choice of a dtype, float32 and float16."""


class ShardLawError(ZsimError, AssertionError):
    """A law of shard math that functions break: the law, the smallest shape, the ranks."""


def check_sharding(
    shard: Callable[[Any, int, int], Any],
    unshard: Callable[..., Any],
    reshard: Callable[[list[Any], int], Any] | None = None,
    *,
    make: Make = list,
    gives_shape: bool = False,
    dtypes: Sequence[Any] | None = None,
    worlds: Sequence[int] = WORLDS,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    without: Collection[str] = (),
) -> int:
    """The number of cases of `shapes`, `worlds` and `dtypes` in which all laws hold; ShardLawError
    at the first that does not.

    `shard(tensor, rank, world)` gives a rank's piece, `unshard(pieces)` the tensor; with
    `gives_shape` it is `unshard(pieces, shape)`. `reshard(pieces, world)` gives the pieces for
    another world. `make` makes a tensor of nested lists, as torch.tensor. `dtypes` are what
    `make` takes as `dtype=`; torch.tensor and numpy.array by default make integers, float32 and
    float16.
    `without`: names of `LAWS` that do not hold by intent. Cases go from small to large, so the
    first failure is the smallest. ArgumentError where nothing would be checked.

    >>> def rows(tensor, rank, world):
    ...     size = -(-len(tensor) // world)
    ...     return tensor[rank * size : (rank + 1) * size]
    >>> check_sharding(rows, lambda pieces: [row for piece in pieces for row in piece])
    256
    >>> def floor(tensor, rank, world):
    ...     size = len(tensor) // world
    ...     return tensor[rank * size : (rank + 1) * size]
    >>> check_sharding(floor, lambda pieces: [row for piece in pieces for row in piece])
    Traceback (most recent call last):
    zsim.testing.sharding.check.ShardLawError: elements_are_held_once: expected it to hold, found \
shape 1 over 2 ranks: 1 of 1 elements are in no piece of ranks 0 to 1, as that at \
index 0
    """
    unknown = [name for name in without if name not in LAWS]
    if unknown:
        raise ArgumentError(where="without", expected=listed(LAWS), found=repr(unknown[0]))
    laws = {name: law for name, law in LAWS.items() if name not in without}
    if not laws:
        raise ArgumentError(where="without", expected="a law to be left", found="every law")
    cut = Cut(shard, unshard, reshard, make, gives_shape)
    _require_cases(cut, worlds, shapes, dtypes)
    number = 0
    for number, case in enumerate(_cases(cut, worlds, shapes, dtypes), 1):  # noqa: B007
        _require(replace(cut, dtype=case.dtype), case, laws)
    return number


def _require_cases(
    cut: Cut, worlds: Sequence[int], shapes: Sequence[tuple[int, ...]], dtypes: Sequence[Any] | None
) -> None:
    """ArgumentError unless there are cases, and `make` makes tensors of them."""
    if not _are_sizes(worlds, least=1) or not worlds:
        raise ArgumentError(
            where="worlds", expected="numbers of ranks from 1", found=_found(worlds),
            remedy="as worlds=[1, 4, 7]",
        )
    if not _is_list(shapes) or not shapes or not all(_are_sizes(each, least=0) for each in shapes):
        raise ArgumentError(
            where="shapes", expected="shapes, each of sizes from 0", found=_found(shapes),
            remedy="as shapes=[(5,), (3, 2)]",
        )
    if cut.make is list and not all(shapes):
        raise ArgumentError(
            where="shapes", expected="a dimension in each shape of lists", found="a scalar, ()",
            remedy="make=torch.tensor makes scalars",
        )
    if dtypes is None:
        return
    if not _is_list(dtypes) or not dtypes:
        raise ArgumentError(
            where="dtypes", expected="dtypes", found=_found(dtypes),
            remedy="as dtypes=[torch.float16, torch.float32]",
        )
    most = _most(max(shapes, key=prod))
    for dtype in dtypes:
        if not replace(cut, dtype=dtype).holds(-1, most - 1, most):
            raise ArgumentError(
                where="dtypes", expected=f"dtypes that make= takes and that hold -1 to {most}",
                found=f"{dtype}", remedy="check smaller shapes, or a wider dtype",
            )


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _are_sizes(sizes: Any, *, least: int) -> bool:
    return _is_list(sizes) and all(
        isinstance(size, int) and not isinstance(size, bool) and size >= least for size in sizes
    )


def _found(value: object) -> str:
    return repr(list(value)) if isinstance(value, list | tuple) else described(value)


def _most(shape: tuple[int, ...]) -> int:
    """The largest element of tensors of that shape: laws fill a second one with other numbers."""
    return 2 * prod(shape)


def _cases(
    cut: Cut, worlds: Sequence[int], shapes: Sequence[tuple[int, ...]], dtypes: Sequence[Any] | None
) -> Iterator[ShardCase]:
    chosen = _default_dtypes(cut.make) if dtypes is None else dtypes
    for shape, (index, world) in product(shapes, enumerate(worlds)):
        other = worlds[(index + 1) % len(worlds)]
        for dtype in chosen:
            most = _most(shape)
            if dtype is None or replace(cut, dtype=dtype).holds(-1, most - 1, most):
                yield ShardCase(tuple(shape), world, world + 1 if other == world else other, dtype)


def _default_dtypes(make: Make) -> tuple[Any, ...]:
    """None, which is the choice of `make`, and two floats of a library that is known."""
    for library, names in MAKERS.items():
        module = sys.modules.get(library)
        if module is not None and any(make is getattr(module, name, None) for name in names):
            return (None, module.float32, module.float16)
    return (None,)


def _require(cut: Cut, case: ShardCase, laws: dict[str, Law]) -> None:
    for name, law in laws.items():
        try:
            breach = next(law(cut, case), None)
        except Exception as error:
            error.add_note(f"in the law {name}, {case}")
            if cut.make is list and isinstance(error, AttributeError | TypeError):
                error.add_note(
                    "tensors are nested lists here; make=torch.tensor makes torch's, and "
                    "*zsim.testing.sharding.by_numel(shard) is for a shard(numel, rank, world)"
                )
            raise
        if breach:
            raise ShardLawError(where=name, expected="it to hold", found=f"{case}: {breach}")
