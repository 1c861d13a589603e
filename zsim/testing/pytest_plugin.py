"""pytest plugin of zsim: options, the marker `zero`, its fixtures, scenario files as tests.

pytest loads this module at every start, used or not. So it imports nothing but pytest; the modules
beside it are imported when something of theirs is used. PYTEST_DONT_REWRITE: it asserts nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from zsim.cluster.cluster import ClusterSpec
    from zsim.runs.comparison import Comparison
    from zsim.scenario.scenario import Scenario
    from zsim.testing.case import BackendCase
    from zsim.testing.plugin.settings import SessionOptions
    from zsim.testing.plugin.zero import Zero

OPTIONS = {
    "backend": ("NAME,…", "backends of scenario files and of tests whose marker names none: sim "
                          "(default), fake, gloo, nccl, …"),
    "world-size": ("N,…", "numbers of ranks of tests whose marker names none"),
    "compare": ("RUN", "hold each Run to the saved one of its scenario: a file, or a folder of "
                       "them"),
    "fail-if": ("LIMITS", "growths that fail a test, as peak:+2%%,step:+5%%; needs --zero-compare"),
    "artifacts": ("FOLDER", "save Runs, traces and a log of each test in a folder of its own"),
    "timeout": ("S", "seconds until a rank of a real backend counts as hung (default 120)"),
    "seed": ("N", "seed of initial parameters and batches, in place of each scenario's own"),
}
"""Options with a value; each is an ini option as well, as zero_fail_if."""
MARKER = (
    "zero(scenario=PATH, world_size=[2, 4], backend=['sim', 'gloo']): a test of the fixtures zero "
    "and compare, on each backend and number of ranks"
)
SETTINGS = pytest.StashKey["SessionOptions"]()
NAMED = pytest.StashKey[list[str]]()
LEFT_OUT = pytest.StashKey[list[str]]()
"""Lines on files that are no tests although their folder was named."""
LEFT_OUT_BY_WORKERS = pytest.StashKey[dict[str, None]]()
"""The same of xdist's workers, each line once."""
MISTAKES = pytest.StashKey[dict[str, str]]()
"""Mistakes in markers of the session, by the name of the test without its parameters."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options, all of which begin with --zero-, and ini options."""
    group = parser.getgroup("zsim", "zsim: tests of training steps")
    for name, (metavar, text) in OPTIONS.items():
        group.addoption(f"--zero-{name}", metavar=metavar, default=None, help=text)
        parser.addini(_dest(name), text.replace("%%", "%"))
    required = "fail a test whose backend is not available, instead of skipping it"
    group.addoption("--zero-require-backend", action="store_true", help=required)
    parser.addini("zero_require_backend", required, type="bool")
    group.addoption(
        "--zero-update-golden", action="store_true", help="write golden files instead of failing"
    )


def _dest(name: str) -> str:
    return f"zero_{name.replace('-', '_')}"


def _text(config: pytest.Config, name: str) -> str:
    """The value of an option, of the command line or else of the ini file; "" for none."""
    option = config.getoption(_dest(name))
    return str(config.getini(_dest(name)) or "") if option is None else str(option)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and refuse options that cannot be read."""
    config.addinivalue_line("markers", MARKER)
    if any(_text(config, name) for name in OPTIONS):
        _settings(config)


def _settings(config: pytest.Config) -> SessionOptions:
    """The options of the session, read when they are first needed; UsageError for a mistake."""
    if SETTINGS not in config.stash:
        from zsim.errors import ZsimError
        from zsim.testing.plugin import settings
        from zsim.testing.plugin.artifacts import Logs
        from zsim.testing.plugin.session_summary import Summary

        def text_of(name: str) -> str:
            return _text(config, name)

        required = config.getoption("zero_require_backend") or config.getini("zero_require_backend")
        try:
            made = settings.read(
                text_of, require_backend=bool(required),
                update_golden=config.getoption("zero_update_golden"),
            )
        except ZsimError as error:
            raise pytest.UsageError(str(error)) from None
        config.stash[SETTINGS] = made
        if made.artifacts is not None:
            config.pluginmanager.register(Logs(), "zsim logs")
        if made.baselines is not None and not hasattr(config, "workerinput"):
            config.pluginmanager.register(Summary(made.baselines), "zsim summary")
    return config.stash[SETTINGS]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell xdist's workers what the command line names: theirs names the same, and more."""
    node.workerinput["zero_named"] = _named(node.config)


