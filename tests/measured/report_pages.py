"""Size and load time of report pages: `python -m tests.measured.report_pages --out FILE`.

Llama 3 8B under fsdp2 on 1, 8 and 64 H100, and on 64 whose ranks all differ. A page is loaded in
headless Chromium, from its opening until every widget is drawn. It needs `playwright`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import zsim
from zsim.report import of_scenario, report

FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync",
         "--disable-component-update")
LOADS = 5


def scenario(ranks: int, *, differ: bool) -> zsim.Scenario:
    """Llama 3 8B on so many ranks, with jitter where they are to differ."""
    return zsim.Scenario(
        model={"preset": "llama-3-8b"}, batch={"micro_batch": 1, "sequence_length": 8192},
        cluster={"preset": "dgx-h100", "nodes": -(-ranks // 8), "ranks": ranks},
        strategy={"name": "fsdp2"}, precision={"parameters": "bf16"},
        faults=[{"kind": "jitter", "mean": "50 us", "each": "op"}] if differ else None,
        name=f"llama-3-8b-{ranks}",
    )


def row(browser: Any, folder: Path, ranks: int, *, differ: bool) -> dict[str, Any]:
    """The page of so many ranks: bytes, CPU seconds to make it, milliseconds to load it."""
    begun = time.process_time()
    text = report([of_scenario(scenario(ranks, differ=differ))])
    made_s = time.process_time() - begun
    file = folder / "page.html"
    file.write_text(text, encoding="utf-8")
    loads = []
    for _ in range(LOADS):
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(file.as_uri())
        page.wait_for_selector("html[data-ready]", state="attached")
        loads.append(float(page.evaluate("Number(document.documentElement.dataset.ready)")))
        page.close()
    return {
        "ranks": ranks, "differ": differ, "bytes": len(text.encode()),
        "made_cpu_s": round(made_s, 2), "load_ms": round(median(loads)),
    }


def main() -> int:
    """Write the rows; 0."""
    from playwright.sync_api import sync_playwright

    options = argparse.ArgumentParser()
    options.add_argument("--out", type=Path, required=True)
    asked = options.parse_args()
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=list(FLAGS)
        )
        cases = [(1, False), (8, False), (64, False), (64, True)]
        rows = [row(browser, Path(folder), ranks, differ=differ) for ranks, differ in cases]
        provenance = {"chromium": browser.version, "loads": LOADS, "zsim": zsim.__version__}
        browser.close()
    lines = ",\n".join(json.dumps(each) for each in rows)
    asked.out.write_text(f'{{"provenance": {json.dumps(provenance)},\n"rows": [\n{lines}\n]}}\n')
    return 0


if __name__ == "__main__":
    sys.exit(main())
