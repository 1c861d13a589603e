"""Commands that answer questions about scenarios, saved Runs and dumps."""
