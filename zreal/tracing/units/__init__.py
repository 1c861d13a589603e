"""Units of a traced module: their parameters, hooks, and the stretches between them."""
