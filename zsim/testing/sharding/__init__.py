"""Property kit for shard math: laws, and `check_sharding` that runs them on your own functions."""

from zsim.testing.sharding.by_numel import by_numel
from zsim.testing.sharding.check import ShardLawError, check_sharding
from zsim.testing.sharding.laws import LAWS

__all__ = ["LAWS", "ShardLawError", "by_numel", "check_sharding"]
