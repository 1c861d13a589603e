"""DeepSpeed's states on NVMe, on gloo ranks of this machine: `python -m
tests.measured.deepspeed_drives`.

It needs the extra `deepspeed`, and libaio with its headers (Debian's libaio-dev), with which
DeepSpeed compiles its own op async_io. That op made the record, on files of ext4. Each row is a
scenario, with figures of its first and last rank as in `tests.measured.deepspeed`. Besides it has
what the host did in order: collectives, requests to files, waits for them, and steps of sub-groups.
A test predicts them anew.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.measured.deepspeed import Tables, figures, rotating, rows
from zreal.observer.observer import observe
from zreal.observer.subjects import deepspeed_engine
from zreal.observer.subjects.table import SUBJECTS
from zreal.processes.rank_settings import settle
from zreal.processes.rendezvous import rendezvous
from zsim.ir.ops import COLLECTIVES, Op
from zsim.scenario.scenario import Scenario, parse

PLAIN: Tables = {"optimizer": "nvme"}
READ = PLAIN | {"pipeline_read": True, "buffer_count": 8}
WRITTEN = PLAIN | {"pipeline_write": True, "buffer_count": 9}
BOTH = PLAIN | {"pipeline_read": True, "pipeline_write": True, "buffer_count": 12}
WHOLE = PLAIN | {"parameters": "nvme", "parameter_buffer_size": 1_400_000, "max_in_cpu": 0}
"""Parameters too; weights of such blocks are of 2.5 MiB a rank."""
END = "end"
"""The mark of the end of construction, and of each step."""


def scenario(
    hidden: int, *, dims: tuple[int, ...] = (512, 512, 512), num_classes: int = 5, ranks: int = 2,
    accumulation: int = 1, dtype: str = "fp32", offload: Tables = PLAIN,
    optimizer: Tables | None = None, **strategy: Any,
) -> Scenario:
    """Blocks whose weights are 1 MiB and more of float32 a rank, and others that are not."""
    return Scenario(
        model={"family": "mlp", "sizes": {
            "dims": list(dims), "hidden": hidden, "num_classes": num_classes}},
        batch={"micro_batch": 2, "accumulation": accumulation},
        cluster={"preset": "cpu-gloo", "ranks": ranks},
        strategy={
            "name": "deepspeed3", "reduce_bucket_size": 1_000_000, "sub_group_size": 600_000,
            "stage3_param_persistence_threshold": 10, **strategy,
        },
        precision={"parameters": dtype, "reduce": "fp32"}, optimizer=optimizer or {},
        offload=offload,
    )


def scenarios() -> list[Scenario]:
    """Both dtypes and all pipelines; then places of parameters, sizes, optimizers, ranks."""
    return [
        *(
            scenario(1280, accumulation=2 - (dtype == "fp32"), dtype=dtype, offload=offload)
            for dtype, offload in product(("fp32", "bf16"), (PLAIN, READ, WRITTEN, BOTH))
        ),
        # a rest of each gradient, which is no whole KiB
        *(scenario(1101, dtype=dtype, offload=each) for dtype in ("fp32", "bf16")
          for each in (PLAIN, BOTH)),
        *(scenario(1280, offload=each | {"parameters": "cpu"}) for each in (PLAIN, BOTH)),
        # one sub-group, and small ones in host memory between those on drives
        scenario(1280, offload=BOTH, sub_group_size=10**9),
        scenario(1280, offload=BOTH, sub_group_size=300_000, accumulation=2),
        scenario(1280, offload=PLAIN, sub_group_size=1),
        # requests of 2 MiB, below which all gradients stay on the device
        scenario(1280, dtype="bf16", offload=PLAIN | {"block_size": "2 MiB", "queue_depth": 4}),
        scenario(1280, reduce_bucket_size=10_000_000, dtype="bf16", overlap_comm=False),
        *(scenario(1280, optimizer=each, offload=offload) for each, offload in product(
            ({"name": "sgd"}, {"name": "sgd", "momentum": 0.9, "clip_norm": 1.0},
             {"implementation": "fused", "clip_norm": 0.5}), (PLAIN, BOTH))),
        # as few buffers as train: without states, and of one sub-group with both pipelines
        scenario(1280, optimizer={"name": "sgd"}, offload=PLAIN | {"buffer_count": 2}),
        scenario(1280, offload=BOTH | {"buffer_count": 4}, sub_group_size=10**9),
        # more gradients than buffers, one in a bucket and several
        *(scenario(1280, dims=(512,) * 5, sub_group_size=1, reduce_bucket_size=size, dtype=dtype)
          for size, dtype in ((1_000_000, "fp32"), (1_500_000, "bf16"))),
        scenario(1280, offload=PLAIN | {"pin_memory": False}),
        # parameters on drives: all that stays in memory, nothing, a part; with and without reads
        # ahead; more of them than buffers, which their releases free; uneven ones
        *(
            scenario(2560, sub_group_size=1_400_000, offload=WHOLE | {"max_in_cpu": most}, **more)
            for most, more in (
                (10**9, {}), (0, {"stage3_prefetch_bucket_size": 0}), (0, {}),
                (1_400_000, {"stage3_max_reuse_distance": 0}),
            )
        ),
        scenario(2560, dims=(512,) * 5, offload=WHOLE, stage3_max_reuse_distance=0, accumulation=2),
        scenario(2561, dims=(513,) * 3, dtype="bf16", offload=WHOLE, stage3_max_reuse_distance=0),
        scenario(
            2560, dims=(1024,) * 4, dtype="bf16", stage3_max_reuse_distance=0,
            offload=BOTH | WHOLE | {"max_in_cpu": 2_000_000, "buffer_count": 12},
        ),
        scenario(1280, dims=(1024,) * 3, ranks=4),
        scenario(1283, dims=(1024,) * 3, ranks=4, dtype="bf16", offload=BOTH),
        # a shard of 1 MiB, but for the last rank's, which is an element less: that waits later
        scenario(1023, dims=(1026, 1026, 1026, 1026, 1025), ranks=4, sub_group_size=1),
        *broken(),
    ]


def broken() -> list[Scenario]:
    """Three blocks that change places in each forward, their sub-groups or all on drives.
    Sub-groups are whole blocks, or parameters, or one."""
    few, none = {"stage3_prefetch_bucket_size": 700_000}, {"stage3_prefetch_bucket_size": 0}
    many, whole = {"stage3_prefetch_bucket_size": 10_000_000}, {"offload": WHOLE}
    more, used_once = {"stage3_prefetch_bucket_size": 1_400_000}, {"stage3_max_reuse_distance": 0}
    buffers = {"offload": WHOLE | {"parameter_buffer_count": 20}}
    block, wide = {"sub_group_size": 656_100}, {"sub_group_size": 1_312_200}
    cases: list[tuple[int, Tables]] = [
        (1280, block),
        (1280, block | {"dtype": "bf16", "offload": BOTH, "accumulation": 2}),
        (1280, block | {"offload": READ, "accumulation": 3} | many),
        (1101, {"sub_group_size": 564_400, "dtype": "bf16"} | none),
        (1280, {"sub_group_size": 1, "dtype": "bf16", "offload": PLAIN | {"parameters": "cpu"},
                "reduce_bucket_size": 1_500_000} | few),
        (1280, {"sub_group_size": 10**9, "offload": WRITTEN} | few | used_once),
        (2560, wide | whole), (2560, wide | whole | none),
        (2560, wide | whole | used_once | {"accumulation": 2}),
        (2560, wide | whole | used_once | more | {"accumulation": 3}),
        (2560, wide | buffers | more | {"dtype": "bf16"}),
    ]
    return [scenario(hidden, dims=(512,) * 4, trace="breaks", **more) for hidden, more in cases]


@contextmanager
def logged(log: list[str]) -> Iterator[None]:
    """Requests to files, waits, steps of sub-groups and ends of phases go to `log`."""
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Engine

    class Handle:
        def __init__(self, **settings: Any) -> None:
            self.own, self.last = AsyncIOBuilder().load(verbose=False).own_handle(**settings), ""

        def request(self, what: str, call: Any, arguments: tuple[Any, ...]) -> Any:
            self.last = what
            log.append(f"{what} {arguments[0].nbytes}")
            return call(*arguments)

        def async_pread(self, *arguments: Any) -> Any:
            return self.request("read", self.own.async_pread, arguments)

        def async_pwrite(self, *arguments: Any) -> Any:
            return self.request("write", self.own.async_pwrite, arguments)

        def wait(self) -> Any:
            log.append(f"await {self.last}")
            return self.own.wait()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.own, name)

    def load(builder: Any, verbose: bool = False) -> Any:
        module = own_load(builder, verbose=False)
        module.own_handle = getattr(module, "own_handle", module.aio_handle)
        module.aio_handle = Handle
        return module

    def stepped(engine: Any, number: int) -> Any:
        log.append("step")
        return own_step(engine, number)

    def ended(optimizer: Any, set_to_none: bool = True) -> None:
        log.append(END)

    own_load, own_step = AsyncIOBuilder.load, Engine._optimizer_step
    AsyncIOBuilder.load, Engine._optimizer_step = load, stepped
    own_end, deepspeed_engine.EngineOptimizer.zero_grad = (  # type: ignore[method-assign]
        deepspeed_engine.EngineOptimizer.zero_grad, ended
    )
    try:
        yield
    finally:
        AsyncIOBuilder.load, Engine._optimizer_step = own_load, own_step
        deepspeed_engine.EngineOptimizer.zero_grad = own_end  # type: ignore[method-assign]


def joined(log: list[str]) -> list[str]:
    """Requests of one kind that nothing lies between are one."""
    made: list[str] = []
    for line in log:
        what, _, nbytes = line.partition(" ")
        if nbytes.isdecimal() and made and made[-1].startswith(f"{what} "):
            line = f"{what} {int(made.pop().split()[1]) + int(nbytes)}"
        made.append(line)
    return made


def planned(ops: tuple[Op, ...]) -> list[str]:
    """The order of what the host does, as a Program has it."""
    made: list[str] = []
    drives: dict[int, str] = {}
    for op in ops:
        on_drive = [kernel for kernel in op.kernels if kernel.location == "drive"]
        if on_drive:
            drives[op.index] = on_drive[0].operator
        made += [f"{kernel.operator} {kernel.nbytes}" for kernel in on_drive]
        if op.kind == "host_wait":
            made += [f"await {drives[index]}" for index in op.waits if index in drives]
        elif op.kind in COLLECTIVES:
            made.append(op.kind)
        elif op.kind == "optimizer" and any(each.location == "host" for each in op.kernels):
            made.append("step")
    return joined(made)


def measured_rank(
    arguments: Tables, *, rank: int, world_size: int, port: int, **_: Any
) -> list[Tables]:
    """The phases of this rank, scenario by scenario, with what its host did in steps."""
    settle()
    store = rendezvous(rank=rank, world_size=world_size, port=port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    deepspeed_engine._deepspeed("cpu")
    measured: list[Tables] = []
    for text in arguments["texts"]:
        log: list[str] = []
        case = parse(text.encode(), where="row")
        breaks = case.options.trace == "breaks"
        SUBJECTS["deepspeed3"] = rotating if breaks else deepspeed_engine.build
        with deepspeed_engine.files_removed(), logged(log):
            build = deepspeed_engine.EngineOptimizer.__init__

            def begun(self: Any, engine: Any, build: Any = build, log: Any = log) -> None:
                build(self, engine)
                log.append(END)

            deepspeed_engine.EngineOptimizer.__init__ = begun  # type: ignore[method-assign]
            run = observe(
                case, rank=rank, steps=4 if breaks else 3,  # every other step follows
                progress=lambda told, log=log: log.append(str(told).partition(" ")[0]),
            ).run
            deepspeed_engine.EngineOptimizer.__init__ = build  # type: ignore[method-assign]
        ends = [index for index, line in enumerate(log) if line == END]
        order = {"first": log[ends[0] + 1 : ends[1]], "steady": log[ends[-2] + 1 : ends[-1]]}
        measured.append({
            name: figures(phase) | {"order": joined(order[name])} if name in order
            else figures(phase)
            for name, phase in run.phases.items()
        })
    return measured


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("tests/measured/deepspeed_drives.json"))
    parser.add_argument("--timeout", type=float, default=3600.0)
    asked = parser.parse_args()
    record = {
        "command": "python -m tests.measured.deepspeed_drives", "date": time.strftime("%Y-%m-%d"),
        "deepspeed": version("deepspeed"), "torch": torch.__version__,
        "async_io": "compiled by DeepSpeed's own loader with g++ and Debian's libaio-dev; files "
                    "opened with O_DIRECT on ext4",
        "kernel": platform.release().partition("-")[0],
        "rows": rows(scenarios(), "deepspeed_drives", timeout_s=asked.timeout),
    }
    asked.out.write_text(json.dumps(record, separators=(",", ":")).replace('{"text"', '\n{"text"'))
    return 0


if __name__ == "__main__":
    sys.exit(main())
