"""Files and folders named by tests: the parts of a test's id, as any file system takes them."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

MOST_CHARACTERS = 120
_ODD = re.compile(r"[^\w.,=+\[\]-]+", re.ASCII)


def file_name(text: str) -> str:
    """`text` as a file's name, the same each time, and another for any other text.

    >>> file_name("test_step[sim-2]"), file_name("test_step[a/b]")
    ('test_step[sim-2]', 'test_step[a-b]-8f34a2')
    """
    plain = _ODD.sub("-", text)[:MOST_CHARACTERS].strip(".") or "test"
    if plain == text:
        return text
    return f"{plain}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def folder_of(nodeid: str) -> Path:
    """The folder of a test, relative to that of all tests: a part of it for each part of the id."""
    return Path(*[file_name(part) for part in re.split(r"/|::", nodeid) if part])
