"""Dataclasses of which each compiles no more than its `__init__`.

`dataclasses.dataclass` writes and compiles comparison, hash, repr and two guards of a frozen class
for each. That takes 0.37 ms a class, and every command makes 150 when it starts. Here all classes
share these methods, which leaves 0.13 ms.

To type checkers it is `dataclasses.dataclass`. They keep fields of a frozen class from being
assigned; at run time nothing does, and such a class is made three times as fast. What users are
given is frozen there too, and made by `dataclasses` itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:
    import dataclasses
    from operator import attrgetter
    from reprlib import recursive_repr

    def dataclass(cls=None, /, *, eq=True, repr=True, frozen=False, unsafe_hash=False, **options):
        """The decorator, with the arguments of `dataclasses.dataclass`; ordered classes are not
        made."""

        def made(cls):
            own = vars(cls)
            cls = dataclasses.dataclass(eq=False, repr=False, **options)(cls)
            if repr and "__repr__" not in own:
                cls.__repr__ = _repr
            if eq:
                _compared(cls, own, hashed=frozen or unsafe_hash)
            if frozen and options.get("slots"):
                cls.__getstate__, cls.__setstate__ = _state, _set_state
            return cls

        return made if cls is None else made(cls)

    def _compared(cls, own, *, hashed):
        compared = [field for field in dataclasses.fields(cls) if field.compare]
        if "__eq__" not in own:
            values = _values(compared)

            def equal(self, other):
                if other.__class__ is not self.__class__:
                    return NotImplemented
                return values(self) == values(other)

            cls.__eq__ = equal
        if own.get("__hash__") is not None:
            return
        if not hashed:
            cls.__hash__ = None
            return
        parts = _values([field for field in compared if field.hash is not False])
        cls.__hash__ = lambda self: hash(parts(self))

    def _values(of):
        """The function from an object to the tuple of its fields `of`."""
        names = [field.name for field in of]
        if len(names) > 1:
            return attrgetter(*names)
        return (lambda self: (getattr(self, names[0]),)) if names else lambda self: ()

    @recursive_repr()
    def _repr(self):
        shown = ", ".join(
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self) if field.repr
        )
        return f"{self.__class__.__qualname__}({shown})"

    def _state(self):
        """The values of all fields, which every protocol of pickle takes."""
        return [getattr(self, field.name) for field in dataclasses.fields(self)]

    def _set_state(self, values):
        for field, value in zip(dataclasses.fields(self), values, strict=True):
            setattr(self, field.name, value)
