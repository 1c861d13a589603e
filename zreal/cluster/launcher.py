"""Place of this process among the ranks that a launcher has started, by environment variables:
torchrun's, Open MPI's, MPICH's or Slurm's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from zsim.errors import ZsimError

DEFAULT_PORT = 29_500
PORTS = range(20_000, 30_000)
"""Ports of Slurm's job steps, below those that systems hand out themselves."""
MOST_RANKS = 10**7
NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")


class LauncherError(ZsimError):
    """No launcher started this process, or its variables contradict each other or the scenario."""


@dataclass(frozen=True, slots=True)
class Variables:
    """Names of a launcher's variables; "" for those that it does not set."""

    launcher: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    node: str
    nodes: str


TORCHRUN = Variables(
    "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK",
    "GROUP_WORLD_SIZE",
)
OPEN_MPI = Variables(
    "mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE", "", "",
)
MPICH = Variables(
    "mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "", ""
)
SLURM = Variables(
    "srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "", "SLURM_NODEID", "SLURM_NNODES"
)
LAUNCHERS = (TORCHRUN, OPEN_MPI, MPICH, SLURM)
"""Launchers by precedence: of several that have set variables, the first runs inside the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedRank:
    """Numbers of a rank, and the address and port at which it meets the others."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    """Ranks on this rank's node; all of them where the launcher does not say."""
    node: int
    address: str
    port: int


def launched_rank(environment: Mapping[str, str]) -> LaunchedRank:
    """The rank that a launcher has made of the process with this `environment`.

    LauncherError without a launcher, for a variable that is missing or no number, and for two that
    contradict each other.
    """
    variables = next(
        (each for each in LAUNCHERS if each.rank in environment and _is_a_rank(each, environment)),
        None,
    )
    if variables is None:
        raise LauncherError(
            where="zreal.worker",
            expected="RANK and WORLD_SIZE, or the variables of srun or mpirun",
            found="none",
            remedy="start it by torchrun, srun or mpirun, as `torchrun --nproc-per-node 2 -m "
                   "zreal.worker SCENARIO --save RUN.json`",
        )
    _require_no_contradiction(variables, environment)
    world_size = _number(environment, variables.world_size, low=1, high=MOST_RANKS)
    rank = _number(environment, variables.rank, high=world_size - 1, limit=variables.world_size)
    local_world_size = _local_world_size(variables, environment, world_size)
    local_rank = (
        _number(environment, variables.local_rank, high=local_world_size - 1,
                limit=variables.local_world_size or variables.world_size)
        if variables.local_rank in environment
        else rank % local_world_size
    )
    node = (
        _number(environment, variables.node, high=world_size - 1, limit=variables.world_size)
        if variables.node in environment
        else rank // local_world_size
    )
    if local_rank > rank:
        raise _contradiction(environment, variables.local_rank, variables.rank)
    return LaunchedRank(
        launcher=variables.launcher, rank=rank, world_size=world_size, local_rank=local_rank,
        local_world_size=local_world_size, node=node,
        address=_address(environment, is_alone=local_world_size == world_size),
        port=_port(environment),
    )


def _is_a_rank(variables: Variables, environment: Mapping[str, str]) -> bool:
    """False in the script of a batch job: Slurm numbers it 0, and it is no rank of a job step."""
    is_script = (
        environment.get("ENVIRONMENT") == "BATCH"
        and not {"SLURM_STEP_ID", "SLURM_STEPID"} & environment.keys()
    )
    return variables is not SLURM or not is_script or environment.get("SLURM_NTASKS") == "1"


def _require_no_contradiction(variables: Variables, environment: Mapping[str, str]) -> None:
    """LauncherError where RANK was set by hand, once for all, and srun or mpirun number ranks."""
    if variables is not TORCHRUN or "TORCHELASTIC_RUN_ID" in environment:
        return  # torchrun starts ranks of its own, whatever has started it
    for other in LAUNCHERS[1:]:
        if other.rank in environment and _is_a_rank(other, environment):
            for mine, theirs in (
                (variables.rank, other.rank), (variables.world_size, other.world_size)
            ):
                if theirs in environment and environment.get(mine) != environment[theirs]:
                    raise _contradiction(environment, mine, theirs)
            return


