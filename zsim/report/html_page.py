"""The report's page: one HTML file with its data, style and scripts inside, that loads nothing.

The data are JSON in a block of their own with `<` escaped, so that no text of a scenario ends it.
Scripts and style are named by their hashes in the content security policy: nothing else runs.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from zsim.errors import ZsimError

SCRIPTS = (
    "common", "timeline_drawing", "timeline", "memory", "holders", "topology", "candidates",
    "waterfall", "main",
)
"""Files of `zsim/report/web`, in the order in which they run."""
MOST_BYTES = 5_000_000
CARRIER = "mpld3"
"""The Python package that carries D3."""


class ReportError(ZsimError):
    """A report that cannot be made: its drawing library lacks, or it is too large."""


def drawing_library() -> str:
    """The text of D3 from the installed package that carries it; ReportError without one."""
    spec = find_spec(CARRIER)
    folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
    scripts = sorted(file for folder in folders for file in folder.glob("js/d3.v[5-9].min.js"))
    if not scripts:
        raise ReportError(
            where="zsim report", expected=f"the package {CARRIER}, which carries D3",
            found="none" if spec is None else "one without D3 5 or later",
            remedy="pip install 'zsim[report]'",
        )
    return scripts[-1].read_text(encoding="utf-8")


def escaped_json(data: Any) -> str:
    """JSON in which nothing ends or begins an element of HTML."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def page(data: Any, *, title: str) -> str:
    """The whole page; equal data give equal text. ReportError above `MOST_BYTES`."""
    folder = files("zsim.report") / "web"
    scripts = [drawing_library(), "\n".join(
        (folder / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS
    )]
    style = (folder / "page.css").read_text(encoding="utf-8")
    text = (folder / "page.html").read_text(encoding="utf-8")
    parts = {
        "title": html.escape(title), "policy": _policy(scripts, style), "style": style,
        "library": scripts[0], "script": scripts[1], "data": escaped_json(data),
    }
    text = re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], text)
    if (size := len(text.encode())) > MOST_BYTES:
        raise ReportError(
            where="zsim report", expected=f"a page of at most {MOST_BYTES:,} B",
            found=f"{size:,} B", remedy="report on fewer scenarios at once",
        )
    return text


def _policy(scripts: Sequence[str], style: str) -> str:
    """The policy that lets these scripts and this style in, and no connection out."""
    hashes = " ".join(f"'sha256-{_hash(script)}'" for script in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'sha256-{_hash(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
