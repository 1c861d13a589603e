"""Rank processes: started, watched, reaped."""
