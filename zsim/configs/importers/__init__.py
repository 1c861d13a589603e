"""The importers: each maps the keys of one tool's config to a scenario's."""
