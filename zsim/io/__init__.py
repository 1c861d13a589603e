"""The boundary to text, files and signals."""
