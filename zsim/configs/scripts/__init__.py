"""Scripts and Python configs read as tables: text is parsed, and nothing in it runs."""
