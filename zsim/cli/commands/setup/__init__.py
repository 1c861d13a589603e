"""Commands for the first minutes: a scenario to begin with, a machine's state, a shell's
completion."""
