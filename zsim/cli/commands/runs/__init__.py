"""Commands that make Runs and compare them."""
