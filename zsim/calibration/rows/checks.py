"""What rows of all sources are asked: axes that are not simulated, figures that say the same twice,
dtypes, and what nobody has read.

Whatever a row says changes its scenario, is named as assumed and widens its band, or is why the row
is skipped; so is what contradicts itself. Nothing here looks at a prediction.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import hypot

from zsim.calibration.rows.records import FALSE, TRUE, Record, RowError, same

_AXIS = re.compile(
    r"(?:n|num|degree)?_?(?:tp|pp|cp|ep|sp|etp|vpp|(?:tensor|pipeline|context|expert|sequence)(?:_model)?(?:_?parallel(?:ism)?)?|model_?parallel"
    r"(?:ism)?|ulysses)(?:_(?:size|degree|ways?|world_size|ranks?|dim|shards?|stages?|enabled))?"
)
NOTHING = ("", "none", "no", "false", "off", "n/a", "na", "nan", "-", "null", "0", "1", "disabled")
OUTCOMES = re.compile(
    r".*(?:mfu|hfu|peak_mem|peak_active|max_reserved|mem_metric|memory_g|flops|loss|_range).*|.*_(?:derived|recomputed|inferred)(?:_\w+)?"
    r"|table|source|date|notes?|comments?|url|license|provenance|tool|framework|version|readme_revision|measured_by|subset|config_name|run|id"
)
"""Columns that say what came out of a run or where it was published, and nothing of what ran; but
for remarks, which may say anything."""
REMARKS = ("note", "notes", "comment", "comments")
DTYPES = {
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp16": "fp16",
    "float16": "fp16",
    "half": "fp16",
    "fp32": "fp32",
    "float32": "fp32",
    "float": "fp32",
    "tf32": "tf32",
    "fp8": "fp8",
    "float8": "fp8",
    "e4m3": "fp8",
    "e4m3fn": "fp8",
    "e5m2": "fp8",
}
RATES: Mapping[str, tuple[bool, float]] = {
    "tokens_per_s_per_gpu": (True, 1.0),
    "tokens_per_s": (True, 0.0),
    "tokens_per_s_total": (True, 0.0),
    "step_time_s": (False, 1.0),
    "iter_time_ms": (False, 1e-3),
    "step_time_ms": (False, 1e-3),
    "tokens_per_s_per_gpu_derived": (True, 1.0),
    "step_time_s_derived": (False, 1.0),
}
"""Columns that say how long a step took: whether as a rate, and in what: of one GPU, of all (0), or
seconds of the unit."""
UNREAD, UNSAID = 0.1, 0.05
"""How much wider a band is for a column that nobody has read, as much as a generation of software
moves a step, and for a field that a row leaves open where other rows of its source have what is
usual there."""
PEAKS: dict[str, float] = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}
"""Dense FLOP/s in bf16 that sources divide by for their MFU (NVIDIA's data sheets)."""


COMPILING = 0.2
"""How much wider it is where nobody says whether a step was compiled: torch.compile moves steps by
15 to 25 %."""


@dataclass(slots=True)
class Assumed:
    """What a row leaves open and its mapping decides, in words, by how much that widens the band,
    and whether others used its network."""

    words: list[str] = field(default_factory=list)
    widened: float = 0.0
    shared: bool = False

    def add(self, words: str, *, widens: float = 0.0) -> None:
        """One more; widths are independent of one another, so their squares add up."""
        if words not in self.words:
            self.words.append(words)
            self.widened = hypot(self.widened, widens)


COMPILES = {
    **dict.fromkeys(TRUE, True),
    **dict.fromkeys(FALSE, False),
    **dict.fromkeys(("compiled", "compile", "torch.compile", "inductor"), True),
    **dict.fromkeys(("eager", "uncompiled"), False),
}
"""What people write into `torch_compile`."""
OF_COMPILING = frozenset(
    (
        *(
            "per", "each", "every", "block", "blocks", "layer", "layers", "transformer",
            "transformerblock", "transformerblocks",
        ),
        *(
            "regional", "torch", "compile", "inductor", "default", "mode", "fullgraph", "dynamic",
            "shapes", "true", "false",
        ),
    )
)
"""Words in brackets behind a yes that are how torchtitan compiles, or change nothing."""


def compiling(record: Record) -> bool | None:
    """Whether `torch_compile` says that the step is compiled; None where it says nothing, RowError
    for a remark that is not known."""
    words = record.text("torch_compile", "").lower()
    said = re.fullmatch(r"([\w.]+)\s*\(([^()]*)\)", words)
    answer, remark = (said[1], set(re.findall(r"[a-z0-9]+", said[2]))) if said else (words, set())
    found = COMPILES.get(answer)
    if words and (found is None or remark - (OF_COMPILING if found else {"eager"})):
        raise RowError(f"torch_compile: expected True or False, found {words[:40]!r}")
    return found


def is_compiled(record: Record, assumed: Assumed) -> bool:
    """What `torch_compile` says, and eager where it says nothing, which is named."""
    found = compiling(record)
    if found is None:
        assumed.add("eager, for the row does not say whether it is compiled", widens=COMPILING)
    if found and re.search(r"\bdynamic\b(?!\s*=\s*false)", record.text("torch_compile").lower()):
        assumed.add("kernels of dynamic shapes as those of static ones", widens=UNSAID)
    return bool(found)


def only_data_parallel(record: Record) -> None:
    """RowError where any column, however it is spelled, splits tensors, layers, sequences or
    experts over GPUs."""
    for name in record.fields:
        if not _AXIS.fullmatch(re.sub(r"[\s\-.]+", "_", name.strip().lower())):
            continue
        value = record.text(name, "")
        number = re.fullmatch(r"([0-9]{1,15})(?:\.0*)?", value)
        if value.lower() not in NOTHING and not (number and int(number[1]) <= 1):
            raise RowError(f"{name} = {number[1] if number else value[:40]}: only data "
                           f"parallelism is simulated")


def said(
    record: Record, name: str, expected: float, *, within: float = 0.02, rounding: float = 0.0
) -> None:
    """RowError where the field is there and says something else than `expected`; `rounding` is what
    its digits may hide."""
    if record.text(name, ""):
        found = record.number(name)
        if abs(found - expected) > rounding:
            same(name, found, expected, within=within)


def not_doubted(record: Record, name: str) -> None:
    """RowError where the source itself says that the row does not fit together."""
    if not record.truth(name, True):
        raise RowError(f"{name}: {record.text(name)[:20]}, so the source itself says that its "
                       f"fields do not fit together")


def seconds_of(record: Record, usual: str, *, tokens: int, ranks: int, assumed: Assumed) -> float:
    """Seconds of a step in which each GPU has `tokens`: as the column `usual` says, or where there
    is none another of `RATES`.

    RowError where no column says it, and where two contradict each other.
    """
    names = [name for name in (usual, *RATES) if record.text(name, "")]
    if not names:
        record.text(usual)
    if names[0] != usual:
        assumed.add(f"the time by {names[0]}, for there is no {usual}")
    is_rate, unit = RATES[names[0]]
    found = record.positive(names[0])
    seconds = tokens * (unit or ranks) / found if is_rate else found * unit
    for name in dict.fromkeys(names[1:]):
        is_rate, unit = RATES[name]
        said(record, name, tokens * (unit or ranks) / seconds if is_rate else seconds / unit)
    return seconds


def micro_batch(
    record: Record, key: str, *, total: str, steps: str, ranks: int, assumed: Assumed
) -> int:
    """Sequences of a micro-batch: the field `key`, or what `total` makes of `ranks` and of the
    micro-batches that `steps` says.

    Without `steps` a step is one micro-batch, which is named. RowError where `total` is missing
    too, or no multiple.
    """
    if record.text(key, "") or not record.text(total, ""):
        return record.size(key)
    count, sequences = record.size(steps, 1), record.size(total)
    if sequences % (count * ranks):
        raise RowError(f"{total}: {sequences} is no multiple of {count * ranks}, which the other "
                       f"fields say")
    known = bool(record.text(steps, ""))
    found = sequences // (count * ranks)
    assumed.add(
        f"micro-batches of {found}, which {total} makes" + ("" if known else " of one a step"),
        widens=0.0 if known else UNSAID,
    )
    return found


def accumulation(record: Record, key: str, *, total: str, at_once: int) -> int:
    """Micro-batches of a step: the field `key`, or what the `total` batch makes of `at_once`
    sequences; RowError where they disagree."""
    if not record.text(key, "") and record.text(total, ""):
        sequences = record.size(total)
        if sequences % at_once:
            raise RowError(f"{total}: {sequences} is no multiple of {at_once}, which the other "
                           f"fields say")
        return sequences // at_once
    count = record.size(key)
    said(record, total, count * at_once)
    return count


def utilisation(
    record: Record, names: tuple[str, ...], flops_per_s: float, *, model: str, percent: bool
) -> None:
    """RowError where an MFU is not that of `flops_per_s` on the GPU `model`; within 15 %, for
    sources count FLOPs each in its own way."""
    if model in PEAKS:
        for name in names:
            said(record, name, (100 if percent else 1) * flops_per_s / PEAKS[model], within=0.15)


def unsaid(record: Record, names: Iterable[str], assumed: Assumed) -> None:
    """Names the fields among `names` that the row leaves open, for which its mapping takes what its
    source usually has."""
    missing = [name for name in names if not record.text(name, "")]
    if missing:
        assumed.add(f"as the source usually has them, for the row does not say: "
                    f"{', '.join(missing)}", widens=UNSAID)


def whole_field(record: Record) -> tuple[str, ...]:
    """Words for `assumed` where a field that is read may have lost its end: the file's last, behind
    which there is no line end."""
    name = record.unended
    return (whole_to_the_end(name, record.text(name, "")),) if name in record.asked else ()


def whole_to_the_end(name: str, value: str) -> str:
    """The words for a field `name` behind which its file ends without a line end, as one that was
    cut does."""
    return f"{name} = {value[:40]!r} whole, though the file ends there without a line end"


def unknown(record: Record) -> tuple[str, ...]:
    """The columns that no mapping has asked for, whether or not the row says something there, but
    those of what came out of a run."""
    return tuple(
        name
        for name in record.fields
        if name not in record.asked and not OUTCOMES.fullmatch(name.strip().lower())
    )


_PEAK_MEMORY = re.compile(r"peak_(?:mem|active|reserved)\w*|max_(?:mem|reserved|allocated)\w*")


def some_memory(record: Record) -> None:
    """RowError where a peak of memory is none or less: nothing asks for it, but such a row was
    never measured."""
    for name in record.fields:
        value = record.text(name, "") if _PEAK_MEMORY.fullmatch(name.lower()) else ""
        if re.fullmatch(r"-\d[\d.]*|0[0.]*", value):
            raise RowError(f"{name}: expected bytes that something took, found {value[:40]!r}")


def unread(record: Record, assumed: Assumed) -> None:
    """Names what the row says and no mapping has asked for."""
    for name in unknown(record):
        if value := record.fields[name].strip():
            assumed.add(
                f"{name} = {value[:40]!r} changes nothing: the column is not known", widens=UNREAD
            )
    for name in REMARKS:
        if value := record.text(name, ""):
            assumed.add(
                f"{name} = {value[:40]!r} changes nothing: it is not understood", widens=UNREAD
            )
