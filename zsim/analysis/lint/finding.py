"""Findings of the lint: what is wrong, what it costs here, and how to mend it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from zsim.analysis.lint.case import LintCase
from zsim.io.units import format_bytes, format_time


@dataclass(frozen=True, slots=True, kw_only=True)
class LintFinding:
    """One finding: the facts with their figures, and the remedy.

    `cost_ns` and `cost_bytes`: nanoseconds of the step and bytes of the peak that the remedy saves,
    by simulation of both. Negative where it costs them, None where there is no other scenario to
    simulate. `gathered_bytes`: bytes that are gathered a step, or at once, for nothing.
    """

    fact: str
    remedy: str
    cost_ns: int | None = None
    cost_bytes: int | None = None
    gathered_bytes: int | None = None
    rule: str = ""
    why: str = ""

    @property
    def cost(self) -> str:
        """The costs as text, and what the remedy costs instead; "" where none was simulated."""
        differences = [
            f"{'costs' if value > 0 else 'saves'} {shown(abs(value))} {of}"
            for value, shown, of in (
                (self.cost_ns, format_time, "a step"),
                (self.cost_bytes, format_bytes, "at the peak"),
            )
            if value
        ]
        gathered = self.gathered_bytes
        return ", ".join(
            [*differences, *([f"gathers {format_bytes(gathered)}"] if gathered else [])]
        )

    def to_dict(self) -> dict[str, Any]:
        """The finding as `zsim lint --json` prints it."""
        return asdict(self) | {"cost": self.cost}

    def __str__(self) -> str:
        cost = f" ({self.cost})" if self.cost else ""
        return f"{self.rule}: {self.fact}{cost}; {self.remedy}"


def compared(case: LintCase, mended: LintCase, *, fact: str, remedy: str) -> LintFinding:
    """The finding whose costs are the differences of `case` and `mended`."""
    return LintFinding(
        fact=fact, remedy=remedy, cost_ns=case.step_ns - mended.step_ns,
        cost_bytes=case.peak_bytes - mended.peak_bytes,
    )
