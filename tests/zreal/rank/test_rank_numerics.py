"""Numerics of real ranks. With the reference on rank 0 alone, one other bit on another rank is
noticed. Without a reference nothing agrees."""

from __future__ import annotations

import json

import pytest
import torch

from tests.support.folders import PARITY
from zreal.processes.launch import launch
from zreal.rank.numerics import digest
from zsim.cli.main import main
from zsim.scenario.scenario import load


def test_a_digest_depends_on_names_dtypes_and_every_bit():
    first = torch.arange(6, dtype=torch.float32)
    other = first.clone()
    other[5] = torch.nextafter(other[5], torch.tensor(9.0))
    tensors = [{"a": first}, {"b": first}, {"a": other}, {"a": first.bfloat16()}, {}]
    assert len({digest(each) for each in tensors}) == len(tensors)
    assert digest({"a": first, "b": other}) == digest({"b": other, "a": first.reshape(2, 3).T.T})


@pytest.mark.gloo
def test_sampled_numerics_agree_and_say_how(capsys):
    file = str(PARITY / "fsdp2-mlp-2.toml")
    assert main(["validate", file, "--numerics", "sampled", "--json"]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    (check,) = (each for each in checks if each["name"] == "numerics")
    assert check["status"] == "ok"
    assert check["detail"].endswith(
        "rank 0's, and the bits of all other ranks' parameters and gradients are those of rank 0"
    )


@pytest.mark.gloo
def test_numerics_that_are_not_asked_for_are_unsupported(capsys):
    asked = ["--numerics", "none", "--require", "numerics"]
    assert main(["validate", str(PARITY / "fsdp2-mlp-2.toml"), *asked]) == 1
    said = capsys.readouterr().out
    assert "numerics unsupported: not asked for (--numerics none)" in " ".join(said.split())
    assert said.endswith("FAILED: --require numerics\n")


@pytest.mark.gloo
@pytest.mark.quality
@pytest.mark.parametrize("what", ["parameters", "gradients"])
def test_one_bit_on_another_rank_is_noticed(what):
    scenario = load(PARITY / "ddp-mlp-2.toml")
    arguments = {"text": scenario.to_toml(), "what": what}
    differences = launch("tests.zreal.rank.numerics_ranks:one_bit_off", arguments, world_size=2)
    own, other = {"parameters": (0, 1), "gradients": (1, 0)}[what]
    assert differences[1][own] == "inf"
    assert differences[1][other] == differences[0][other]
    assert "inf" not in differences[0]
