"""What strategies are built from."""
