"""Torch's warnings in every test that raises them.

torch raises some once per process by default, and a test would depend on those that ran before it.
"""

from __future__ import annotations

import torch

torch.set_warn_always(True)
