"""Steps of many ranks that do the same ops, each in its own time: op by op, not rank by rank."""
