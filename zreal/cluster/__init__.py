"""Ranks that a cluster's own launcher starts: their numbers, their meeting, their end. It must not
know what ranks compute."""
