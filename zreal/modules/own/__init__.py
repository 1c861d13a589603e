"""Users' own modules: loaded, built on the meta device, their errors told in their own code."""
