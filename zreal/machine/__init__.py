"""Measurements of the present machine, from which `zsim calibrate --here` makes its constants."""
