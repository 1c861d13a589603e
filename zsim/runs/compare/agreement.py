"""The agreement of a predicted and a measured Run: in which aspects it was checked, and what
follows.

A Run agrees only where its order, bytes, memory and time were all checked. What was not checked is
named with its reason and never counts as agreement.
"""

from __future__ import annotations

from dataclasses import dataclass

from zsim.errors import listed
from zsim.io.units import format_time
from zsim.runs.compare.aspects import ASPECTS, Aspect
from zsim.runs.compare.check import Check

DECIDES: dict[Aspect, str] = {
    "order": "collective order", "bytes": "bytes", "memory": "peak memory, steady",
    "numerics": "numerics", "time": "step time",
}
"""The check without which an aspect counts as not checked."""
OPTIONAL: tuple[Aspect, ...] = ("numerics",)
"""Aspects that full agreement does not need: only real ranks have numerics."""
FAULTS = "faults"
"""The check that is made where a Run had faults; nothing then agrees."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """The verdict on `checks`; `required` are aspects that must have been checked."""

    checks: tuple[Check, ...]
    required: tuple[Aspect, ...] = ()

    @property
    def failed(self) -> tuple[str, ...]:
        """The names of the checks that failed."""
        return tuple(dict.fromkeys(item.name for item in self.checks if item.status == "failed"))

    @property
    def checked(self) -> tuple[Aspect, ...]:
        """The aspects that were checked, whatever came out."""
        made = {item.name for item in self.checks if item.status != "unsupported"}
        return tuple(aspect for aspect in ASPECTS if DECIDES[aspect] in made)

    @property
    def unchecked(self) -> dict[Aspect, str]:
        """The reason for each aspect that was not checked."""
        reasons = {item.name: item.reason for item in self.checks}
        return {
            aspect: reasons.get(DECIDES[aspect], "no such check was made")
            for aspect in ASPECTS
            if aspect not in self.checked
        }

    @property
    def missing(self) -> tuple[Aspect, ...]:
        """The aspects that are required and were not checked."""
        return tuple(aspect for aspect in self.unchecked if aspect in self.required)

    @property
    def ok(self) -> bool:
        """True where no check failed, some check was made, and none that is required is missing."""
        return not self.failed and bool(self.checked) and not self.missing

    @property
    def with_faults(self) -> bool:
        """True where a Run had faults, whatever was checked."""
        return any(item.name == FAULTS for item in self.checks)

    @property
    def whole(self) -> bool:
        """True where order, bytes, memory and time were all checked, no check failed, and no Run
        had faults."""
        return self.ok and not self.with_faults and not set(self.unchecked) - set(OPTIONAL)

    def __str__(self) -> str:
        """The last line of a report: `agrees in order, bytes and memory; time not checked: …`.

        A time within a band is told with its ends: a wide one says little.
        """
        if self.failed:
            return f"DIFFERS: {listed(self.failed, 'and')}"
        if not self.checked:
            return "NOTHING was checked"
        alike = "WITH FAULTS, alike" if self.with_faults else "agrees"
        parts = [f"{alike} in {listed(map(self._in_words, self.checked), 'and')}"]
        parts += [
            f"{aspect} not checked: {reason.splitlines()[0].partition(';')[0]}"
            for aspect, reason in self.unchecked.items()
            if aspect not in OPTIONAL or aspect in self.required
        ]
        if self.missing:
            parts.append(f"FAILED: --require {','.join(self.missing)}")
        return "; ".join(parts)

    def _in_words(self, aspect: Aspect) -> str:
        bands = [item.band_ns for item in self.checks if item.name == DECIDES[aspect]]
        band = next(filter(None, bands), None)
        return f"{aspect} (within {' to '.join(map(format_time, band))})" if band else aspect
