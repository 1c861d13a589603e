"""Figures of a Run: traffic, peaks, exposed communication, step time and times of units."""
