"""Pieces of checkpoints hold the laws of shards."""

import torch
from tinylm.checkpoint import piece, pieces_for, whole

from zsim.testing import check_sharding


def test_pieces_hold_every_law():
    check_sharding(piece, whole, pieces_for, make=torch.tensor)
