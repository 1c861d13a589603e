"""ATen calls: bytes and FLOPs of operators as torch runs them."""
