"""Comparison, as `import zsim` returns it: the checks of a predicted against a measured record."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from zsim.errors import ArgumentError, listed
from zsim.io.arguments import described
from zsim.io.notebook.html_table import html_table
from zsim.io.units import counted
from zsim.ir.run import SCHEMA_VERSION, RunRecord, both_simulated
from zsim.models.torch_versions import SUPPORTED
from zsim.runs.compare.agreement import Agreement
from zsim.runs.compare.aspects import ASPECTS, Aspect
from zsim.runs.compare.check import Check


@dataclass(frozen=True, kw_only=True, repr=False)
class Comparison:
    """The checks of a predicted against a measured record, the most rigorous first."""

    checks: tuple[Check, ...]
    predicted: RunRecord = field(hash=False)
    measured: RunRecord = field(hash=False)
    replaced: str = ""
    """The cluster that the real backend replaced by its own devices, as a sentence; "" for none."""
    required: tuple[Aspect, ...] = ()
    """Aspects that must have been checked, else the comparison is not ok."""

    @property
    def agreement(self) -> Agreement:
        """The verdict: in what the two agree, what was not checked and why."""
        return Agreement(self.checks, self.required)

    @property
    def ok(self) -> bool:
        """True where no check failed, some check was made, and all that are required were."""
        return self.agreement.ok

    @property
    def agrees(self) -> bool:
        """True where order, bytes, memory and time were all checked and no check failed."""
        return self.agreement.whole

    def to_dict(self) -> dict[str, Any]:
        """The object that `zsim validate --json` and `zsim compare --json` print; its keys are
        stable."""
        return {
            "schema_version": SCHEMA_VERSION, "scenario": self.measured.scenario,
            "predicted_backend": self.predicted.backend, "measured_backend": self.measured.backend,
            "interpreter": self.measured.interpreter, "world_size": self.measured.world_size,
            "replaced": self.replaced,
            "checks": [
                {key: _finite(value) for key, value in asdict(check).items()}
                for check in self.checks
            ],
            "ok": self.ok, "agrees": self.agrees, "checked": list(self.agreement.checked),
            "not_checked": self.agreement.unchecked,
            "provenance": {
                "predicted": dict(self.predicted.provenance),
                "measured": dict(self.measured.provenance),
            },
        }

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    @property
    def of_two_scenarios(self) -> bool:
        """True of whole simulations of two scenarios, which no check holds to each other."""
        sides = (self.predicted, self.measured)
        return both_simulated(*sides) and all(run.complete for run in sides) and [
            check.name for check in self.checks
        ] == ["same experiment"]

    def _sides(self, real: str) -> str:
        """The names of both sides; of two simulations those of their scenarios and strategies."""
        if not both_simulated(self.predicted, self.measured):
            return f"{self.measured.scenario}: {self.predicted.backend} against {real}"
        first, second = (
            f"{run.scenario} ({run.provenance.get('strategy', 'unknown strategy')})"
            for run in (self.predicted, self.measured)
        )
        return f"{first} against {second}, both simulated"

    def _ranks(self) -> str:
        sizes = dict.fromkeys((self.predicted.world_size, self.measured.world_size))
        ranks = counted(self.measured.world_size, "rank")
        return ranks if len(sizes) == 1 else f"{self.predicted.world_size:,} and {ranks}"

    def __str__(self) -> str:
        """The report of `zsim validate`: a line for each check, and the verdict."""
        real = f"{self.measured.backend} ({self.measured.interpreter})"
        lines = [f"{self._sides(real)}, {self._ranks()}"]
        lines += [f"  {self.replaced}"] if self.replaced else []
        torch = self.measured.provenance.get("torch", "")
        if torch and not f"{torch}.".startswith(tuple(f"{version}." for version in SUPPORTED)):
            lines += [f"  measured with torch {torch}; predicted for {', '.join(SUPPORTED)}"]
        for check in self.checks:
            first, *rest = check.detail.splitlines() or [""]
            status = "FAILED " if check.status == "failed" else ""
            lines += [f"  {check.name:26} {status}{first}", *(f"      {line}" for line in rest)]
        return "\n".join([*lines, f"  {self.agreement}"])

    def _repr_html_(self) -> str:
        """The checks as a table, for notebooks."""
        return html_table(
            f"{self.measured.scenario}: {self.predicted.backend} against {self.measured.backend}",
            ("check", "status", "found"),
            [(check.name, check.status, check.detail) for check in self.checks],
            note=str(self.agreement),
        )

    def __repr__(self) -> str:
        counts = {
            status: sum(check.status == status for check in self.checks)
            for status in ("ok", "failed", "unsupported")
        }
        texts = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        return (
            f"<Comparison of {self.measured.scenario}: {self.predicted.backend} against "
            f"{self.measured.backend} {self.agreement}; {texts}>"
        )


def compare_records(
    predicted: RunRecord, measured: RunRecord, *, replaced: str = "",
    required: tuple[Aspect, ...] = (),
) -> Comparison:
    """The checks of `measured` against `predicted`; `replaced` and `required` as Comparison has
    them."""
    from zsim.runs.compare import compare as comparing  # start-up: most commands compare nothing

    if unknown := [name for name in required if name not in ASPECTS]:
        raise ArgumentError(
            where="require", expected=f"some of {listed(ASPECTS, 'and')} in a tuple",
            found=described(unknown[0]), remedy='as require=("time",)',
        )
    return Comparison(
        checks=comparing.compare(predicted, measured), predicted=predicted, measured=measured,
        replaced=replaced, required=required,
    )


def _finite(value: Any) -> Any:
    """`value`, or the text of a number that JSON has not, such as infinity."""
    return str(value) if isinstance(value, float) and value - value != 0 else value
