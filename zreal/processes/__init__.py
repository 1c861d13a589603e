"""Starts rank processes on this machine, supervises them and leaves none behind. It must not know
what ranks compute: a rank is a function, its last collective and its result."""
