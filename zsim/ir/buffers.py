"""Names of buffers: the one place that knows how they are composed.

A buffer that belongs to a param group, bucket or module is named after its owner and its role
there. Other buffers ("norm.stack", a parameter by its fqn) have plain names.
"""

from __future__ import annotations

_BETWEEN = ":"
"""Between owner and role; no fqn has one."""


class Buffer(str):
    """The name of a buffer: the `role` it has for its `owner`. Being a str, it is its own text.

    >>> shard = Buffer.of("blocks.0", "gradient_shard")
    >>> shard.owner, shard.role
    ('blocks.0', 'gradient_shard')
    >>> print(shard)
    blocks.0:gradient_shard
    >>> Buffer("norm.stack").owner  # a plain name
    ''
    """

    __slots__ = ()

    @classmethod
    def of(cls, owner: str, role: str | int) -> Buffer:
        """The buffer that has `role` for `owner`, the fqn of a group, bucket or module."""
        return cls(f"{owner}{_BETWEEN}{role}")

    @property
    def owner(self) -> str:
        """The fqn of the owner; "" for a plain name."""
        owner, between, _ = self.partition(_BETWEEN)
        return owner if between else ""

    @property
    def role(self) -> str:
        """The role of its data; a plain name whole."""
        return self.rpartition(_BETWEEN)[2]


def start_of(owner: str) -> str:
    """The start of the names of all buffers of `owner`, for hot loops that make or test many."""
    return f"{owner}{_BETWEEN}"
