"""The exporters: each writes the config of one tool from a scenario."""
