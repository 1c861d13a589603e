"""The line that says why a rank failed: the first, and NCCL's own reason further down."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from zreal.processes.reports.error_line import error_line


@pytest.mark.parametrize(("text", "line"), [
    ("a shape\ndiffers", "a shape"), ("", ""), ("NCCL error\nLast error:", "NCCL error"),
    ("NCCL error in: a.cpp:93\nncclInvalidUsage: …\nLast error:\nDuplicate GPU detected\n",
     "NCCL error in: a.cpp:93: Duplicate GPU detected"),
])
def test_nccls_own_reason_is_told(text, line):
    assert error_line(text) == line
