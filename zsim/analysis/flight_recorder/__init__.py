"""Dumps of torch's flight recorder, and the explanation of a hang that they hold."""
