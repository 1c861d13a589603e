"""The order of ops: what waits, streams and the launch queue guarantee, whatever the durations."""
