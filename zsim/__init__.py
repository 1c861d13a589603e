"""zsim: simulate a ZeRO or FSDP training step, run the same step for real, and compare. Importing
it loads no torch."""

__version__ = "0.1.0"