def _contradiction(environment: Mapping[str, str], first: str, second: str) -> LauncherError:
    return LauncherError(
        where="zreal.worker", expected=f"{first} and {second} that fit each other",
        found=f"{first}={environment.get(first, '')[:20]} and "
              f"{second}={environment.get(second, '')[:20]}",
        remedy=f"unset {first}, or set it in each rank rather than once for all",
    )


def _local_world_size(
    variables: Variables, environment: Mapping[str, str], world_size: int
) -> int:
    """Ranks on this node: the launcher's number, else those of an even layout over its nodes."""
    if variables.local_world_size in environment:
        return _number(
            environment, variables.local_world_size, low=1, high=world_size,
            limit=variables.world_size,
        )
    if variables is SLURM and "SLURM_STEP_TASKS_PER_NODE" in environment:
        return _tasks_of_node(environment, world_size)
    nodes = environment.get(variables.nodes, "1")
    even = nodes.isdecimal() and int(nodes[:8]) > 0 and world_size % int(nodes[:8]) == 0
    return world_size // int(nodes[:8]) if even else world_size


def _tasks_of_node(environment: Mapping[str, str], world_size: int) -> int:
    """Tasks on this node by Slurm's list, as "8(x2),4"."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    node = _number(environment, "SLURM_NODEID", high=MOST_RANKS)
    for entry in environment[name][:10_000].split(","):
        if (match := re.fullmatch(r"(\d{1,7})(?:\(x(\d{1,7})\))?", entry)) is None:
            raise _no_number(environment, name, "Slurm's numbers of tasks, as 8(x2)")
        node -= int(match[2] or 1)
        if node < 0 < int(match[1]) <= world_size:
            return int(match[1])
    raise _contradiction(environment, name, "SLURM_NODEID")


def _number(
    environment: Mapping[str, str], name: str, *, low: int = 0, high: int, limit: str = ""
) -> int:
    """The variable's number; LauncherError where it has none from `low` to `high`."""
    text = environment.get(name, "")
    if not (text.isascii() and text.isdecimal() and low <= int(text[:12]) <= high):
        below = f", by {limit}={environment.get(limit, '')[:20]}" if limit in environment else ""
        raise _no_number(environment, name, f"a number from {low} to {high}{below}")
    return int(text)


def _no_number(environment: Mapping[str, str], name: str, expected: str) -> LauncherError:
    value = environment.get(name)
    return LauncherError(
        where="zreal.worker", expected=f"{name}: {expected}",
        found="no such variable" if value is None else repr(value[:40]),
        remedy="start it by torchrun, srun or mpirun, which set it",
    )


def _address(environment: Mapping[str, str], *, is_alone: bool) -> str:
    """The host of rank 0: MASTER_ADDR, else the first of Slurm's, else this one if it is the only
    one."""
    if address := environment.get("MASTER_ADDR", "").strip():
        return address
    for name in NODE_LISTS:
        if hosts := environment.get(name):
            return first_host(hosts)
    if is_alone:
        return "127.0.0.1"
    raise LauncherError(
        where="zreal.worker", expected="MASTER_ADDR, the host of rank 0", found="none",
        remedy="set it for every rank, as `mpirun -x MASTER_ADDR=$(hostname) …`",
    )


def first_host(hosts: str) -> str:
    """The first host of Slurm's list, in which brackets hold numbers.

    >>> first_host("gpu[003-010,012],login1"), first_host("a1,b[2-3]")
    ('gpu003', 'a1')
    """
    name = r"(?:[^\[\],\s]|\[\d+(?:[-,]\d+)*\])+"
    if (match := re.match(rf"({name})(?:,|$)", hosts[:10_000])) is None:
        raise LauncherError(
            where="zreal.worker", expected="a list of Slurm's hosts, as gpu[003-010]",
            found=repr(hosts[:40]), remedy="set MASTER_ADDR to the host of rank 0",
        )
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match[1])


def _port(environment: Mapping[str, str]) -> int:
    """MASTER_PORT, else one for Slurm's job and step, which ranks of other steps do not meet at."""
    if "MASTER_PORT" in environment:
        return _number(environment, "MASTER_PORT", low=1, high=2**16 - 1)
    job, step = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_STEP_ID", "")
    if not job.isdecimal():
        return DEFAULT_PORT
    number = 31 * int(job[:18]) + (int(step[:18]) if step.isdecimal() else 0)
    return PORTS[number % len(PORTS)]
