"""Bytes that a rank holds, by kind, against sums of what torch's tensors themselves say."""

from __future__ import annotations

import torch
from torch import nn

from zreal.meters.held_memory import held_bytes, state_tensors


def test_tensors_that_share_a_storage_count_once_for_the_first_kind_that_has_them():
    weight = torch.ones(10)
    held = held_bytes(
        parameters=[weight, weight[:3]], gradients=[None, torch.ones(4, dtype=torch.bfloat16)],
        states=[weight[5:], torch.ones(2)],
    )
    assert held == {"parameters": 40, "gradients": 8, "optimizer_states": 8}


def test_a_view_holds_its_whole_storage():
    held = held_bytes(parameters=[torch.zeros(100)[:1]], gradients=[], states=[])
    assert held["parameters"] == 400


def test_freed_memory_holds_nothing():
    gone = torch.ones(10)
    gone.untyped_storage().resize_(0)
    assert held_bytes(parameters=[gone], gradients=[gone], states=[]) == {
        "parameters": 0, "gradients": 0, "optimizer_states": 0,
    }


def test_adamw_keeps_two_states_and_a_step_for_each_parameter():
    module = nn.Linear(3, 5)
    optimizer = torch.optim.AdamW(module.parameters())
    assert state_tensors(optimizer) == []
    module(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    gradients = [parameter.grad for parameter in module.parameters()]
    held = held_bytes(
        parameters=module.parameters(), gradients=gradients, states=state_tensors(optimizer)
    )
    assert held == {"parameters": 80, "gradients": 80, "optimizer_states": 2 * 80 + 2 * 4}


def test_states_in_host_memory_are_none_of_a_gpus():
    held = held_bytes(
        parameters=[torch.zeros(3, device="meta")], gradients=[], states=[torch.zeros(1)],
        device="cuda:0",
    )
    assert held == {"parameters": 0, "gradients": 0, "optimizer_states": 0}
