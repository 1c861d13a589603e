"""Host time of FSDP's hooks: `python -m tests.benchmarks.hooks` measures it per unit, in forward
and in backward, on this machine.

Blocks of nine tiny linear layers run with and without units; a block of Llama has as many
parameters. On the fake process group a collective is a call and nothing more. The difference
between 48 and 16 blocks leaves out what the root does. The lowest of many steps counts, as a shared
machine only ever adds.

The figure has in it what the simulator counts by itself: the copies' kernels and the calls of the
collectives. What CUDA's streams and events take besides it has not: `issue_hook` of the cluster
presets is that of whole steps on GPUs.
"""

from __future__ import annotations

import platform
import sys
import time
import warnings
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

from zreal import torch_private

FEW, MANY, STEPS, WIDTH, LAYERS = 16, 48, 60, 8, 9
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
Make = Callable[[list[nn.Module]], nn.Module]


def _fully_shard(
    blocks: list[nn.Module], *, keeps: bool = False, policy: MixedPrecisionPolicy | None = None
) -> nn.Module:
    policy = policy or MixedPrecisionPolicy()
    for block in blocks:
        fully_shard(block, mp_policy=policy, reshard_after_forward=not keeps)
    root = nn.Sequential(*blocks)
    fully_shard(root, mp_policy=policy)
    return root


def _flat(blocks: list[nn.Module], *, original: bool) -> nn.Module:
    def wrapped(module: nn.Module) -> FullyShardedDataParallel:
        return FullyShardedDataParallel(
            module, device_id=torch.device("cpu"), use_orig_params=original
        )

    return wrapped(nn.Sequential(*map(wrapped, blocks)))


CASES: dict[str, Make] = {
    "fsdp2": _fully_shard, "fsdp2, bf16": lambda blocks: _fully_shard(blocks, policy=BF16),
    "fsdp2, reshard_after_forward = false": lambda blocks: _fully_shard(blocks, keeps=True),
    "fsdp1": lambda blocks: _flat(blocks, original=False),
    "fsdp1, use_orig_params": lambda blocks: _flat(blocks, original=True),
}


def _blocks(number: int) -> list[nn.Module]:
    return [
        nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        for _ in range(number)
    ]


def _lowest(module: nn.Module) -> tuple[float, float]:
    """Seconds of forward and of backward."""
    x, forward, backward = torch.randn(4, WIDTH), [], []
    for _ in range(STEPS):
        began = time.perf_counter()
        loss = module(x).sum()
        between = time.perf_counter()
        loss.backward()
        forward.append(between - began)
        backward.append(time.perf_counter() - between)
        module.zero_grad(set_to_none=True)
    return min(forward[3:]), min(backward[3:])


def per_unit(make: Make) -> tuple[float, float]:
    """Seconds that a unit adds to forward and to backward."""
    more = []
    for number in (FEW, MANY):
        plain, wrapped = _lowest(nn.Sequential(*_blocks(number))), _lowest(make(_blocks(number)))
        passes = zip(wrapped, plain, strict=True)
        more.append([with_units - without for with_units, without in passes])
    forward, backward = ((many - few) / (MANY - FEW) for few, many in zip(*more, strict=True))
    return forward, backward


def main() -> None:
    """Print a line for each case."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with torch_private.fake_group(rank=0, world_size=8):
        for name, make in CASES.items():
            forward, backward = per_unit(make)
            sys.stdout.write(f"{name:38} forward {1e6 * forward:4.0f} us, backward "
                             f"{1e6 * backward:4.0f} us per unit\n")
    sys.stdout.write(f"{platform.machine()}, Python {platform.python_version()}, torch "
                     f"{torch.__version__}\n")


if __name__ == "__main__":
    main()
