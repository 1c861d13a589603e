"""A plain module and its optimizer, without any wrapper."""

from __future__ import annotations

from contextlib import nullcontext

from torch.distributed.device_mesh import DeviceMesh

from zreal.modules.initial_values import DTYPES, Make
from zreal.modules.modules import Model, cast_all
from zreal.observer.subjects import Subject, ddp
from zsim.scenario.scenario import Scenario


def build(scenario: Scenario, model: Model, mesh: DeviceMesh, make: Make) -> Subject:
    """`model` as it is, with a plain optimizer or one over master copies."""
    ddp.make_whole(scenario, make)
    masters = ddp.masters_of(scenario, model)
    cast_all(model, DTYPES[scenario.precision.parameters])
    return ddp.stepped(scenario, model, masters, micro_batch=lambda last: nullcontext())
