"""Models as data: sizes, operators, units."""
