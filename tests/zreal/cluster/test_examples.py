"""Example files for clusters: Slurm's and torchrun's run here over gloo, Kubernetes' is read; every
command line in them is one of our own parsers'."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import zreal.worker
from tests.support.folders import PARITY, ROOT
from zreal.worker import LauncherError
from zsim.cli.parser import parser
from zsim.runs import saved

EXAMPLES = ROOT / "zreal" / "cluster" / "examples"
TWO = PARITY / "fsdp2-mlp-2.toml"
ZSIM = f'exec "{sys.executable}" -m zsim "$@"'
TORCHRUN = f'exec "{sys.executable}" -m torch.distributed.run "$@"'
SRUN = f"""
expected="-N --ntasks-per-node --gpus-per-node --cpu-bind none --kill-on-bad-exit"
[ "$1 $3 $5 $7 $8 $9" = "$expected" ] || exit 9
ranks=$(($2 * $4))
shift 9
exec "{sys.executable}" "{ROOT / 'tests/support/launchers/slurm.py'}" $ranks "$@"
"""
"""srun with the options of the example, each known to it, in their order."""
RECORDED = (
    f"""exec "{sys.executable}" -c 'import json, sys; print(json.dumps(sys.argv[1:]))' """
    '"${0##*/}" "$@"'
)


def environment(folder: Path, variables: dict[str, str], **commands: str) -> dict[str, str]:
    """The environment in which each of `commands` is a script of this text."""
    for name, text in commands.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    inherited = {key: value for key, value in os.environ.items() if key not in launchers}
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return inherited | {"PATH": path, "OMP_NUM_THREADS": "1"} | variables


def require_commands(lines: str, known: dict[str, str]) -> None:
    """Each of the recorded commands is one of zsim, whose launcher starts, or of torchrun with a
    worker."""
    from torch.distributed.run import get_args_parser

    for line in lines.splitlines():
        command, *arguments = json.loads(line)
        if command == "zsim":
            launch = getattr(parser().parse_args(arguments), "launch", None)
            if launch not in (None, "gather"):
                ranks = {"nodes": 1, "ranks_per_node": 2, "ranks": 2, "worker": "true"}
                subprocess.run(shlex.split(launch.format(**ranks)), env=known, check=True)
        else:
            torchrun = get_args_parser().parse_args(arguments)
            assert (torchrun.module, torchrun.training_script) == (True, "zreal.worker")
            zreal.worker._parser().parse_args(torchrun.training_script_args)


@pytest.mark.parametrize("name", ["slurm.sh", "torchrun.sh", "kubernetes.yaml"])
def test_an_example_fits_a_screen_and_is_package_data(name: str) -> None:
    lines = (EXAMPLES / name).read_text().splitlines()
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 100
    assert "Change: " in "\n".join(lines)
    assert '"cluster/examples/*"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.gloo
def test_torchrun_on_two_nodes_ends_with_a_verdict_on_the_first(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        rendezvous = f"localhost:{free.getsockname()[1]}"
    variables = {
        "RENDEZVOUS": rendezvous, "SCENARIO": str(TWO), "RANKS_PER_NODE": "1",
        "RESULTS": str(tmp_path / "results"), "BACKEND": "gloo",
    }
    known = environment(tmp_path, variables, zsim=ZSIM, torchrun=TORCHRUN)
    nodes = [
        subprocess.Popen(
            ["bash", str(EXAMPLES / "torchrun.sh"), node], env=known, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for node in "01"
    ]
    (said, errors), (silence, others) = (node.communicate() for node in nodes)
    assert [node.returncode for node in nodes] == [0, 0], errors + others
    assert "agrees in order, bytes, memory and numerics" in said
    assert silence == ""
    run = saved.load(tmp_path / "results" / "fsdp2-mlp-2.measured.json")
    assert (run.provenance["launcher"], run.provenance["nodes"]) == ("torchrun", "2")


def test_the_pods_of_kubernetes_meet_at_the_first_and_its_commands_are_ours(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    name, spec = job["metadata"]["name"], job["spec"]
    pod: dict[str, Any] = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert (service["spec"]["clusterIP"], service["spec"]["selector"]) == (
        "None", {"job-name": name},
    )
    assert service["metadata"]["name"] == pod["subdomain"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    variables = {each["name"]: each["value"] for each in container["env"]}
    for node, commands in ((0, 2), (1, 1)):
        known = environment(
            tmp_path, variables | {"JOB_COMPLETION_INDEX": str(node)},
            zsim=RECORDED, torchrun=RECORDED,
        )
        done = subprocess.run(container["command"], capture_output=True, text=True, env=known)
        assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", commands)
        require_commands(done.stdout, known)
        arguments = json.loads(done.stdout.splitlines()[0])
        told = dict(zip(arguments[1::2], arguments[2::2], strict=False))
        assert told["--node-rank"] == str(node)
        assert told["--nnodes"] == str(spec["completions"]) == str(spec["parallelism"])
        assert told["--master-addr"] == f"{name}-0.{pod['subdomain']}"
        assert told["--nproc-per-node"] == str(container["resources"]["limits"]["nvidia.com/gpu"])


@pytest.mark.parametrize("name", ["slurm.sh", "torchrun.sh"])
def test_defaults_of_a_script_make_commands_of_ours(name: str, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").touch()
    unset = ("SCENARIOS", "SCENARIO", "RESULTS", "BACKEND", "RENDEZVOUS", "RANKS_PER_NODE")
    known = environment(
        tmp_path, {"VENV": str(tmp_path)}, zsim=RECORDED, torchrun=RECORDED, srun=SRUN,
    )
    done = subprocess.run(
        ["bash", str(EXAMPLES / name), "0"], capture_output=True, text=True,
        env={key: value for key, value in known.items() if key not in unset},
    )
    assert (done.returncode, done.stderr) == (0, "")
    require_commands(done.stdout, known)


def test_a_rank_that_is_refused_leaves_no_result_of_an_earlier_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gather would take it for one of this run."""
    earlier = tmp_path / "rank-0.json"
    earlier.write_text("{}")
    for key, value in (("RANK", "0"), ("WORLD_SIZE", "3"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(key, value)
    with pytest.raises(LauncherError, match="expected 2 ranks"):
        zreal.worker.main([str(TWO), "--results", str(tmp_path), "--device", "cpu"])
    assert not earlier.exists()
