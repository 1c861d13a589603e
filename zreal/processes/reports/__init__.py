"""Reports on ranks that fail or hang: errors, stacks, the roll-call."""
