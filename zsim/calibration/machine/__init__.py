"""Calibration of the present machine: what is measured, the constants that follow, and the file in
which they are kept."""
