"""Compare two Runs, check by check."""
