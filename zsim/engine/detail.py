"""Details in which collectives are simulated."""

from __future__ import annotations

from typing import Literal, get_args

Detail = Literal["flows", "steps"]
"""Flows, which share links, or on rings each step of a chunk."""
DETAILS: tuple[Detail, ...] = get_args(Detail)
