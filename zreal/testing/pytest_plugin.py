"""pytest plugin of zreal: the marker `ranks`, the fixtures `rank` and `rank_pool`.

pytest loads this module at every start, used or not. So it imports nothing but pytest and
its options; torch and the modules beside it are imported when a test runs on ranks.
PYTEST_DONT_REWRITE: it asserts nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from zreal.testing.options import RANK, option_of, world_sizes

if TYPE_CHECKING:
    from zreal.testing.marker import RanksMarker
    from zreal.testing.on_rank.rank import Rank

MARKER = (
    "ranks(4, timeout=30, backend='gloo'): run the body on every rank of a process group; "
    "ranks([2, 4]) makes a test of each"
)
GPUS_MARKER = "needs_gpus(2): skip the test where there are fewer CUDA devices"
WORLD_SIZE = "_ranks_world_size"
"""Parameter of a test whose marker has a list."""
MISTAKE = pytest.StashKey[str]()
"""The mistake in the marker of a test."""
DEFAULT_TIMEOUT_S = 60.0
KEPT = ("failed", "all", "none")
DEBUG = ("off", "info", "detail")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of this plugin alone; those that it shares are zsim's."""
    group = parser.getgroup("zreal", "zreal: tests that run on ranks")
    for name, choices, text in (
        ("keep-logs", KEPT, "ranks that leave their output in --zero-artifacts: failed (default), "
                            "all or none"),
        ("debug", DEBUG, "torch's own checks and lines on ranks, TORCH_DISTRIBUTED_DEBUG: off, "
                         "info or detail; in torch 2.13 detail ends DistributedDataParallel"),
    ):
        group.addoption(f"--zero-{name}", choices=choices, default=None, help=text)
        parser.addini(f"zero_{name.replace('-', '_')}", text)


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers."""
    for marker in (MARKER, GPUS_MARKER):
        config.addinivalue_line("markers", marker)


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test of each number of ranks, where the marker or the option has a list of them."""
    mark = metafunc.definition.get_closest_marker("ranks")
    sizes = mark and (mark.args[0] if mark.args else world_sizes(metafunc.config))
    if isinstance(sizes, list | tuple) and sizes:
        metafunc.fixturenames.append(WORLD_SIZE)
        ids = [f"{size}-ranks" for size in sizes]
        metafunc.parametrize(WORLD_SIZE, sizes, indirect=True, ids=ids)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Leave the fixtures of a test on ranks to the ranks; mark it for `-m`."""
    if not isinstance(item, pytest.Function) or not _runs_on_ranks(item):
        return
    # the controller's own: a folder that all ranks share, and one of the run
    item.fixturenames = [*{"tmp_path"} & {*item.fixturenames}, "tmp_path_factory"]
    marker = _marker(item)
    if marker is None:
        return
    for name in (f"backend_{marker.backend}", f"world_{_world_size(item, marker)}"):
        item.config.addinivalue_line("markers", f"{name}: set by the marker ranks")
        item.add_marker(name)


def _runs_on_ranks(item: pytest.Item) -> bool:
    return item.get_closest_marker("ranks") is not None and RANK not in item.config.stash


def _marker(item: pytest.Item) -> RanksMarker | None:
    """The marker of a test; None where it has a mistake, which its set-up tells."""
    from zreal.testing.marker import RanksMarkerError, read

    mark = item.get_closest_marker("ranks")
    assert mark is not None
    try:
        return read(mark, world_sizes(item.config))
    except RanksMarkerError as error:
        item.stash[MISTAKE] = str(error)
        return None


def _world_size(item: pytest.Function, marker: RanksMarker) -> int:
    sizes: Any = item.callspec.params[WORLD_SIZE] if marker.is_list else marker.world_sizes[0]
    return int(sizes)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a test that cannot run on ranks; skip, or fail, one whose backend or GPUs are not there.
    """
    if mark := item.get_closest_marker("needs_gpus"):
        from zreal.testing.requirements import missing_gpus

        _require(item, missing_gpus(mark))
    if not _runs_on_ranks(item):
        return
    from zreal.testing.requirements import missing, unfit

    marker = None if MISTAKE in item.stash else _marker(item)
    if problem := item.stash.get(MISTAKE, "") or unfit(item):
        pytest.fail(problem, pytrace=False)
    assert isinstance(item, pytest.Function)
    assert marker is not None
    _require(item, missing(marker.backend, _world_size(item, marker)))


def _require(item: pytest.Item, lack: str) -> None:
    """Skip a test for what it lacks, or fail it where backends are required."""
    if lack and option_of(item.config, "zero_require_backend"):
        pytest.fail(f"{lack} (--zero-require-backend)", pytrace=False)
    if lack:
        from zreal.testing.requirements import skip

        skip(lack)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the body of a test on its ranks."""
    if not _runs_on_ranks(pyfuncitem):
        return None
    from zreal.testing import ranked_test

    marker = _marker(pyfuncitem)
    assert marker is not None
    ranked_test.run(
        pyfuncitem, world_size=_world_size(pyfuncitem, marker), backend=marker.backend,
        timeout_s=marker.timeout_s or _timeout(pyfuncitem.config), kept=_kept(pyfuncitem),
    )
    return True


def _timeout(config: pytest.Config) -> float:
    return float(option_of(config, "zero_timeout") or DEFAULT_TIMEOUT_S)


def _kept(item: pytest.Item) -> Any:
    from zreal.testing.ranked_test import Kept

    folder = option_of(item.config, "zero_artifacts")
    if folder:
        from zsim.testing.plugin.names_of_tests import folder_of

        folder = Path(folder).absolute() / folder_of(item.nodeid)
    return Kept(folder=folder or None, of=option_of(item.config, "zero_keep_logs") or KEPT[0])


@pytest.fixture
def _ranks_world_size(request: pytest.FixtureRequest) -> int:
    """The number of ranks of a test whose marker has a list."""
    return int(request.param)


class _NoRank:
    """The fixture `rank` in the controller, where the body of a test on ranks never runs."""

    def __repr__(self) -> str:
        return "rank"

    def __getattr__(self, name: str) -> object:
        raise AttributeError(
            f"rank.{name}: expected the marker ranks(n) at the test, found none; @pytest.mark.ranks"
            "(2)"
        )


@pytest.fixture(scope="session")
def rank(request: pytest.FixtureRequest) -> Rank | _NoRank:
    """The rank that runs the test: index, world_size, mesh, mesh_of, device, log,
    assert_all_equal."""
    return request.config.stash.get(RANK, None) or _NoRank()


@pytest.fixture(scope="module")
def rank_pool(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """Ranks that stay: `rank_pool(2).run(function, 3)` returns what each rank returns."""
    from zreal.testing.pool import Pools

    with Pools(
        request.config, request.path, timeout_s=_timeout(request.config), folders=tmp_path_factory
    ) as pools:
        yield pools.pool
