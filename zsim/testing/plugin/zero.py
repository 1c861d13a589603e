"""Zero, the fixture `zero`: the scenario of a test, run on the backend that the test's id names."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

import pytest

from zsim import api
from zsim.calibration.machine import choice
from zsim.errors import ArgumentError, BackendUnavailableError, ZsimError
from zsim.io.arguments import path_of
from zsim.ir.program import Program
from zsim.ir.run import IncompleteRunError, RunRecord, UnendedRunError
from zsim.models.training_options import Device
from zsim.runs.backend import RunOptions
from zsim.runs.compare.aspects import Aspect
from zsim.runs.comparison import Comparison
from zsim.runs.run import Run
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario, load
from zsim.testing import goldens
from zsim.testing.case import SIM, BackendCase, Source, scaled
from zsim.testing.laws import check_laws
from zsim.testing.plugin import artifacts
from zsim.testing.plugin.names_of_tests import file_name
from zsim.testing.plugin.settings import SessionOptions
from zsim.testing.regression import EDITED, INCOMPLETE

__tracebackhide__ = True  # reports of pytest end at the user's own line


class MisuseError(ArgumentError):
    """A test that asks the fixture for what it cannot give."""


@dataclass(kw_only=True)
class Zero:
    """The fixture `zero`: `run` gives a Run on the test's backend, whichever that is."""

    case: BackendCase
    item: pytest.Item = field(repr=False)
    settings: SessionOptions = field(repr=False)
    _golden: set[Path] = field(default_factory=set, repr=False)

    @property
    def backend(self) -> str:
        """The backend that the test's id names."""
        return self.case.backend

    @property
    def scenario(self) -> Scenario:
        """The scenario of the marker, with the ranks of the test's id and the seed of --zero-seed.
        """
        return self.chosen(None)

    def chosen(self, source: Source | None) -> Scenario:
        """`source`, or the marker's scenario, with the test's ranks and seed.

        A relative path is looked for beside the test's file, and then below pytest's rootdir.
        """
        source = self.case.source if source is None else source
        if source is None:
            raise MisuseError(
                where=self.item.nodeid, expected="a scenario", found="none",
                remedy="zero.run(scenario), or @pytest.mark.zero(scenario=…)",
            )
        scenario = source if isinstance(source, Scenario) else load(self._file(source))
        if self.case.world_size is not None:
            scenario = scaled(scenario, self.case.world_size)
        seed = self.settings.seed
        return scenario if seed is None else scenario.with_(seed=seed)

    def _file(self, source: str | PathLike[str]) -> Path:
        path = path_of(source, where="scenario", expected="a Scenario or the path of one")
        beside = self.item.path.parent / path
        return beside if beside.is_file() else self.item.config.rootpath / path

    def run(
        self, scenario: Source | None = None, *, module: str | None = None,
        all_ranks: bool = False,
    ) -> Run:
        """The scenario's Run on the test's backend; the marker's scenario by default.

        `module`: your own, as "mypackage.mymodel:build". The test is skipped where the backend is
        not available. It fails where the Run is worse than a saved one, or breaks a law of
        `zsim.testing.laws`. RankError where a rank fails.
        """
        chosen, worse = self.chosen(scenario), ""
        try:
            with without_torch_warnings():
                run = api.run(
                    chosen, backend=self.backend, all_ranks=all_ranks, module=module,
                    timeout_s=self.settings.timeout_s,
                )
            self._note(run)
            check_laws(run, simulating=False)
            worse = self._worse(run)
        except BackendUnavailableError as error:
            self.settings.lacks(str(error))
        except ZsimError as error:
            self._keep_rest(error)
            raise error.with_traceback(None) from None  # the error's text says all of it
        if worse:
            pytest.fail(worse, pytrace=False)
        return run

    def _keep_rest(self, error: ZsimError) -> None:
        """Save what the ranks had ended when one of them failed, and note the error's details."""
        if error.details:
            error.add_note(error.details)
        folder = self.settings.artifacts
        if folder is None or not isinstance(error, IncompleteRunError | UnendedRunError):
            return
        if any(rank.phases for rank in error.run.ranks):
            artifacts.keep(self.item, error.run, folder=folder, ending=INCOMPLETE)

    def _note(self, run: Run) -> None:
        """Properties for JUnit's report, and the artifacts."""
        self.item.user_properties += properties(run).items()
        if self.settings.artifacts:
            artifacts.keep(self.item, run.record, folder=self.settings.artifacts)

    def _worse(self, run: Run) -> str:
        """The figures that are worse than in a saved Run, or "".

        Properties of the test tell the session's summary what was compared.
        """
        baselines = self.settings.baselines
        if baselines is None:
            return ""
        held = baselines.held(run)
        if held is None:
            self.item.user_properties.append(("zero_not_compared", run.record.scenario))
            return ""
        text = f"{run.record.scenario} on {run.backend}: {held}"
        if not held.growths:
            self.item.user_properties.append(("zero_not_measured", text))
            return ""
        self.item.user_properties.append(("zero_compared", text))
        edited = f": {EDITED}" if held.edited else ""
        lines = [f"{run.record.scenario} is worse than {held.path}{edited}", *map(str, held.over)]
        return "\n  ".join(lines) if held.over else ""

    def program(self, scenario: Source | None = None) -> Program:
        """The scenario's Program, for the devices of the test's backend: ops in order, as data."""
        chosen = self.chosen(scenario)
        device: Device = chosen.cluster.kind
        if self.backend != SIM:
            _, capabilities = api.open_backend(self.backend, RunOptions())
            device = "cuda" if capabilities.device == "cuda" else "cpu"
        return plan(chosen, device=device)

    def compare(
        self, subject: Source | Run | None = None, *, require: tuple[Aspect, ...] = ()
    ) -> Comparison:
        """The Run of the test's backend against its simulation; the test fails where they differ.

        `subject` is a scenario, or a Run of `zero.run`. `require`: aspects such as "time" that must
        have been checked.
        """
        if self.backend == SIM:
            self.settings.lacks(
                "compare: nothing to compare on sim, which predicts; ask for a real backend, as "
                "--zero-backend=gloo or backend= of the marker"
            )
        run = subject if isinstance(subject, Run) else self.run(subject)
        comparison = predicted_against(run.scenario, run.record, require=require)
        if not comparison.ok:
            pytest.fail(str(comparison), pytrace=False)
        return comparison

    def golden(self, value: Run | Program | str, *, name: str = "") -> None:
        """Hold a Run, a Program or a text to the golden file of this test, which lies beside it.

        A second one in a test needs a `name`. --zero-update-golden writes the files.
        """
        own = self.item.nodeid.partition("::")[2].replace("::", ".")
        stem = file_name(f"{own}.{name}" if name else own)
        path = self.item.path.parent / "golden" / self.item.path.stem / f"{stem}.txt"
        if path in self._golden:
            raise MisuseError(
                where="golden", expected="a name for each golden file of a test",
                found=f"{name or 'none'} twice", remedy='zero.golden(run, name="second")',
            )
        self._golden.add(path)
        text = goldens.golden_text(value)
        if difference := goldens.difference(path, text, update=self.settings.update_golden):
            pytest.fail(difference, pytrace=False)


