"""One finding of a comparison: what was compared, whether it agrees, and in what words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "failed", "unsupported"]
Number = int | float
_UNSUPPORTED = "unsupported: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One finding. `predicted` and `measured` are figures where it has some; `detail` says how it
    was compared."""

    name: str
    status: Status
    predicted: Number | None = None
    measured: Number | None = None
    relative_error: float | None = None
    detail: str = ""
    band_ns: tuple[int, int] | None = None
    """The times between which the measured one was to lie."""

    @property
    def reason(self) -> str:
        """The reason for which it could not be made; "" for one that was."""
        return self.detail.removeprefix(_UNSUPPORTED) if self.status == "unsupported" else ""


def unsupported(
    name: str, reason: str, *, predicted: Number | None = None, measured: Number | None = None
) -> Check:
    """The check that could not be made, for that reason."""
    return Check(
        name=name, status="unsupported", detail=f"{_UNSUPPORTED}{reason}", predicted=predicted,
        measured=measured,
    )
