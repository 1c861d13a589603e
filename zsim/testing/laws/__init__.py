"""Laws of Runs: what holds of every step, on every backend, and `check_laws`, which asks them."""

from zsim.ir.laws.run_laws import LawError
from zsim.testing.laws.table import LAWS, breaches, check_laws, law

__all__ = ["LAWS", "LawError", "breaches", "check_laws", "law"]
