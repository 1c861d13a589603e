"""Times of a Program. The entry is `zsim.engine.simulate_step.simulate_step`; the README
beside this file tells how a time comes about."""
