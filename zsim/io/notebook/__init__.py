"""Tables for notebooks: HTML and pandas."""
