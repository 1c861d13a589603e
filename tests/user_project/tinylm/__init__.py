"""A small language model, sharded with fully_shard."""

from tinylm.checkpoint import piece, pieces_for, whole
from tinylm.model import TinyLM, next_token_loss
from tinylm.parallel import mean_loss, sharded, total_norm

__all__ = [
    "TinyLM", "mean_loss", "next_token_loss", "piece", "pieces_for", "sharded", "total_norm",
    "whole",
]
