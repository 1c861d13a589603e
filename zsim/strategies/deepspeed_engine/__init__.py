"""DeepSpeed's own engine: flat partitions, buckets of gradients, and its optimizer's step."""
