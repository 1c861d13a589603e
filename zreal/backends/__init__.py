"""The real backends behind the entry-point group `zsim.backends`: fake, gloo and nccl.

Importing this package loads no torch. A backend loads it, or says how to install it.
"""

from zreal.backends.fake import FakeBackend
from zreal.backends.gloo import GlooBackend
from zreal.backends.nccl import NcclBackend

__all__ = ["FakeBackend", "GlooBackend", "NcclBackend"]
