"""Files of checkpoints: formats, and who reads what."""
