"""The table of subjects, by strategy."""

from __future__ import annotations

from zreal.observer.subjects import (
    Build,
    ddp,
    deepspeed_engine,
    fsdp1,
    fsdp2,
    single,
    zero_redundancy,
)

SUBJECTS: dict[str, Build] = {
    "single": single.build,
    "ddp": ddp.build,
    "deepspeed1": deepspeed_engine.build, "deepspeed2": deepspeed_engine.build,
    "deepspeed3": deepspeed_engine.build,
    "fsdp2": fsdp2.build,
    "hsdp": fsdp2.build,
    "fsdp1": fsdp1.build,
    "zero_redundancy": zero_redundancy.build,
}
