"""Laws of Programs and of Runs, and the rules that every Program must pass before it is run."""