def _named(config: pytest.Config) -> list[str]:
    if NAMED not in config.stash:
        from zsim.testing.plugin.scenario_items import named

        names = getattr(config, "workerinput", {}).get("zero_named")
        config.stash[NAMED] = named(config) if names is None else names
    return config.stash[NAMED]


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """A scenario's file that was asked for: by its name, by a folder, or by --zero-backend."""
    if file_path.suffix.lower() != ".toml" or file_path.name == "pyproject.toml":
        return None
    from zsim.testing.plugin.scenario_items import ScenarioFile, left_out

    config = parent.config
    reason = left_out(
        file_path, _named(config), config.getini("python_files"),
        everywhere=bool(_text(config, "backend")),
    )
    if reason is not None:
        if reason:
            config.stash.setdefault(LEFT_OUT, []).append(f"{file_path}: {reason}")
        return None
    file: ScenarioFile = ScenarioFile.from_parent(parent, path=file_path)
    file.settings = _settings(config)
    return file


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell xdist's controller, which collects nothing, of the files that are no tests."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["zero_left_out"] = session.config.stash.get(LEFT_OUT, [])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Keep what a worker tells."""
    lines = getattr(node, "workeroutput", {}).get("zero_left_out", ())
    node.config.stash.setdefault(LEFT_OUT_BY_WORKERS, {}).update(dict.fromkeys(lines))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the files that are no tests, of this process and of xdist's workers."""
    for line in (*config.stash.get(LEFT_OUT, ()), *config.stash.get(LEFT_OUT_BY_WORKERS, ())):
        terminalreporter.write_line(line)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A case of the test for each backend and world size of its marker.

    A mistake in the marker waits for the test's set-up, so that other tests run.
    """
    markers = list(metafunc.definition.iter_markers("zero"))
    mistakes = metafunc.config.stash.setdefault(MISTAKES, {})
    test = metafunc.definition.nodeid
    if "_zero_case" not in metafunc.fixturenames:
        if markers and metafunc.definition.get_closest_marker("ranks") is None:  # told by zreal
            mistakes[test] = ("marker zero: expected the fixture zero or compare among the "
                              "arguments, found neither")
        return
    from zsim.errors import ZsimError
    from zsim.testing.plugin.marker import cases

    compares = "_zero_compares" in metafunc.fixturenames
    try:
        made = list(cases(markers, _settings(metafunc.config), compares=compares))
    except ZsimError as error:
        mistakes[test] = str(error)
    else:
        metafunc.parametrize("_zero_case", [_param(metafunc.config, case) for case in made])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a test whose marker has a mistake."""
    mistakes = item.config.stash.get(MISTAKES, {})
    if not mistakes or not isinstance(item, pytest.Function) or item.parent is None:
        return
    if problem := mistakes.get(f"{item.parent.nodeid}::{item.originalname}"):
        pytest.fail(f"{item.nodeid}: {problem}", pytrace=False)


def _param(config: pytest.Config, case: BackendCase) -> Any:
    """The case with its id, and with markers for `-m`."""
    for name in case.marks:
        config.addinivalue_line("markers", f"{name}: set by the marker zero")
    marks = [getattr(pytest.mark, name) for name in case.marks]
    return pytest.param(case, id=case.id, marks=marks)


@pytest.fixture
def _zero_case() -> None:
    """The case of a test; every test that asks for `zero` has one as its parameter."""


@pytest.fixture
def _zero_compares() -> None:
    """Marks tests that ask for `compare`."""


@pytest.fixture
def zero(request: pytest.FixtureRequest, _zero_case: BackendCase | None) -> Zero:
    """The scenario of the test on the backend of its id: `zero.run(scenario)` gives a Run."""
    from zsim.testing.plugin.zero import opened

    return opened(request.node, _zero_case, _settings(request.config))


@pytest.fixture
def scenario(zero: Zero) -> Scenario:
    """The scenario of the marker, with the ranks of the test."""
    return zero.scenario


@pytest.fixture
def cluster(scenario: Scenario) -> ClusterSpec:
    """The cluster of the marker's scenario."""
    return scenario.cluster


@pytest.fixture
def scenario_dir(scenario: Scenario) -> Path:
    """The folder of the marker's scenario, where files that it names lie."""
    return Path(scenario.folder)


@pytest.fixture
def compare(zero: Zero, _zero_compares: None) -> Callable[..., Comparison]:
    """Predicted against measured: `compare(scenario)` fails with the verdict where they differ."""
    return zero.compare


def pytest_assertrepr_compare(op: str, left: object, right: object) -> list[str] | None:
    """Lines on what is behind a figure of a Run, where a comparison of it fails."""
    if "zsim.runs.figures.run_figures" not in sys.modules:
        return None
    from zsim.testing.explanations import comparison_lines

    return comparison_lines(op, left, right)
