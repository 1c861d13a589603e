"""Output of nccl-tests, as text and JSON."""
