"""NCCL: its tuner's choices and how long each algorithm takes."""
