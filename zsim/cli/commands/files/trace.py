"""`zsim trace`: the model of a module, by a backend that has torch."""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import cast

from zsim.autograd.traced import traced_file
from zsim.cli import outputs, terminal
from zsim.cli.inputs import UsageError
from zsim.io.units import counted
from zsim.models.training_options import DTYPE_NAMES
from zsim.runs import registry
from zsim.runs.backend import TracingBackend


def run(options: argparse.Namespace) -> int:
    """`zsim trace`: 0 where the model is written."""
    out = Path(options.out)
    outputs.require(out, option="-o")
    if not options.inputs:
        raise UsageError(
            where="--input", expected="an input of forward, as 2x2048:int64", found="none"
        )
    backend = cast(TracingBackend, registry.find("fake", where="zsim trace"))
    long = {short: name for name, short in DTYPE_NAMES.items()}
    with (
        terminal.progress(f"{options.module}: traced"),
        warnings.catch_warnings(record=True) as warned,
    ):
        warnings.simplefilter("always")
        models = backend.trace(
            options.module, options.inputs, dtype=long.get(options.dtype),  # type: ignore[arg-type]
            autocast=long.get(options.autocast, "none"),
            device=options.device, recomputed=options.checkpointing,
            micro_batches=options.micro_batch, lengths=options.sequence_length,
            units=() if options.units == ("none",) else options.units,
        )
    model = models[0]
    traced_file.save(model if len(models) == 1 else models, out)
    sizes = [(each.batch.micro_batch, each.batch.sequence_length) for each in models]
    report = {
        "file": str(out), "num_parameters": model.num_parameters,
        "units": [unit.fqn for unit in model.units],
        "micro_batch": sizes[0][0], "sequence_length": sizes[0][1], "sizes": sizes,
    }
    if options.json:
        terminal.write_json(report)
    else:
        terminal.say(
            f"{model.name}: {model.num_parameters:,} parameters in "
            f"{counted(len(model.units), 'unit')}"
        )
    terminal.wrote(out)
    for text in dict.fromkeys(str(each.message) for each in warned):
        terminal.note(text)
    terminal.note(
        f'a scenario has model = {{ traced = "{out.name}" }} and batch = {{ micro_batch = '
        f"{sizes[0][0]}, sequence_length = {sizes[0][1]} }}"
        + (f", or another of its {len(sizes)} sizes" if len(sizes) > 1 else "")
    )
    return 0
