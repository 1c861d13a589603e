"""The keys of scenario files: their schema, the check against it, and their reference."""
