"""What holds for every test: property tests have no deadline, since a machine under load is slow and not wrong."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("zsim", deadline=None)
settings.load_profile("zsim")
