"""Settings of every test: property tests have no deadline, and torch has one thread per process.

A machine under load is slow and not wrong.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile

import pytest
from hypothesis import settings

# Read when torch is imported. The kernel of a convolution goes by the number of threads, and with
# it the strides of gradients; xdist's workers and gloo ranks share the cores besides.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test reads what its user's machine was measured to do, or writes there.
os.environ["ZSIM_CACHE"] = tempfile.mkdtemp(prefix="zsim-cache-")
os.environ["ZSIM_NO_CALIBRATE"] = "1"
# pytest imports readline, which sets it behind Python's back: what tests start would wrap its lines
os.environ.pop("COLUMNS", None)
os.unsetenv("COLUMNS")

gc.set_threshold(50_000, 20, 50)
"""Objects made before the garbage collector looks: by default it takes a twentieth of the suite."""

collect_ignore = ["user_project"]
"""A project of its own, whose tests test_user_project.py runs in sessions of theirs."""

settings.register_profile("zsim", deadline=None)
settings.load_profile("zsim")

COVERED_ELSEWHERE = (
    "_against_torch.py", "_traced.py", "test_alternatives.py", "test_fits.py",
    "test_checkpointing.py", "test_clipping.py", "test_device_kernels.py", "test_event_order.py",
    "test_hide_communication.py", "test_run_laws.py", "test_matrix.py", "test_readme_errors.py",
    "test_real_layouts.py", "test_shared_inputs.py", "test_sharded_gradient_calls.py",
    "test_together.py", "test_traced_accumulation.py",
)
"""Files that run the same lines for the hundredth time, on other cases.

Coverage of them would take a third of CI's time; what CI says is covered is covered without them.
"""

_num_modules = 0
"""Number of modules imported when objects were last left out."""

_torch_state: dict[str, object] = {}
"""torch's switches of the whole process, as the test that runs found them."""


def pytest_collection_finish() -> None:
    """Leave out of every later `gc.collect` the million objects that imports and collection made.

    Traces and memory meters collect often, and would take most of their time there.
    """
    global _num_modules
    gc.collect()
    gc.freeze()
    _num_modules = len(sys.modules)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    _torch_state.update(_state_of_torch())


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After each file, and each test that has imported something, do so with what is there then.

    torch imports half of itself at the first step of an optimizer. A test that leaves a process
    group or a switch of torch behind fails itself, and not those that come after it.
    """
    if nextitem is None or nextitem.path != item.path or len(sys.modules) > _num_modules:
        pytest_collection_finish()
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail(f"{item.nodeid} left a process group behind: expected it to be destroyed")
    changed = [
        f"{name}: {_torch_state[name]} before, {value} after"
        for name, value in _state_of_torch().items() if _torch_state.get(name, value) != value
    ]
    if changed:
        pytest.fail(f"{item.nodeid} left torch changed; {', '.join(changed)}: expected as before")


def _state_of_torch() -> dict[str, object]:
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_autocast_dtype"):
        return {}
    asked = {name: getattr(torch, name)() for name in (
        "get_default_dtype", "get_default_device", "is_grad_enabled", "get_num_threads",
        "are_deterministic_algorithms_enabled",
    )}
    for device in ("cpu", "cuda"):
        asked[f"is_autocast_enabled {device}"] = torch.is_autocast_enabled(device)
        asked[f"get_autocast_dtype {device}"] = torch.get_autocast_dtype(device)
    return asked


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name.endswith(COVERED_ELSEWHERE):
            item.add_marker("no_cover")
