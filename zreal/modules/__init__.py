"""The model that is trained, as torch modules."""
