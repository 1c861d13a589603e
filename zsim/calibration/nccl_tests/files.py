"""nccl-tests' output, as text or as JSON."""

from __future__ import annotations

import json
import re

from zsim.calibration.nccl_tests.checks import Rows
from zsim.calibration.nccl_tests.json_logs import read_json
from zsim.calibration.nccl_tests.log_prefixes import holds_log
from zsim.calibration.nccl_tests.text_logs import read_text


def is_log(text: str) -> bool:
    """True for nccl-tests' output; `text` is `log_prefixes.plain`."""
    return holds_log(text) or is_json(text)


def read_log(text: str, *, source: str, collective: str = "") -> Rows:
    """The rows of a log; `collective` is the one of a log that does not name it."""
    read = read_json if is_json(text) else read_text
    return read(text, source=source, collective=collective)


def is_json(text: str) -> bool:
    """True for JSON, whole, cut or damaged; `text` is `log_prefixes.plain`.

    Tags and times of launchers begin as lists do, and words behind them as objects; JSON has no
    line that begins with nccl-tests' `#`.
    """
    if text.lstrip()[:1] not in ("{", "[") or holds_log(text):
        return False
    if re.match(r'\s*(?:\{\s*["}]|\[\s*[\[{"\]])', text):
        return True
    try:
        json.loads(text)
    except RecursionError:
        return True
    except ValueError:
        return False
    return True
