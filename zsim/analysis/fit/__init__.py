"""The least that fits: candidates, what each needs, the recommendation."""
