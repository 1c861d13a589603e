"""The wrapping, before any rank is started and on real ranks."""

import pytest
import torch
from tinylm.model import VOCABULARY, TinyLM, next_token_loss
from tinylm.parallel import mean_loss, sharded, total_norm

import zreal


@pytest.fixture
def trained(rank):
    """The sharded model, its loss, and one process's gradients of all batches together."""
    torch.manual_seed(0)
    alone = TinyLM()
    torch.manual_seed(0)
    model = sharded(TinyLM(), rank.mesh)
    batches = torch.randint(VOCABULARY, (rank.world_size, 2, 16))
    loss = next_token_loss(model(batches[rank.index]))
    loss.backward()
    sum(next_token_loss(alone(batch)) for batch in batches).div(rank.world_size).backward()
    return model, loss, alone


@pytest.mark.ranks(2, timeout=60)
def test_units_are_wrapped_as_the_lint_wants(rank):
    assert zreal.lint(sharded(TinyLM(), rank.mesh), rank.mesh, ignore=["tiny-units"]) == ()


@pytest.mark.ranks(2, timeout=60)
def test_all_ranks_know_the_same_loss(rank, trained):
    _, loss, _ = trained
    rank.assert_all_equal(mean_loss(loss))


@pytest.mark.ranks(2, timeout=60)
def test_the_norm_is_that_of_one_process(trained):
    model, _, alone = trained
    norm = torch.nn.utils.get_total_norm([p.grad for p in alone.parameters()])
    torch.testing.assert_close(total_norm(model), norm)
