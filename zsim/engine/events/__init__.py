"""Parts of one round of the simulation: schedules, progress of ranks, and the event queue."""
