"""Pictures of a Run's steady step for notebooks, by matplotlib: streams in time, memory by op.

They read records alone. `zsim report` makes the page that one can zoom.
"""

from __future__ import annotations

from typing import Any

from zsim.errors import ZsimError, listed
from zsim.io.extras import library
from zsim.io.notebook.data_frame import data_frame
from zsim.ir.ops import COLLECTIVES
from zsim.ir.run import RankRun, RunRecord

COLOURS = {
    "forward": "#5b9bd5", "backward": "#2f6fb2", "recompute": "#9b7fd1", "optimizer": "#7a8699",
    "all_gather": "#f0a13a", "reduce_scatter": "#d96c2c", "all_reduce": "#c9508a",
    "broadcast": "#b59a3d", "all_to_all": "#8c6d31", "copy": "#5fb0a5",
}
OTHER = "#aab2bf"
SPAN_COLUMNS = (
    "name", "kind", "unit", "stream", "group", "nbytes", "issued_ns", "start_ns", "end_ns"
)
ROW = 0.8
"""Height of a stream's row, in rows."""


class PictureError(ZsimError):
    """A picture that cannot be drawn."""


def timeline(record: RunRecord, *, rank: int | None = None) -> Any:
    """matplotlib's Figure of a rank's streams, by default of the first that was recorded.

    PictureError without matplotlib, for another rank, or where the Run has no spans.
    """
    chosen = _rank(record, rank)
    if not chosen.spans:
        raise PictureError(
            where=record.scenario, expected="a Run with spans", found=f"none of rank {chosen.rank}"
        )
    streams = list(dict.fromkeys(span.stream for span in chosen.spans if span.end_ns))
    figure = _figure(height=1.2 + 0.4 * len(streams))
    axes = figure.add_subplot()
    kinds = dict.fromkeys(span.kind for span in chosen.spans if span.end_ns > span.start_ns)
    for kind in kinds:
        for number, stream in enumerate(streams):
            bars = [
                (span.start_ns / 1e6, (span.end_ns - span.start_ns) / 1e6)
                for span in chosen.spans if span.kind == kind and span.stream == stream
            ]
            edge = {"hatch": "//"} if kind in COLLECTIVES else {}
            axes.broken_barh(
                bars, (number - ROW / 2, ROW), facecolors=COLOURS.get(kind, OTHER),
                label=kind if number == 0 else f"_{kind}", **edge,
            )
    axes.set_yticks(range(len(streams)), streams)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title(f"{record.scenario} on {record.backend}, rank {chosen.rank}")
    patches = [_patch(kind) for kind in kinds]
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    return figure


def memory(record: RunRecord, *, rank: int | None = None) -> Any:
    """matplotlib's Figure of a rank's allocated bytes after each op, in the order of issue.

    By default of the rank that peaks highest. PictureError as `timeline`, and where the Run has no
    bytes op by op.
    """
    highest = max(
        record.ranks, key=lambda each: (each.phases["steady"].memory.peak_bytes, -each.rank)
    )
    chosen = _rank(record, highest.rank if rank is None else rank)
    steady = chosen.phases["steady"].memory
    if not steady.timeline:
        raise PictureError(
            where=record.scenario, expected="a Run with bytes after each op",
            found=f"none of rank {chosen.rank}",
        )
    figure = _figure(height=3.2)
    axes = figure.add_subplot()
    gib = [nbytes / 2**30 for nbytes in (steady.start_bytes, *[n for _, n in steady.timeline])]
    axes.step(range(len(gib)), gib, where="post", color=COLOURS["backward"])
    axes.axhline(steady.peak_bytes / 2**30, color=COLOURS["reduce_scatter"], linestyle="--")
    axes.annotate(f"peak in {steady.peak_at}", (0, steady.peak_bytes / 2**30), va="bottom")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("ops issued")
    axes.set_ylabel("GiB allocated")
    axes.set_title(f"{record.scenario} on {record.backend}, rank {chosen.rank}")
    return figure


def spans_frame(record: RunRecord) -> Any:
    """A DataFrame of pandas with a row for each span of each recorded rank."""
    return data_frame(
        [
            (rank.rank, *(getattr(span, column) for column in SPAN_COLUMNS))
            for rank in record.ranks for span in rank.spans
        ],
        ("rank", *SPAN_COLUMNS),
    )


def _rank(record: RunRecord, rank: int | None) -> RankRun:
    recorded = {each.rank: each for each in record.ranks}
    chosen = next(iter(recorded)) if rank is None else rank
    if chosen not in recorded:
        raise PictureError(
            where="rank", expected=listed(recorded), found=str(rank)
        )
    return recorded[chosen]


def _figure(*, height: float) -> Any:
    """matplotlib's Figure, which keeps no global state."""
    matplotlib = library(
        "matplotlib.figure", error=PictureError, where="a plot", expected="matplotlib",
        remedy="pip install 'zsim[notebook]'",
    )
    return matplotlib.Figure(figsize=(9.0, height), layout="constrained")


def _patch(kind: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(facecolor=COLOURS.get(kind, OTHER), label=kind)
