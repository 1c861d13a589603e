"""A rank of a cluster's launcher with a fault: `python -m tests.support.faulty.faulty_worker
FAULT.json {worker}`, where {worker} is the command of a rank of `zsim validate --launch`."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

from tests.support.faulty.faults import Fault, inject


def main() -> None:
    """Inject the fault, then be the worker of the command's last words."""
    fault, python, option, module, *arguments = sys.argv[1:]
    assert (python, option) == (sys.executable, "-m")
    inject(Fault(**json.loads(Path(fault).read_text())), int(os.environ["RANK"]))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__")


if __name__ == "__main__":
    main()
