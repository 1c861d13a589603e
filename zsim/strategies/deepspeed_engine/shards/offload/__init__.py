"""Stage 3 with states in host memory or on drives."""
