"""Measurements that others made: read, checked field by field, and predicted row by row. One file per kind of source."""
