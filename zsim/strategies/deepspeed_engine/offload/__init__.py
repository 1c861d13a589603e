"""DeepSpeed's offload_optimizer under stages 1 and 2: placement in host memory, and copies."""
