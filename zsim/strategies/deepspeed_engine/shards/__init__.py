"""Stage 3: parameters in shards, the coordinator of their gathers, the step and its ends."""
