"""Files of checkpoints: formats, pieces, and who reads what."""
