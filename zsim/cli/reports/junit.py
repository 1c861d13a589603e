"""JUnit's XML of validated scenarios, which CI systems show: a test case for each scenario."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree as Xml

from zsim.cli.arguments import with_options
from zsim.errors import ZsimError, visible
from zsim.io import files
from zsim.runs.comparison import Comparison


def write(
    path: Path, comparisons: Sequence[Comparison], failures: Sequence[tuple[str, ZsimError]]
) -> None:
    """Write the report: a comparison that is not ok is a failure, a scenario that could not run an
    error."""
    wrong = sum(not comparison.ok for comparison in comparisons)
    suite = Xml.Element(
        "testsuite", name="zsim validate", tests=str(len(comparisons) + len(failures)),
        failures=str(wrong), errors=str(len(failures)),
    )
    for comparison in comparisons:
        case = _case(suite, comparison.measured.scenario)
        Xml.SubElement(case, "system-out").text = _clean(str(comparison))
        if not comparison.ok:
            summary = _clean(str(comparison.agreement))
            Xml.SubElement(case, "failure", message=summary).text = _clean(str(comparison))
    for name, error in failures:
        Xml.SubElement(_case(suite, name), "error", message=_clean(with_options(error)))
    _write(suite, path)


def write_cases(path: Path, cases: Sequence[tuple[str, str]]) -> None:
    """Write a report of `cases`: the name of each, and the reason for which it failed, or ""."""
    suite = Xml.Element(
        "testsuite", name="zsim diff", tests=str(len(cases)),
        failures=str(sum(bool(reason) for _, reason in cases)), errors="0",
    )
    for name, reason in cases:
        case = Xml.SubElement(suite, "testcase", classname="zsim.diff", name=_clean(name))
        if reason:
            Xml.SubElement(case, "failure", message=_clean(reason))
    _write(suite, path)


def _write(suite: Xml.Element, path: Path) -> None:
    Xml.indent(suite)
    text = Xml.tostring(suite, encoding="unicode", xml_declaration=True)
    files.write(path, f"{text}\n")


def _case(suite: Xml.Element, name: str) -> Xml.Element:
    return Xml.SubElement(suite, "testcase", classname="zsim.validate", name=_clean(name))


def _clean(text: str) -> str:
    """The text without characters that XML has no way to write."""
    return visible(text)
