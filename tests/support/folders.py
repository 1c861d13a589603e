"""Folders of the checkout that tests read."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
SCENARIOS = ROOT / "scenarios"
PARITY = SCENARIOS / "parity"
PUBLISHED = ROOT / "tests" / "published"
GOLDEN = ROOT / "tests" / "golden"
MEASURED = ROOT / "tests" / "measured"
