"""DeepSpeed's offload_optimizer and offload_param: what is in host memory, and who copies when."""
