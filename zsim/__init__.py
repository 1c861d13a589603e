"""zsim: simulate a ZeRO or FSDP training step, run the same step for real, and compare the two.

The public interface is `zsim.__all__`; everything else may change. Importing zsim loads nothing
heavy, and no torch: each name is loaded when it is first used.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from zsim.version import __version__

if TYPE_CHECKING:
    from zsim.analysis.causes.why import Why as Why
    from zsim.analysis.fit.fit_table import Candidate as Candidate
    from zsim.analysis.fit.fit_table import Fit as Fit
    from zsim.analysis.jitter import JitteredSteps as JitteredSteps
    from zsim.analysis.jitter import jitter as jitter
    from zsim.analysis.lint.finding import LintFinding as LintFinding
    from zsim.analysis.lint.rules import lint as lint
    from zsim.analysis.planner.plan import plan_for as plan_for
    from zsim.analysis.planner.table import Plan as Plan
    from zsim.analysis.sweep import Sweep as Sweep
    from zsim.analysis.sweep import sweep as sweep
    from zsim.api import compare as compare
    from zsim.api import fit as fit
    from zsim.api import load_run as load_run
    from zsim.api import run as run
    from zsim.api import simulate as simulate
    from zsim.api import validate as validate
    from zsim.api import why as why
    from zsim.configs.exported import Exported as Exported
    from zsim.configs.front import export_config as export_config
    from zsim.configs.front import import_config as import_config
    from zsim.configs.imported import Imported as Imported
    from zsim.errors import ArgumentError as ArgumentError
    from zsim.errors import BackendUnavailableError as BackendUnavailableError
    from zsim.errors import DeadlockError as DeadlockError
    from zsim.errors import RankError as RankError
    from zsim.errors import ScenarioError as ScenarioError
    from zsim.errors import ZsimError as ZsimError
    from zsim.io.quantities import Bytes as Bytes
    from zsim.io.quantities import Duration as Duration
    from zsim.io.quantities import GiB as GiB
    from zsim.io.quantities import KiB as KiB
    from zsim.io.quantities import MiB as MiB
    from zsim.io.quantities import ms as ms
    from zsim.io.units import UnitError as UnitError
    from zsim.runs.comparison import Comparison as Comparison
    from zsim.runs.run import Run as Run
    from zsim.runs.saved import SavedRunError as SavedRunError
    from zsim.scenario.scenario import Scenario as Scenario
    from zsim.scenario.scenario import load as load

_MODULES = {
    "ArgumentError": "zsim.errors",
    "BackendUnavailableError": "zsim.errors",
    "Bytes": "zsim.io.quantities",
    "Candidate": "zsim.analysis.fit.fit_table",
    "Comparison": "zsim.runs.comparison",
    "DeadlockError": "zsim.errors",
    "Duration": "zsim.io.quantities",
    "Exported": "zsim.configs.exported",
    "Fit": "zsim.analysis.fit.fit_table",
    "GiB": "zsim.io.quantities",
    "Imported": "zsim.configs.imported",
    "JitteredSteps": "zsim.analysis.jitter",
    "KiB": "zsim.io.quantities",
    "LintFinding": "zsim.analysis.lint.finding",
    "MiB": "zsim.io.quantities",
    "Plan": "zsim.analysis.planner.table",
    "RankError": "zsim.errors",
    "Run": "zsim.runs.run",
    "SavedRunError": "zsim.runs.saved",
    "Scenario": "zsim.scenario.scenario",
    "ScenarioError": "zsim.errors",
    "Sweep": "zsim.analysis.sweep",
    "UnitError": "zsim.io.units",
    "Why": "zsim.analysis.causes.why",
    "ZsimError": "zsim.errors",
    "compare": "zsim.api",
    "export_config": "zsim.configs.front",
    "fit": "zsim.api",
    "import_config": "zsim.configs.front",
    "jitter": "zsim.analysis.jitter",
    "lint": "zsim.analysis.lint.rules",
    "load": "zsim.scenario.scenario",
    "load_run": "zsim.api",
    "ms": "zsim.io.quantities",
    "plan_for": "zsim.analysis.planner.plan",
    "run": "zsim.api",
    "simulate": "zsim.api",
    "sweep": "zsim.analysis.sweep",
    "validate": "zsim.api",
    "why": "zsim.api",
}
"""Every public name, and the module that defines it."""

__all__ = ["__version__", *_MODULES]


if not TYPE_CHECKING:  # to a type checker every misspelling would be an object

    def __getattr__(name: str) -> object:
        """A public name, loaded when it is first used (PEP 562)."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_MODULES[name]), name)
        globals()[name] = value
        if name == "Scenario" and "hypothesis" in sys.modules:
            import_module("zsim.testing.hypothesis_plugin").register()
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
