"""Goals of a plan."""

from __future__ import annotations

from typing import Literal, get_args

Goal = Literal["fastest", "cheapest", "smallest"]
"""Least time, GPU hours, or GPUs."""
GOALS: tuple[Goal, ...] = get_args(Goal)
