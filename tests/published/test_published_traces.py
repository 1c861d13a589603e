"""The traced models of this folder are what their modules give today. Needs torch."""

from __future__ import annotations

import pytest

from tests.published.traces import FEW, FILES, trace, whole

pytest.importorskip("torch")


@pytest.mark.parametrize("name", FILES)
def test_the_file_is_what_tracing_its_module_gives(name: str) -> None:
    assert whole(name, num_layers=FEW) == trace(name, num_layers=FEW)


def test_more_layers_are_what_tracing_as_many_gives() -> None:
    """The file whose first two layers differ; all three files were compared so at 7 layers."""
    assert whole("nanotron-micro-batch-2", num_layers=7) == trace(
        "nanotron-micro-batch-2", num_layers=7
    )
