"""nccl-tests' output as it is printed, as text or as JSON."""

from __future__ import annotations

import re

from zsim.calibration.nccl_tests.json_log import read_json
from zsim.calibration.nccl_tests.log_row import LogRow
from zsim.calibration.nccl_tests.text_log import STARTS, read_text
from zsim.calibration.records import Skipped

_BEHIND_PREFIX = re.compile(r"^.+# nThread \d+ nGpus \d+ ", re.MULTILINE)


def read_log(text: str, *, source: str, collective: str = "") -> list[LogRow | Skipped]:
    """The rows of a log, none for any other text.

    `collective` is the one of a log that does not name it.
    """
    if text.lstrip()[:1] == "{":
        return read_json(text, source=source, collective=collective)
    if STARTS.search(text):
        return read_text(text, source=source, collective=collective)
    if _BEHIND_PREFIX.search(text):
        reason = "expected the lines of nccl-tests as it prints them, found them behind what a " \
                 "launcher writes before each; take that off"
        return [Skipped(source=source, line=1, reason=reason)]
    return []
