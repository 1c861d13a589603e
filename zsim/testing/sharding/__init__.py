"""Property kit for shard math: laws, and `check_sharding` that runs them on your own functions."""

from zsim.testing.sharding.check import ShardLawError, check_sharding
from zsim.testing.sharding.laws import LAWS

__all__ = ["LAWS", "ShardLawError", "check_sharding"]
