"""Activations in host memory, as torch's and torchtune's hooks keep them."""
