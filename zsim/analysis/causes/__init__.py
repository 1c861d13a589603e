"""Causes of a step's duration: why each collective is exposed, and the critical path."""
