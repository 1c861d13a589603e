"""What holds for every test: property tests have no deadline, since a machine under load is slow
and not wrong."""

from __future__ import annotations

import pytest
from hypothesis import settings

settings.register_profile("zsim", deadline=None)
settings.load_profile("zsim")

COVERED_ELSEWHERE = (
    "_against_torch.py",
    "_traced.py",
    "test_alternatives.py",
    "test_fits.py",
    "test_checkpointing.py",
    "test_clipping.py",
    "test_device_kernels.py",
    "test_event_order.py",
    "test_frozen_against_torch.py",
    "test_hide_communication.py",
    "test_hostile_cells.py",
    "test_run_laws.py",
    "test_matrix.py",
    "test_readme_errors.py",
    "test_real_layouts.py",
    "test_row_widths.py",
    "test_shared_inputs.py",
    "test_sharded_gradient_calls.py",
    "test_together.py",
    "test_traced_accumulation.py",
    "test_traced_answers.py",
)
"""Files that run the same lines for the hundredth time, on other cases: following them there would
take a third of CI's time, and what CI says is covered is covered without them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name.endswith(COVERED_ELSEWHERE):
            item.add_marker("no_cover")
