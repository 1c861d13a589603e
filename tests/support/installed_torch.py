"""The version of torch that tests run with: a Program that is held to torch is planned for it."""

from __future__ import annotations

from importlib.metadata import version

from zsim.models.torch_versions import version_of

TORCH = version_of(version("torch"))