def opened(item: pytest.Item, case: BackendCase | None, settings: SessionOptions) -> Zero:
    """The fixture of a test; without a case it is on the session's first backend.

    The test is skipped, or fails, where that backend is not available.
    """
    case = case or BackendCase(backend=settings.backends[0])
    try:
        with without_torch_warnings():
            api.open_backend(case.backend, RunOptions())
    except BackendUnavailableError as error:
        settings.lacks(str(error))
    return Zero(case=case, item=item, settings=settings)


@contextmanager
def without_torch_warnings() -> Iterator[None]:
    """Context manager in which torch's warnings about its own code, at its import, are no test's.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="torch")
        yield


def predicted_against(
    scenario: Scenario, measured: RunRecord, *, require: tuple[Aspect, ...] = ()
) -> Comparison:
    """A real Run against its scenario, simulated for the same devices."""
    _, capabilities = api.open_backend(measured.backend, RunOptions())
    machine = choice.find_machine(capabilities, scenario, None)
    cluster = choice.load_machine(scenario, machine)
    return api.compare_with_simulation(
        scenario, measured, capabilities, required=require, cluster=cluster
    )


def properties(run: Run) -> Mapping[str, object]:
    """Properties of a Run's test, for JUnit's report."""
    figures = run.figures
    times = {} if figures.step_time_ns is None else {"step_time_ns": figures.step_time_ns}
    return {
        "scenario": run.record.scenario, "backend": run.backend, "world_size": run.world_size,
        "peak_memory_bytes": figures.peak_memory_bytes, **times,
    }
