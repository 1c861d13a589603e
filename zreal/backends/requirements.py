"""Packages and devices that a backend needs, and its words where they are missing."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from zsim.errors import BackendUnavailableError
from zsim.ir.gc_pause import uncollected
from zsim.models.families.transformers import TransformersModel
from zsim.scenario.scenario import Scenario

MAX_ERROR_CHARS = 300


def require_torch(backend: str) -> None:
    """BackendUnavailableError where torch is missing, or does not load because it is half installed
    or lacks a library."""
    spec = find_spec("torch")
    if spec is None:
        raise BackendUnavailableError(
            where=f"backend {backend}",
            expected="torch >=2.11,<2.14",
            found="no torch",
            remedy="pip install 'zsim[real]'",
        )
    try:
        with uncollected():
            import torch  # noqa: F401
    except Exception as error:  # a broken installation raises anything
        first_line = str(error).strip().partition("\n")[0][:MAX_ERROR_CHARS]
        raise BackendUnavailableError(
            where=f"backend {backend}",
            expected="a torch that can be imported",
            found=f"one at {spec.origin} that cannot: {type(error).__name__}: {first_line}",
            remedy="install it anew, pip install --force-reinstall 'zsim[real]', or take what "
                   "shadows it off the path",
        ) from error


def require_cuda(backend: str, *, remedy: str) -> None:
    """BackendUnavailableError where torch has no CUDA, or sees no device."""
    import torch

    if not torch.cuda.is_available():
        raise BackendUnavailableError(
            where=f"backend {backend}", expected="a CUDA device and a CUDA build of torch",
            found=f"torch {torch.__version__} without a device", remedy=remedy,
        )


def require_transformers(scenario: Scenario, backend: str) -> None:
    """BackendUnavailableError for a model of a config.json where transformers is missing, or is not
    the major version whose memory zsim knows."""
    if not isinstance(scenario.model, TransformersModel):
        return
    try:
        installed = version("transformers")
    except PackageNotFoundError:
        installed = ""
    if not installed.startswith("5."):
        raise BackendUnavailableError(
            where=f"backend {backend}, model.huggingface",
            expected="transformers >=5,<6, whose modules are trained",
            found=f"transformers {installed}" if installed else "no transformers",
            remedy="pip install 'zsim[real,huggingface]'",
        )
