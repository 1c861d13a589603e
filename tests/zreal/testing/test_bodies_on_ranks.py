"""Bodies of tests run on every rank, as pytest itself would run them there."""

from __future__ import annotations

import pytest
import torch

from tests.zreal.testing.conftest import RankSessions

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.gloo

CONFTEST = """
import pytest, torch.distributed as dist

def pytest_addoption(parser):
    parser.addoption("--size", type=int, default=1)
    parser.addini("unit", "of the size")

@pytest.fixture
def size(pytestconfig):
    return pytestconfig.getoption("size"), pytestconfig.getini("unit"), dist.get_rank()

@pytest.fixture(scope="module", autouse=True)
def seen(rank):
    rank.log("fixture")
    yield rank.index
    dist.barrier()
"""


def test_fixtures_options_and_parameters_are_those_of_the_users_session(
    sessions: RankSessions
) -> None:
    sessions.pytester.makeconftest(CONFTEST)
    sessions.pytester.makeini("[pytest]\nunit = GiB\ncache_dir = own\njunit_logging = all")
    outcomes = sessions.outcomes("""
class Unpicklable:
    def __reduce__(self):
        raise TypeError

@pytest.mark.ranks(2, timeout=120)
class TestClass:
    def setup_method(self):
        self.total = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(self.total)

    @pytest.mark.parametrize("value", [Unpicklable(), Unpicklable()], ids=["a", "b"])
    def test_it(self, rank, size, seen, value, tmp_path):
        assert size == (7, "GiB", rank.index)
        assert seen == rank.index
        assert type(value) is Unpicklable
        assert self.total == 1
        assert (rank.world_size, dist.get_backend()) == (2, "gloo")
        assert (os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"]) == (str(rank.index), "2")
        (tmp_path / str(rank.index)).touch()
        dist.barrier()
        assert sorted(file.name for file in tmp_path.iterdir()) == ["0", "1"]
        rank.assert_all_equal(str(tmp_path))
""", "--size=7")

    assert outcomes == {"TestClass::test_it[a]": "passed", "TestClass::test_it[b]": "passed"}


def test_a_list_of_numbers_of_ranks_makes_a_test_of_each_that_is_marked(
    sessions: RankSessions
) -> None:
    source = """
@pytest.mark.ranks([1, 3])
@pytest.mark.parametrize("x", ["x"])
def test_it(rank, x):
    total = torch.ones(())
    dist.all_reduce(total)
    assert total == rank.world_size == dist.get_world_size()
"""
    outcomes = {"test_it[x-1-ranks]": "passed", "test_it[x-3-ranks]": "passed"}
    assert sessions.outcomes(source) == outcomes
    chosen = sessions.outcomes(source, "-m", "world_3 and backend_gloo")
    assert list(chosen) == ["test_it[x-3-ranks]"]


def test_modules_of_the_same_name_are_told_apart_under_importlib(sessions: RankSessions) -> None:
    for folder in ("a", "b"):
        (sessions.path / folder).mkdir()
        (sessions.path / folder / "test_same.py").write_text(f"""
import pytest

@pytest.mark.ranks(1)
def test_it(rank):
    x = {folder!r}
    assert x == "b"
""")
    reports = sessions.reports("", "--import-mode=importlib", "a", "b")

    assert "assert 'a' == 'b'" in reports["test_it"].longreprtext
    assert "test_same.py:7" in reports["test_it"].longreprtext


def test_fully_shard_ddp_and_fsdp_train_under_the_checks_of_collectives(
    sessions: RankSessions
) -> None:
    """All of torch's strategies, on meshes with subgroups; their collectives come from C++ too."""
    assert sessions.outcomes("""
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Linear(5, 3))

@pytest.mark.ranks(4)
def test_it(rank):
    mesh = rank.mesh_of(dp_replicate=2, dp_shard=2)
    assert rank.mesh_of(dp_replicate=2, dp_shard=2) is mesh
    sharded, hybrid = model(), model()
    for layer in sharded:
        fully_shard(layer, mesh=rank.mesh)
    fully_shard(hybrid, mesh=mesh)
    fsdp1 = FullyShardedDataParallel(model(), device_id=rank.device, use_orig_params=True)
    for trained in (sharded, hybrid, fsdp1, DistributedDataParallel(model())):
        optimizer = torch.optim.AdamW(trained.parameters())
        trained(torch.ones(2, 5) + rank.index).sum().backward()
        optimizer.step()
    whole = sharded[1].weight.full_tensor()
    rank.assert_all_equal({"sharded": whole, "hybrid": hybrid[1].weight.full_tensor()})
    torch.testing.assert_close(whole, hybrid[1].weight.full_tensor())
""") == {"test_it": "passed"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_nccl_ranks_train_and_are_held_to_each_other(
    sessions: RankSessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_HOSTID", "one")  # two ranks may share a GPU
    reports = sessions.reports("""
from torch.distributed.fsdp import fully_shard

@pytest.mark.ranks(2, backend="nccl")
def test_training(rank):
    model = torch.nn.Linear(4, 6, device=rank.device)
    fully_shard(model, mesh=rank.mesh)
    model(torch.ones(2, 4, device=rank.device) + rank.index).sum().backward()
    rank.assert_all_equal(model.weight.grad.full_tensor())

@pytest.mark.ranks(2, backend="nccl")
def test_sizes(rank):
    dist.all_reduce(torch.ones(2 + rank.index, device=rank.device))
""")
    assert reports["test_training"].passed
    assert reports["test_sizes"].longreprtext.startswith("ranks enter different collectives")
