"""A small language model, sharded with fully_shard."""
