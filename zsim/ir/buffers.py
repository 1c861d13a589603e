"""Names of buffers: the one file that composes them, and takes them apart.

A Buffer is a str for speed, but mypy takes no other str for one. A test refuses names that are put
together elsewhere. In loops that make thousands, a call of Buffer would double a name's time, so
that four functions return their text as it is.

- "blocks.0:gradient_shard": the role that a buffer has for its owner, a param group, a bucket or a
  module. `owner_of` and `role_of` read it back, as no fqn has a colon.
- "blocks.0.weight.gradient2": a form of a tensor, one of several by its number. An fqn has dots
  too, so that nobody reads the tensor back.
- "norm.stack", a parameter by its fqn: plain names.
"""

from __future__ import annotations

import re
from typing import Final, Literal, NewType

Buffer = NewType("Buffer", str)
"""The name of a buffer, unique among the live ones of a rank; of a literal or a parameter's fqn."""

Form = Literal[
    "gradient", "unsharded_gradient", "accumulated_gradient", "partial_gradient", "new_gradient",
    "cast_gradient", "padded_gradient", "reduce_input", "reduced", "arriving",
    "shard", "unsharded", "resharded", "resharded.again", "all_gather", "cast", "onloaded",
    "whole", "exact", "flat", "chunk", "storage", "padding", "ones", "zeros", "placeholder",
    "again", "next", "alone", "added", "of", "sum", "copy", "sent",
    "temporary", "root", "quotient", "one",
    "grad", "summed", "scratch", "backward_scratch", "turned", "input", "saved",
]
"""Forms that a tensor takes: parts of a parameter, its gradient on the way to the optimizer, copies
for a moment."""

HOST: Final = "host."
"""Start of the names of buffers in host memory, where the device counts them too."""
NOTHING: Final = Buffer("")
"""The name of no buffer, which never lives."""
STEP: Final = "step"
"""State of an optimizer that counts its steps."""

_BETWEEN = ":"
_STATE = re.compile(r"optimizer\.(\d+)\.(\w+)")


def buffer_of(owner: str, role: str | int, number: int | None = None) -> Buffer:
    """The buffer that has `role` for `owner`, the fqn of a group, bucket or module; one of several
    by its number.

    >>> shard = buffer_of("blocks.0", "gradient_shard")
    >>> shard, owner_of(shard), role_of(shard)
    ('blocks.0:gradient_shard', 'blocks.0', 'gradient_shard')
    """
    return Buffer(f"{owner}:{role}" if number is None else f"{owner}:{role}.{number}")


def owner_of(name: str) -> str:
    """The owner in a name of `buffer_of`; "" in another.

    >>> owner_of("norm.stack")
    ''
    """
    owner, between, _ = name.partition(_BETWEEN)
    return owner if between else ""


def role_of(name: str) -> str:
    """The role in a name of `buffer_of`; another name whole."""
    return name.rpartition(_BETWEEN)[2]


def start_of(owner: str) -> str:
    """The start of the names of all buffers of `owner`, for hot loops that make or test many."""
    return f"{owner}{_BETWEEN}"


def form_of(tensor: str, form: Form, number: int | str = "") -> Buffer:
    """A form of `tensor`, a parameter, flat parameter, param group or buffer.

    >>> form_of("blocks.0.weight", "unsharded"), form_of("blocks.0.weight", "gradient", 2)
    ('blocks.0.weight.unsharded', 'blocks.0.weight.gradient2')
    """
    return f"{tensor}.{form}{number}"  # type: ignore[return-value]


def gradient_of(tensor: str, number: int | str = "") -> Buffer:
    """The gradient that is kept of a `tensor`, or one of several that are added up."""
    return f"{tensor}.gradient{number}"  # type: ignore[return-value]


def numbered(name: str, number: int | str) -> Buffer:
    """One of several buffers of a `name`, by its number or by what it is for: "bucket.3"."""
    return Buffer(f"{name}.{number}")


def unsharded_gradient_of(tensor: str) -> Buffer:
    """The gradient of a `tensor` before shards of it are summed over ranks."""
    return f"{tensor}.unsharded_gradient"  # type: ignore[return-value]


def sum_of_losses(loss: str, forwards: int) -> Buffer:
    """The sum of the losses of so many forwards, the last of which is `loss`."""
    return Buffer(loss) if forwards == 1 else buffer_of("loss", f"sum{forwards}")


def is_sum_of_gradients(buffer: Buffer) -> bool:
    """True for the sum of two gradients of one value, read by several operators."""
    return ".summed" in buffer


def traced_of(module: str, number: int, operator: str) -> Buffer:
    """The output of an `operator`, the one with this number in a traced module."""
    return buffer_of(module, f"{number}.{operator}")


def bucket_of(number: int) -> Buffer:
    """The bucket of gradients with this number, which is a unit of ops too."""
    return Buffer(f"bucket.{number}")


def bucket_number(unit: str) -> int | None:
    """The number in a name of `bucket_of`; None for another unit.

    >>> bucket_number(bucket_of(3)), bucket_number("blocks.3")
    (3, None)
    """
    name, _, number = unit.partition(".")
    return int(number) if name == "bucket" and number else None


def gather_of(number: int) -> Buffer:
    """The all-gather with this number, a unit of ops."""
    return Buffer(f"gather.{number}")


def norm_part(*part: int | str) -> Buffer:
    """A part of the gradients' norm: the norm of one of them by its number, or a result.

    >>> norm_part(3), norm_part("group", 0)
    ('norm.3', 'norm.group.0')
    """
    return Buffer(".".join(map(str, ("norm", *part))))


def infinities_part(*part: str) -> Buffer:
    """A part of the search of gradients for infinities."""
    return Buffer(".".join(("infinities", *part)))


def workspace_of(thread: str) -> Buffer:
    """The workspace of cuBLAS that a `thread` of the host keeps."""
    return Buffer(f"cuBLAS workspace, {thread} thread")


def on_host(name: str, *, moved: bool = True) -> Buffer:
    """The buffer of this name in host memory; where it is not `moved` there, the device's."""
    return Buffer(f"{HOST}{name}" if moved else name)


def is_on_host(buffer: Buffer) -> bool:
    """True for a buffer in host memory, by its name."""
    return buffer.startswith(HOST)


def state_of(owner: str, number: int, state: str, part: str = "") -> Buffer:
    """A `state` that an optimizer, the `owner`, has of the parameter with this number; of a
    quantized state a part.

    >>> state_of("optimizer", 3, "exp_avg"), state_of("optimizer", 3, "exp_avg", "scale")
    ('optimizer.3.exp_avg', 'optimizer.3.exp_avg.scale')
    """
    end = f".{part}" if part else ""
    return f"{owner}.{number}.{state}{end}"  # type: ignore[return-value]


def parameter_and_state(buffer: Buffer) -> tuple[int, str] | None:
    """The number and the state in a name of `state_of`, whose owner is all of the optimizer."""
    match = _STATE.match(buffer)
    return (int(match[1]), match[2]) if match else None


def is_state(buffer: Buffer, *states: str) -> bool:
    """True for one of these `states` of an optimizer."""
    return buffer.rpartition(".")[2] in states
