"""Equality of a value on all ranks, bit for bit: its parts with a digest each, and the report.

Ranks exchange digests and texts, and never objects.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from zreal import torch_private
from zreal.testing.names import named
from zsim.errors import ArgumentError

MOST_CHARS = 300
"""Longest text of a part in a report, in characters."""
MOST_SHOWN = 16
"""Largest tensor that a report shows whole, in elements."""


class Part(NamedTuple):
    """A part of a value that is compared as a whole: its path in the value, and its text."""

    path: str
    digest: str
    text: str


def parts(value: Any, path: str = "value") -> Iterator[tuple[str, Any]]:
    """Path and value of each part: tensors, numbers, texts, in lists, dicts, sets, dataclasses."""
    if isinstance(value, Mapping):
        yield f"{path}.keys()", sorted(map(repr, value))
        for key in sorted(value, key=repr):
            yield from parts(value[key], f"{path}[{key!r}]")
    elif isinstance(value, set | frozenset):
        yield path, sorted(map(repr, value))
    elif isinstance(value, list | tuple):
        yield f"len({path})", len(value)
        for index, item in enumerate(value):
            yield from parts(item, f"{path}[{index}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from parts(getattr(value, field.name), f"{path}.{field.name}")
    else:
        yield path, value


def digested(path: str, value: Any) -> Part:
    """A part with its digest; ArgumentError for a DTensor, and for what has no bytes."""
    if not isinstance(value, torch.Tensor):
        return Part(path, _digest(_bytes(value, path)), _cut(repr(value)))
    if torch_private.is_dtensor_type(type(value)):
        raise ArgumentError(
            where=f"assert_all_equal: {path}", expected="a tensor that each rank holds whole",
            found="a DTensor", remedy="compare its full_tensor(), or its to_local()",
        )
    form = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    shown = f" {value.detach().cpu().tolist()}" if value.numel() <= MOST_SHOWN else ""
    return Part(path, _digest(form.encode() + tensor_bytes(value)), _cut(form + shown))


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor on any device, row by row."""
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def _bytes(value: Any, path: str) -> bytes:
    kind = f"{type(value).__name__} ".encode()
    if isinstance(value, bool | int | float | complex | str | bytes | None | torch.dtype):
        return kind + repr(value).encode()
    try:
        return kind + pickle.dumps(value)
    except Exception as error:
        raise ArgumentError(
            where=f"assert_all_equal: {path}", expected="something that pickle can write",
            found=f"{type(value).__name__} ({error})",
            remedy="compare tensors, numbers, texts, or lists and dicts of them",
        ) from error


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _cut(text: str) -> str:
    return text if len(text) <= MOST_CHARS else f"{text[:MOST_CHARS]}…"


Forms = Sequence[tuple[Part, Sequence[int]]]
"""Forms of a part, with the ranks that hold each, the majority first."""


def differing_part(of_ranks: Sequence[Sequence[Part]]) -> Forms:
    """The first part that differs, in its forms; none where all are equal."""
    for number in range(max(map(len, of_ranks))):
        forms: dict[tuple[str, str], tuple[Part, list[int]]] = {}
        for rank, own in enumerate(of_ranks):
            part = own[number] if number < len(own) else Part(own[-1].path, "", "nothing more")
            forms.setdefault((part.path, part.digest), (part, []))[1].append(rank)
        if len(forms) > 1:
            return sorted(forms.values(), key=lambda form: (-len(form[1]), form[1]))
    return ()


def report(forms: Forms) -> str:
    """The ranks by what they hold; a minority is called so."""
    (part, most), *others = forms
    minority = "  <- the minority" if len(others[0][1]) < len(most) else ""
    lines = [f"  {named(most)}: {part.text}"]
    lines += [f"  {named(ranks)}: {other.text}{minority}" for other, ranks in others]
    return "\n".join([f"{part.path} differs between ranks", *lines])


def differing_element(data: Sequence[bytes], *, like: torch.Tensor) -> tuple[str, ...]:
    """Index and both values, as texts, of the first element that differs in the bytes of two
    tensors `like` this one."""
    left, right = data
    width = like.element_size()
    starts = range(0, len(left), width)
    start = next(at for at in starts if left[at : at + width] != right[at : at + width])
    index = torch.unravel_index(torch.tensor(start // width), like.shape)
    values = [
        torch.frombuffer(bytearray(each[start : start + width]), dtype=like.dtype)[0].item()
        for each in data
    ]
    return str([int(each) for each in index]), *map(repr, values)
