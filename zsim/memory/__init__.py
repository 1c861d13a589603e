"""Device memory: what torch reserves and what lies outside it."""
