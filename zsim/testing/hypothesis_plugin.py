"""Registration with hypothesis: `st.from_type(zsim.Scenario)` draws scenarios.

hypothesis loads this module when it is imported, whether or not its tests use zsim. So nothing else
is loaded before a scenario is drawn.
"""

from __future__ import annotations

import sys
from typing import Any


def register() -> None:
    """Tell hypothesis of the type, once zsim and hypothesis are both there; `zsim.Scenario` calls
    it again where hypothesis came first."""
    scenarios = sys.modules.get("zsim.scenario.scenario")
    if scenarios is not None:
        from hypothesis.strategies import register_type_strategy

        register_type_strategy(scenarios.Scenario, _drawn)


def _drawn(_: type) -> Any:
    from zsim.testing.strategies import scenarios

    return scenarios()
