"""Which GPU a source's words name: model, memory, form and power, token by token, and the presets
of that very part.

"A100-SXM4-80GB (400W)" holds a 40 and a 4 that say nothing of its memory, so numbers count only
with their units. A part that no preset is of, as one on a PCIe card, is refused by name: it has
other clocks, memory or links than its namesakes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from zsim.calibration.rows.records import RowError
from zsim.cluster.devices import load_device

FORMS = ("SXM", "NVL", "PCIE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A GPU that presets are of: GB of memory as it is sold, the memory's kinds, watts, its form,
    and the presets of it and of its node."""

    model: str
    memory_gb: tuple[int, ...]
    kinds: tuple[str, ...]
    watts: int
    device: str
    cluster: str
    form: str = "SXM"
    less: str = ""
    """What it has less of than the device that its preset is of, as words for `assumed`; "" for
    nothing."""

    @property
    def words(self) -> str:
        """As messages name it."""
        return f"{self.model} {self.form} of {self.memory_gb[0]} GB"

    @property
    def float8(self) -> bool:
        """Whether it has products of 8 bits."""
        return load_device(self.device).float8 > 0


PARTS: tuple[Part, ...] = (
    Part(
        model="A100", memory_gb=(80,), kinds=("HBM2E", "HBM2"), watts=400, device="a100-80",
        cluster="dgx-a100",
    ),
    Part(
        model="A100", memory_gb=(40,), kinds=("HBM2",), watts=400, device="a100-40",
        cluster="dgx-a100-40",
    ),
    Part(
        model="H100", memory_gb=(80,), kinds=("HBM3",), watts=700, device="h100-80",
        cluster="dgx-h100",
    ),
    Part(
        model="H100", memory_gb=(96,), kinds=("HBM2E",), watts=500, device="h100-96",
        cluster="grand-teton-h100",
    ),
    Part(
        model="H200", memory_gb=(141,), kinds=("HBM3E",), watts=700, device="h200-141",
        cluster="dgx-h200",
    ),
    Part(
        model="B200", memory_gb=(180, 192), kinds=("HBM3E",), watts=1000, device="b200-180",
        cluster="dgx-b200",
    ),
    *(
        Part(
            model=model, memory_gb=(80,), kinds=kinds, watts=watts, device=device, cluster=cluster,
            less=less,
        )
        for model, kinds, watts, device, cluster, less in (
            (
                "H800", ("HBM3",), 700, "h100-80", "hgx-h800",
                "an H800 as an H100 with 8 of its 18 NVLinks",
            ),
            (
                "A800", ("HBM2E", "HBM2"), 400, "a100-80", "hgx-a800",
                "an A800 as an A100 with 8 of its 12 NVLinks",
            ),
        )
    ),
    Part(
        model="L40S", memory_gb=(48,), kinds=("GDDR6",), watts=350, device="l40s-48",
        cluster="pcie-box", form="PCIE",
    ),
)
"""By the data sheets that the device presets name. The first of a model is the one that a name
without a size means."""
MODELS = tuple(dict.fromkeys(part.model for part in PARTS))
NEAR = 0.05
"""How far a power may be from the part's: 350 W is another part than 400 W."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """What a name says; 0 and "" where it says nothing."""

    model: str
    memory_gb: int
    kind: str
    form: str
    watts: int


def named(gpu: str) -> Named:
    """The tokens of `gpu`; RowError for one that names no known model, or two, or two sizes."""
    text = re.sub(r"PCI[-\s]?(?:EXPRESS|E)(?![A-Z])", "PCIE", gpu.upper().replace("_", " "))
    tokens = [re.sub(r"^\d{1,4}X(?=[A-Z])", "", token) for token in re.findall(r"[A-Z0-9]+", text)]
    split = [re.fullmatch(rf"({'|'.join(MODELS)})?(SXM\d?|NVL|PCIE)?", token) for token in tokens]
    models = {found[1] for found in split if found and found[1]}
    forms = {found[2][:3] for found in split if found and found[2]}
    form = next((name for name in FORMS if name[:3] in forms), "")
    sizes = {int(size) for size in re.findall(r"(?<![\d.])(\d{2,3})\s*GI?B?(?![A-Z0-9/])", text)}
    sizes |= set() if sizes else _bare(text)
    others = set(tokens) & {"MIG", "VGPU", "GRACE"}
    if len(models) != 1 or len(sizes) > 1 or others:
        raise _unknown(gpu)
    kind = re.search(r"\b(?:HBM\d[EM]?|GDDR\d)\b", text)
    watts = re.search(r"(?<![\d.])(\d{3,4})\s*W(?:ATTS?)?\b", text)
    return Named(
        model=models.pop(),
        memory_gb=sizes.pop() if sizes else 0,
        kind=kind[0] if kind else "",
        form=form,
        watts=int(watts[1]) if watts else 0,
    )


def _bare(text: str) -> set[int]:
    """A size without its unit, right behind the model and its form: A100-40, H100 SXM 80."""
    found = re.search(
        rf"({'|'.join(MODELS)})[-\s]*(?:SXM\d?[-\s]*|PCIE[-\s]*)?(\d{{2,3}})(?![\d.])(?!\s*[A-Z])",
        text,
    )
    sizes = {size for part in PARTS if found and part.model == found[1] for size in part.memory_gb}
    return {int(found[2])} & sizes if found else set()


def part_of(gpu: str) -> Part:
    """The part that `gpu` names, of the size that is usual where it says none; RowError for one
    that no preset is of."""
    said = named(gpu)
    for part in PARTS:
        if (
            part.model == said.model
            and (not said.memory_gb or said.memory_gb in part.memory_gb)
            and said.form in ("", part.form)
            and (not said.kind or said.kind in part.kinds)
            and (not said.watts or abs(said.watts / part.watts - 1) <= NEAR)
        ):
            return part
    raise _unknown(gpu)


def is_sized(gpu: str) -> bool:
    """Whether the name, one that `part_of` knows, says which of the model's sizes it is, or there
    is only one."""
    said = named(gpu)
    return (
        bool(said.memory_gb or said.kind or said.watts)
        or sum(part.model == said.model for part in PARTS) == 1
    )


def _unknown(gpu: str) -> RowError:
    known = ", ".join(part.words for part in PARTS)
    return RowError(f"gpu: expected an {known}, found {gpu[:60]!r}")
