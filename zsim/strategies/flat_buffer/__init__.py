"""Flat buffers, as ZeRO shards them."""
