"""Where fake tensors differ from real ones."""
