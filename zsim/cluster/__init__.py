"""Devices, nodes and links, and the collectives that run over them."""
