"""The fixture `exact`: a user's module under a strategy, predicted and measured alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.zreal.tracing.user_steps import Exact, differences


@pytest.fixture
def exact(tmp_path: Path) -> Exact:
    """The assertion, on four ranks under hsdp and else on two."""

    def check(
        make: Callable[[], nn.Module], data: Callable[[], Any], strategy: str, **more: Any
    ) -> None:
        ranks = {"ranks": 4 if "hsdp" in strategy else 2}
        assert differences(make, data, strategy, tmp_path, **ranks | more) == {}

    return check
