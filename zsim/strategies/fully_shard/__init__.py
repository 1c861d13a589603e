"""Parameters sharded on dim 0, as torch's fully_shard does."""
