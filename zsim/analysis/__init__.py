"""Why communication is exposed, what would help, what fits."""
