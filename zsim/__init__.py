"""zsim: simulate a ZeRO or FSDP training step, run the same step for real, and compare the two. Importing it loads no torch."""
