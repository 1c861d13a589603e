"""Executes Programs with torch, to prove that they train correctly. It must know neither a
strategy's schedule nor torch's own strategies: the Program says what happens, and when."""
