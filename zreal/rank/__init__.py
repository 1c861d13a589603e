"""One rank of a real run: its steps, its faults, and its reference in one process."""
