"""Version of zsim; the package's metadata and the provenance of Runs take it from here."""

__version__ = "0.1.0"
TORCH = "2.13"
"""The version of torch whose Programs the strategies make."""
