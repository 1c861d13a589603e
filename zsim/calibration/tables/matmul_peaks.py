"""Tables of the fastest single matrix products of accelerators: a shape, its dtype, and the rate
that was reached.

A product alone, repeated on a device that does nothing else and picked as the best of many shapes,
is faster than the same product in a training step, whose clocks are lower for long and whose
products are launched once each. Device presets hold what training reaches, and `compute.alone` how
much less time the best product alone takes: one factor for A100 and one for what came after it,
from these very tables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from zsim.calibration.rows.checks import said, whole_field
from zsim.calibration.rows.records import Record, RowError
from zsim.calibration.vocabulary.gpu import is_sized, part_of
from zsim.cluster.devices import Device, load_device
from zsim.engine.kernel_time import alone, product_s

COLUMNS = frozenset(("gpu", "dtype", "tflops", "shape_mxnxk"))
DTYPES: Mapping[str, str] = {
    "bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "float16": "float16",
    "fp32": "float32", "float32": "float32", "half": "float16",
    **{
        f"{name}{form}": "float8"
        for name in ("fp8", "float8")
        for form in ("", "_e4m3", "_e4m3fn", "_e5m2")
    },
}
NBYTES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4, "float8": 1}
_DENSE = frozenset(
    (
        *(
            "gemm", "gemms", "hgemm", "sgemm", "matmul", "matmuls", "mm", "matrix", "multiply",
            "multiplication", "product", "products",
        ),
        *(
            "dense", "max", "maximum", "peak", "best", "highest", "top", "achievable", "achieved",
            "reached", "measured", "rate", "rates",
        ),
        *(
            "mamf", "finder", "benchmark", "flops", "tflops", "throughput", "performance",
            "compute", "tensor", "core", "cores", "single",
        ),
        *("square", "cublas", "cublaslt", "torch", "of", "a", "with", "in"),
    )
)
"""Words of the one kind of product that there is a model of."""
_OTHER_KIND = re.compile(
    r"(?:semi-?)?(?:structured[- ]?)?spars\w+|\b2:4\b|\bbatch(?:ed|es|\s*=\s*(?!1\b)\d)|\bgrouped\b|\bbmm\b|\bp2p\b"  # noqa: E501
)
_NOT_SPARSE = re.compile(r"\b(?:no|not|non|without|w/o)[- ]*(?:structured[- ]?)?spars\w+")
WIDTHS: Mapping[str, float] = {"measured": 0.05, "calibrated": 0.1, "published": 0.15}
"""Half-width of a product's band by its efficiency's provenance; 0.3 for any other, as of a whole
step from assumed constants."""

LEAST_S = 1e-6
"""Of a kernel, however little it does: empty ones take about 3 us from launch to launch, as little
as hardware and drivers let them (NVIDIA's developer forum, thread 233645). A third of it, for
graphs launch faster: what is below is another shape or another unit."""
LARGEST_CACHE = 128 * 2**20
"""Bytes: no GPU of the presets has a larger L2 (40 MB in A100, 50 in H100, 96 in L40S, by NVIDIA's
papers on their architectures, and 126 in B200). What of a product does not fit in it is read from
memory, or written there, at every repetition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A measured product of an m × k and a k × n matrix, in seconds, and the preset of the device
    that it ran on."""

    source: str
    line: int
    gpu: str
    dtype: str
    shape: tuple[int, int, int]
    device: str
    seconds: float
    fields: Mapping[str, str]
    assumed: tuple[str, ...]

    @property
    def predicted_s(self) -> float:
        """Seconds by `zsim.engine.kernel_time`, for one alone: the waves of the best tile, or the
        bytes of both factors and the result, and the kernel's start."""
        device = load_device(self.device)
        m, n, k = self.shape
        by_bytes = _nbytes(self.shape, self.dtype) / (
            device.memory_bandwidth * device.memory_efficiency
        )
        return (
            max(product_s((1, m, n, k), device, self.dtype) * alone(device), by_bytes)
            + device.kernel / 1e9
        )

    @property
    def band(self) -> tuple[float, float]:
        """Factors around the prediction: as wide as the efficiency's provenance."""
        width = WIDTHS.get(_provenance(load_device(self.device), self.dtype), 0.3)
        return 1 - width, 1 / (1 - width)


def _nbytes(shape: tuple[int, int, int], dtype: str) -> int:
    """Bytes of both factors and of the result, which has at least two for each element."""
    m, n, k = shape
    return NBYTES[dtype] * (m * k + k * n) + max(2, NBYTES[dtype]) * m * n


def _provenance(device: Device, dtype: str) -> str:
    key = "device.float8_efficiency" if dtype == "float8" else "device.matmul_efficiency"
    return next(figure.provenance for figure in device.figures if figure.key == key)


def product(record: Record, *, source: str) -> Product:
    """The product of one row; RowError for one without a shape, and for another accelerator or
    dtype than there are presets of."""
    gpu = record.text("gpu")
    text = record.text("shape_mxnxk", "")
    if not text:
        raise RowError("shape_mxnxk: none given, so there is no product to predict")
    _is_dense(record)
    sizes = re.fullmatch(r"(\d{1,7})\s*([x×*])\s*(\d{1,7})\s*\2\s*(\d{1,7})", text.lower())
    if sizes is None or not all(map(int, sizes.group(1, 3, 4))):
        raise RowError(f"shape_mxnxk: expected sizes as 1024x2048x4096, found {text[:40]!r}")
    m, n, k = map(int, sizes.group(1, 3, 4))
    dtype = _dtype(record)
    part, rate = part_of(gpu), record.positive("tflops")
    if dtype == "float8" and not part.float8:
        raise RowError(f"dtype: {part.words} has no products of 8 bits")
    _possible(record, rate, load_device(part.device), dtype)
    seconds = 2 * m * n * k / (rate * 1e12)
    _reachable((m, n, k), dtype, seconds, load_device(part.device), rate)
    return Product(
        source=source,
        line=record.line,
        gpu=gpu,
        dtype=dtype,
        shape=(m, n, k),
        device=part.device,
        seconds=seconds,
        fields={"gpu": gpu, "dtype": record.text("dtype"), "shape_mxnxk": text},
        assumed=(
            f"alone, {100 * alone(load_device(part.device)):.0f} % of the time that it takes in a "
            f"training step",
            *(() if is_sized(gpu) else (f"an {part.words}",)),
            *whole_field(record),
        ),
    )


def _is_dense(record: Record) -> None:
    """RowError where the row's words say that it was no single dense product: of sparse factors
    fewer are multiplied, of a batch more."""
    kind = _NOT_SPARSE.sub(" ", record.text("kind", "").lower())
    unknown = ", ".join(sorted(set(re.findall(r"[a-z0-9:]+", kind)) - _DENSE - DTYPES.keys()))
    if unknown:
        raise RowError(f"kind: expected a dense product, found {record.text('kind')[:40]!r}, of "
                       f"which {unknown[:40]} is not known")
    for name in ("notes", "software"):
        if other := _OTHER_KIND.search(_NOT_SPARSE.sub(" ", record.text(name, "").lower())):
            raise RowError(f"{name}: expected a dense product, found {other[0]!r}")


def _dtype(record: Record) -> str:
    """The dtype as devices name it; "FP8 (e4m3)", "torch.bfloat16" and the like are what people
    write."""
    words = re.sub(r"[\s()_-]+", "_", record.text("dtype").lower().removeprefix("torch.")).strip(
        "_"
    )
    if words not in DTYPES:
        raise RowError(f"dtype: expected one of {', '.join(DTYPES)}, found "
                       f"{record.text('dtype')[:40]!r}")
    return DTYPES[words]


def _possible(record: Record, rate: float, device: Device, dtype: str) -> None:
    """RowError for a rate above the device's peak or below a thousandth of it, and where the row's
    efficiency is not its rate's."""
    share = rate * 1e12 / device.peak_flops(dtype)
    if not 0.001 <= share <= 1:
        raise RowError(f"tflops: {rate:g} is {100 * share:.3g} % of the device's peak: another "
                       f"unit, or another device")
    if record.text("theory_tflops", "") and record.text("efficiency_pct", ""):
        said(record, "efficiency_pct", 100 * rate / record.positive("theory_tflops"))


def _reachable(
    shape: tuple[int, int, int], dtype: str, seconds: float, device: Device, rate: float
) -> None:
    """RowError where a kernel of the shape cannot be done in `seconds`: none starts and ends as
    fast, or its bytes do not come so fast."""
    beyond = _nbytes(shape, dtype) - LARGEST_CACHE
    least = max(LEAST_S, beyond / device.memory_bandwidth)
    if seconds < least:
        which = "a kernel takes at least" if least == LEAST_S else "its bytes from memory take"
        words = (
            f"{rate:g} of {'x'.join(map(str, shape))} are {seconds * 1e6:.3g} us, where {which} "
            f"{least * 1e6:.3g}"
        )
        raise RowError(f"tflops: {words}: another shape, or another unit")
