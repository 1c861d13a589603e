"""What dates the software that a row ran on, and with it whether recomputation stopped early.

Non-reentrant checkpointing stops recomputing a block once all that backward needs is there, since
torch 2.1 of October 2023. Dates of publication are no more than the latest that a row can be of: a
README of 2024 still has the sweep of 2023.
"""

from __future__ import annotations

import re

from zsim.calibration.rows.checks import Assumed
from zsim.calibration.rows.records import Record

FIRST = (2, 1)
"""The torch that stops early."""
BEFORE, SINCE = "2023-10", "2024-01"
"""Months: what ran before the first had an older torch, and what ran since the second a newer one.
"""
REVISIONS = {"c6cfb4284": "2023-07", "5e85bd62d": "2024-01"}
"""Of llm-foundry's README, and when they are of."""
EARLY_STOP = 0.07
"""How much longer a step is where recomputation does not stop early: by this simulator 1 to 8 % of
llm-foundry's steps, most 5 to 7.5."""
FUSED_NORMS = (2, 9)
"""The torch that has one kernel for an RMSNorm."""
VERSIONS = ("torch_version", "pytorch_version", "torch", "pytorch")
_MONTH = re.compile(r"\b(20\d\d)[-/.](\d\d)\b")


def stops_early(record: Record, model: str, assumed: Assumed) -> bool:
    """By the best that the row has: its torch, a date in its words, the latest that it can be of,
    its GPU; named as assumed.

    Where only the GPU `model` says it, or that and a date contradict each other, the band is wider
    by what it makes.
    """
    old_gpu = model == "A100"
    for name in VERSIONS:
        version = re.match(r"v?(\d+)\.(\d+)", record.text(name, ""))
        if version:
            return _said(
                assumed, (int(version[1]), int(version[2])) >= FIRST, by=f"{name} {version[0]}",
                surely=True,
            )
    ran, latest = _months(record.text("attn_impl", "")), _latest(record)
    for month, exact in ((min(ran, default=""), True), (latest, False)):
        if month and month < BEFORE:
            return _said(assumed, False, by=f"the date {month}", surely=old_gpu)
        if month and exact and month >= SINCE:
            return _said(assumed, True, by=f"the date {month}", surely=not old_gpu)
    if latest > SINCE:
        return _said(assumed, True, by=f"the date {latest}", surely=not old_gpu)
    return _said(
        assumed, not old_gpu, by=f"the GPU{f' and the date {latest}' if latest else ''}",
        surely=bool(latest) and not old_gpu,
    )


def version(record: Record) -> dict[str, str]:
    """The row's torch as a field that tells rows apart, "" where it names none."""
    return {
        "torch_version": next((words for name in VERSIONS if (words := record.text(name, ""))), "")
    }


def norms(record: Record, assumed: Assumed) -> dict[str, str]:
    """How a trainer's RMSNorms run that are torch's own or written in single calls: those, unless
    the row says a torch that fuses them."""
    for name in VERSIONS:
        version = re.match(r"v?(\d+)\.(\d+)", record.text(name, ""))
        if version and (int(version[1]), int(version[2])) >= FUSED_NORMS:
            return {}
    assumed.add("RMSNorms of single calls, where they are not compiled")
    return {"norms": "composite"}


def _said(assumed: Assumed, early: bool, *, by: str, surely: bool) -> bool:
    assumed.add(
        f"recomputation {'stops early' if early else 'does not stop early'}, by {by}",
        widens=0.0 if surely else EARLY_STOP,
    )
    return early


def _months(text: str) -> list[str]:
    return [f"{year}-{month}" for year, month in _MONTH.findall(text)]


def _latest(record: Record) -> str:
    """The earliest of the months that the row cannot be later than, "" where none is said."""
    known = [*_months(record.text("measured_by", "")), *_months(record.text("date", ""))]
    known += [
        month
        for revision, month in REVISIONS.items()
        if record.text("readme_revision", "").startswith(revision[:7])
    ]
    return min(known, default="")
