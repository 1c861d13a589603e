"""The observer: runs torch's own strategies and records them."""
