"""Every launcher's variables give each rank its numbers; what contradicts is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zreal.cluster.launcher import (
    LAUNCHERS,
    MPICH,
    OPEN_MPI,
    PORTS,
    SLURM,
    TORCHRUN,
    LauncherError,
    Variables,
    first_host,
    launched_rank,
)

HOSTS = {"MASTER_ADDR": "node-a", "MASTER_PORT": "29501"}
SIZES = st.tuples(st.integers(1, 5), st.integers(1, 9))


def environment(variables: Variables, *, nodes: int, per_node: int, rank: int) -> dict[str, str]:
    """Variables as the launcher sets them in one rank of a layout in blocks."""
    numbers = {
        variables.rank: rank, variables.world_size: nodes * per_node,
        variables.local_rank: rank % per_node, variables.local_world_size: per_node,
        variables.node: rank // per_node, variables.nodes: nodes,
    }
    own = {name: str(number) for name, number in numbers.items() if name}
    return own | ({"TORCHELASTIC_RUN_ID": "none"} if variables is TORCHRUN else {})


@given(sizes=SIZES, variables=st.sampled_from(LAUNCHERS), data=st.data())
def test_every_rank_gets_the_numbers_of_its_launcher(sizes, variables, data):
    nodes, per_node = sizes
    rank = data.draw(st.integers(0, nodes * per_node - 1))

    launched = launched_rank(
        environment(variables, nodes=nodes, per_node=per_node, rank=rank) | HOSTS
    )

    assert (launched.rank, launched.world_size) == (rank, nodes * per_node)
    assert (launched.local_rank, launched.local_world_size) == (rank % per_node, per_node)
    assert launched.node == rank // per_node
    assert (launched.launcher, launched.address, launched.port) == (
        variables.launcher, "node-a", 29501,
    )


@given(sizes=SIZES, inner=st.sampled_from(LAUNCHERS[:3]), data=st.data())
def test_a_launcher_inside_a_job_step_has_the_say(sizes, inner, data):
    nodes, per_node = sizes
    rank = data.draw(st.integers(0, nodes * per_node - 1))
    agent = environment(SLURM, nodes=nodes, per_node=1, rank=rank // per_node)
    own = environment(inner, nodes=nodes, per_node=per_node, rank=rank)
    assert launched_rank(agent | own | HOSTS) == launched_rank(own | HOSTS)


@given(rank=st.integers(0, 7), other=st.integers(0, 7), outer=st.sampled_from([SLURM, OPEN_MPI]))
def test_a_rank_set_by_hand_must_be_that_of_the_launcher(rank, other, outer):
    numbered = environment(outer, nodes=2, per_node=4, rank=other) | HOSTS
    by_hand = numbered | {"RANK": str(rank), "WORLD_SIZE": "8"}
    if rank == other:
        assert launched_rank(by_hand).rank == rank
        return
    with pytest.raises(LauncherError) as error:
        launched_rank(by_hand)
    assert error.value.found == f"RANK={rank} and {outer.rank}={other}"


@given(text=st.text(max_size=30), name=st.sampled_from(["RANK", "WORLD_SIZE", "LOCAL_RANK",
                                                          "MASTER_PORT", "GROUP_RANK"]))
def test_any_text_gives_numbers_in_range_or_a_launcher_error(text: str, name: str):
    variables = environment(TORCHRUN, nodes=2, per_node=2, rank=3) | HOSTS | {name: text}
    try:
        launched = launched_rank(variables)
    except LauncherError as error:
        assert name in str(error)
    else:
        assert 0 <= launched.local_rank <= launched.rank < launched.world_size
        assert 0 < launched.port < 2**16


@pytest.mark.parametrize(("variables", "message"), [
    ({}, "expected RANK and WORLD_SIZE, or the variables of srun or mpirun, found none"),
    ({"RANK": "0"}, "expected WORLD_SIZE: a number from 1 to 10000000, found no such variable"),
    ({"RANK": "2", "WORLD_SIZE": "2"},
     "expected RANK: a number from 0 to 1, by WORLD_SIZE=2, found '2'"),
    ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "1"},
     "LOCAL_RANK and RANK that fit each other, found LOCAL_RANK=1 and RANK=0"),
    ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "3"},
     "LOCAL_WORLD_SIZE: a number from 1 to 2, by WORLD_SIZE=2, found '3'"),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "99999"},
     "MASTER_PORT: a number from 1 to 65535, found '99999'"),
    ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4",
      "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "MASTER_ADDR, the host of rank 0, found none"),
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "ENVIRONMENT": "BATCH"},
     "or the variables of srun or mpirun, found none"),
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_NODELIST": "a[1"},
     "a list of Slurm's hosts, as gpu[003-010], found 'a[1'"),
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_NODEID": "0",
      "SLURM_STEP_TASKS_PER_NODE": "many"}, "Slurm's numbers of tasks, as 8(x2), found 'many'"),
])
def test_variables_that_make_no_rank_are_refused_by_name(variables: dict[str, str], message: str):
    with pytest.raises(LauncherError) as error:
        launched_rank(variables)
    assert message in str(error.value)


def test_srun_alone_says_all_that_a_rank_needs():
    """The variables of a task under `srun -N 3 -n 20 --ntasks-per-node 8`, as Slurm sets them."""
    launched = launched_rank({
        "SLURM_PROCID": "17", "SLURM_NTASKS": "20", "SLURM_LOCALID": "1", "SLURM_NODEID": "2",
        "SLURM_NNODES": "3", "SLURM_STEP_TASKS_PER_NODE": "8(x2),4", "SLURM_STEP_ID": "4",
        "SLURM_JOB_ID": "123456", "SLURM_STEP_NODELIST": "gpu[007-009]", "ENVIRONMENT": "BATCH",
    })
    assert (launched.rank, launched.local_rank, launched.local_world_size) == (17, 1, 4)
    assert (launched.node, launched.address) == (2, "gpu007")
    assert launched.port in PORTS


def test_steps_of_a_job_meet_at_ports_of_their_own():
    task: dict[str, Any] = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_ID": "9"}
    ports = {launched_rank(task | {"SLURM_STEP_ID": str(step)}).port for step in range(100)}
    assert len(ports) == 100


def test_ranks_of_one_machine_need_no_address():
    launched = launched_rank(environment(MPICH, nodes=1, per_node=2, rank=1))
    assert (launched.address, launched.port) == ("127.0.0.1", 29_500)


@given(
    first=st.integers(0, 999), width=st.integers(1, 4),
    prefix=st.sampled_from(["n", "gpu-", "r2-n"]),
    rest=st.sampled_from(["", "-999", ",5,7-9", "-100,200"]),
    more=st.sampled_from(["", ",z9", ",q[1-2]"]),
)
def test_the_first_host_of_a_list_keeps_its_zeros(first, width, prefix, rest, more):
    number = f"{first:0{width}d}"
    assert first_host(f"{prefix}[{number}{rest}]{more}") == f"{prefix}{number}"
    assert first_host(f"{prefix}{number}{more}") == f"{prefix}{number}"
