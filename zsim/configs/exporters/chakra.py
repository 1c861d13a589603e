"""A Program as Chakra execution traces, one file for each rank, for ASTRA-sim and others.

A file is a row of messages, each after its length. First comes the metadata, then a node for each
op of the steady step that takes time. Fields and numbers are those of Chakra's et_def.proto.
Attributes are those that ASTRA-sim 2 reads: num_ops, tensor_size, comm_type, comm_size, pg_name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from zsim.configs.exported import Exported
from zsim.engine.costs.op_costs import Costs
from zsim.errors import ScenarioError
from zsim.ir.mesh import Mesh
from zsim.ir.ops import COLLECTIVES, Op
from zsim.ir.program import Program
from zsim.scenario.plan import planned
from zsim.scenario.scenario import Scenario

VERSION = "0.0.4"
COMPUTE, COLLECTIVE = 4, 7
"""Types of nodes: COMP_NODE and COMM_COLL_NODE."""
KINDS = {"all_reduce": 0, "all_gather": 2, "broadcast": 5, "all_to_all": 6, "reduce_scatter": 7}
"""Numbers of CollectiveCommType."""
INT64, UINT64, BOOL, STRING = 9, 13, 27, 29
"""Fields of AttributeProto's value by type."""
MOST_RANKS = 4096
"""Most ranks whose files are written."""
GROUPS = "groups.json"
"""Name of the file with the ranks of each process group, as ASTRA-sim's comm-group file."""


def write(scenario: Scenario) -> Exported:
    """The traces by their files' names, and the process groups; ScenarioError beyond MOST_RANKS."""
    case = planned(scenario)
    if scenario.world_size > MOST_RANKS:
        raise ScenarioError((
            f"{scenario.name}: expected at most {MOST_RANKS:,} ranks in Chakra's files, found "
            f"{scenario.world_size:,}",
        ))
    costs = Costs(cluster=scenario.cluster, execution=scenario.executed)
    groups = _groups(case.program)
    names = {members: str(number + 1) for number, members in enumerate(groups)}
    made: dict[tuple[int, tuple[tuple[int, ...], ...]], bytes] = {}
    files: dict[str, str | bytes] = {}
    for rank, index in enumerate(case.program.assignment):
        own = tuple(members for members in groups if rank in members)
        if (index, own) not in made:
            ops = case.program.ranks[index].steady
            made[index, own] = b"".join(_messages(ops, case.program.mesh, rank, names, costs))
        files[f"{rank}.et"] = made[index, own]
    table = {name: list(members) for members, name in names.items()}
    files[GROUPS] = json.dumps(table, indent=1) + "\n"
    return Exported(kind="chakra", files=files, unsaid=("memory", "the first step"))


def _messages(
    ops: Sequence[Op], mesh: Mesh, rank: int, names: Mapping[tuple[int, ...], str], costs: Costs
) -> Iterator[bytes]:
    """The metadata and the nodes of one rank's steady step."""
    yield _sized(_text(1, VERSION))
    number = 0
    nodes: dict[int, int] = {}
    """The node of each op; of an op without one the node that it waits for."""
    last: dict[str, int] = {}
    """The last node of each stream and of each group, which are queues."""
    for op in ops:
        queues = [op.stream, *([f"group {op.group}"] if op.group else [])]
        waits = {nodes[wait] for wait in op.waits if wait in nodes}
        waits |= {last[queue] for queue in queues if queue in last}
        if not (op.kernels or op.kind in COLLECTIVES):
            if waits:
                nodes[op.index] = max(waits)
            continue
        nodes[op.index] = number
        for queue in queues:
            last[queue] = number
        ranks = mesh.group(op.group, rank) if op.kind in COLLECTIVES else ()
        yield _sized(_node(op, number, sorted(waits), ranks, names.get(ranks, ""), costs))
        number += 1


def _node(
    op: Op, number: int, waits: Sequence[int], ranks: tuple[int, ...], group: str, costs: Costs
) -> bytes:
    """One node: name, type, dependencies, microseconds and attributes."""
    is_collective = bool(ranks)
    ns = costs.collective_ns(op.kind, op.nbytes, ranks) if is_collective else costs.compute_ns(
        op.kernels
    )
    parts = [
        _number(1, number), _text(2, f"{op.kind} {op.unit}".strip()),
        _number(3, COLLECTIVE if is_collective else COMPUTE),
        *(_number(5, wait, always=True) for wait in waits), _number(7, -(-ns // 1000)),
        _attribute("is_cpu_op", BOOL, _varint(0)),
    ]
    if is_collective:
        parts += [
            _attribute("comm_type", INT64, _varint(KINDS[op.kind])),
            _attribute("comm_size", INT64, _varint(op.nbytes)),
            _attribute("pg_name", STRING, _bytes(group.encode())),
        ]
    else:
        parts += [
            _attribute("num_ops", INT64, _varint(sum(k.flops for k in op.kernels))),
            _attribute("tensor_size", UINT64, _varint(sum(k.nbytes for k in op.kernels))),
        ]
    return b"".join(parts)


def _groups(program: Program) -> list[tuple[int, ...]]:
    """The ranks of each process group that communicates."""
    names = dict.fromkeys(
        op.group for rank in program.ranks for op in rank.steady if op.kind in COLLECTIVES
    )
    return list(dict.fromkeys(group for name in names for group in program.mesh.groups(name)))


def _varint(value: int) -> bytes:
    """A whole number in protobuf's base 128, lowest digits first."""
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])


def _number(field: int, value: int, *, always: bool = False) -> bytes:
    """A field of a whole number, which is left out where it is 0, protobuf's default."""
    return _varint(field << 3) + _varint(value) if value or always else b""


def _bytes(value: bytes) -> bytes:
    return _varint(len(value)) + value


def _text(field: int, value: str) -> bytes:
    return _varint(field << 3 | 2) + _bytes(value.encode())


def _attribute(name: str, field: int, value: bytes) -> bytes:
    """An attribute of a node: its name, and the value in the field of its type."""
    wire = 2 if field == STRING else 0
    inner = _text(1, name) + _varint(field << 3 | wire) + value
    return _varint(10 << 3 | 2) + _bytes(inner)


def _sized(message: bytes) -> bytes:
    return _bytes(message)
