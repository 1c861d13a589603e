"""Steps, kernels and optimizers that all strategies are written with."""
