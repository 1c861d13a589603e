"""Seeded defects of shard math, strategies, memory, engine and collectives, as people make them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutation:
    """A defect: `old` stands once in `file` and becomes `new`; `suite` should catch it."""

    file: str
    old: str
    new: str
    suite: str


SUITES: dict[str, tuple[str, ...]] = {
    "shards": ("tests/zsim/ir/test_sharding.py",),
    "mesh": ("tests/zsim/ir/test_mesh.py",),
    "ledger": ("tests/zsim/ir/test_ledger.py",),
    "flat buffers": (
        "tests/zsim/strategies/groups/test_flat_groups.py",
        "tests/zsim/strategies/groups/test_zero_groups.py",
        "tests/zsim/strategies/test_strategies.py",
        "tests/zsim/testing/laws/test_exceptions_of_laws.py",
        "tests/zsim/strategies/published/test_published_communication.py",
    ),
    "fully_shard": (
        "tests/zsim/strategies/test_strategy_fsdp2.py",
        "tests/zsim/testing/laws/test_exceptions_of_laws.py", "tests/zsim/strategies/test_edges.py",
    ),
    "flat parameters": (
        "tests/zsim/strategies/test_strategy_fsdp1.py", "tests/zsim/strategies/test_edges.py",
    ),
    "optimizers": ("tests/zsim/strategies/test_optimizers.py",),
    "collectives": ("tests/zsim/cluster/test_collectives.py",),
    "clusters": (
        "tests/zsim/cluster/test_cluster.py", "tests/zsim/cluster/test_cluster_presets.py",
    ),
    "allocator": ("tests/zsim/memory/allocator/test_caching_allocator.py",),
    "engine": (
        "tests/zsim/engine/events/test_rank_schedule.py",
        "tests/zsim/engine/test_faulty_steps.py", "tests/zsim/engine/test_simulate.py",
        "tests/zsim/engine/test_engine_in_order.py",
    ),
    "contention": ("tests/zsim/engine/contention",),
    "real ring": ("tests/zreal/executor/test_ring.py",),
    "real zero": ("tests/zreal/zero/test_zero.py",),
}
"""Tests that each kind of defect should be caught by."""

SHARDING, MESH, LEDGER = "zsim/ir/sharding.py", "zsim/ir/mesh.py", "zsim/ir/ledger.py"
REPLAY, FLAT_STEP = "zsim/ir/ledger_replay.py", "zsim/strategies/flat_buffer/flat_buffer_step.py"
FLAT_GROUPS, LAYOUT = (
    "zsim/strategies/flat_buffer/groups.py", "zsim/strategies/flat_buffer/layout.py",
)
ZERO1, ZERO3 = "zsim/strategies/zero1.py", "zsim/strategies/zero3.py"
GROUP, UNSHARD, REDUCE, HOOKS = (
    f"zsim/strategies/fully_shard/{name}.py"
    for name in ("param_group", "unshard", "reduce", "fully_shard_step")
)
FLAT_PARAMETER, FSDP1_STEP, FSDP1_HOOKS = (
    f"zsim/strategies/flat_parameter/{name}.py"
    for name in ("flat_parameter", "flat_parameter_step", "hooks")
)
OPTIMIZERS, BUCKETS = (
    "zsim/strategies/building/optimizers.py", "zsim/strategies/replicated/buckets.py",
)
RING, GLOO, CLUSTER = (
    "zsim/cluster/collectives/ring.py", "zsim/cluster/collectives/gloo.py",
    "zsim/cluster/cluster.py",
)
ALLOCATOR, SIMULATE, SCHEDULE = (
    "zsim/memory/allocator/caching_allocator.py", "zsim/engine/simulate.py",
    "zsim/engine/events/rank_schedule.py",
)
FAIR, LINKS, FOLDING = (
    "zsim/engine/contention/max_min_fairness.py", "zsim/engine/contention/link_contention.py",
    "zsim/engine/folding.py",
)
PROGRESS = "zsim/engine/events/progress.py"
REAL_RING, REAL_SHARDS = "zreal/executor/ring.py", "zreal/zero/shard_optimizer.py"


def _of(file: str, suite: str, *changes: tuple[str, str]) -> tuple[Mutation, ...]:
    return tuple(Mutation(file, old, new, suite) for old, new in changes)


MUTATIONS: tuple[Mutation, ...] = (
    *_of(
        SHARDING, "shards",
        ("return -(-n // num_shards)", "return n // num_shards"),
        ("return shard_size(n, num_shards) * num_shards", "return n"),
        ("return Interval(min(rank * size, n), min((rank + 1) * size, n))",
         "return Interval(rank * size, (rank + 1) * size)"),
        ("return Interval(min(rank * size, n), min((rank + 1) * size, n))",
         "return Interval(min(rank * size, n), min(rank * size + size - 1, n))"),
        ("return self.stop - self.start", "return self.stop - self.start + 1"),
        ("start = max(self.start, other.start)", "start = min(self.start, other.start)"),
        ("return Interval(start, max(start, min(self.stop, other.stop)))",
         "return Interval(start, min(self.stop, other.stop))"),
        ("return shard_size(self.shape[0], self.num_shards) * self.row_numel",
         "return shard_size(self.shape[0] * self.row_numel, self.num_shards)"),
        ("return prod(self.shape[1:])", "return prod(self.shape)"),
        ("return self.local_rows(rank).numel * self.row_numel",
         "return self.local_rows(rank).numel"),
        ("Piece(index, Interval(cut.start - start, cut.stop - start), cut.start - " "local.start)",
         "Piece(index, Interval(cut.start, cut.stop), cut.start - local.start)"),
        ("Piece(index, Interval(cut.start - start, cut.stop - start), cut.start - " "local.start)",
         "Piece(index, Interval(cut.start - start, cut.stop - start), cut.start)"),
        ("            if cut.numel\n", "            if cut.start\n"),
        ("source, destination = position // shard_size(n, old), position // " "shard_size(n, new)",
         "source, destination = position // shard_size(n, new), position // " "shard_size(n, old)"),
        ("            shard(n, num_shards=new, rank=destination).stop,\n", "            n,\n"),
        ("key=lambda index: -numels[index])", "key=lambda index: numels[index])"),
        ("owners[index] = totals.index(min(totals))", "owners[index] = index % num_ranks"),
        ("totals[owners[index]] += numels[index]", "totals[owners[index]] += 1"),
    ),
    *_of(
        MESH, "mesh",
        ("return divmod(rank, self.dp_shard)", "return divmod(rank, self.dp_replicate)"),
        ("return rank // self._stride(name) % self.size(name)", "return rank % self.size(name)"),
        ("return _ranks(rank - rank // stride % size * stride, size, stride)",
         "return _ranks(rank - rank % size, size, stride)"),
        ('return step * (self.dp_shard if name.startswith("dp_replicate") else 1)', "return step"),
        ("for start in range(0, self.world_size, whole)", "for start in range(0, whole, whole)"),
        ('return int(part) if name[len(axis)] == ":" else whole // int(part)', "return whole"),
        ("return tuple(range(first, first + size * stride, stride))",
         "return tuple(range(first, first + size, 1))"),
    ),
    *_of(
        LEDGER, "ledger",
        ("self.by_kind[event.kind] -= event.nbytes\n", "pass\n"),
        ("        if event.buffer in self.live:\n", "        if False:\n"),
        ("        self.allocated -= event.nbytes\n", "        self.allocated -= 1\n"),
    ),
    *_of(
        REPLAY, "ledger",
        ("                by_kind[freed.kind] -= freed.nbytes\n", ""),
        ("                allocated -= freed.nbytes\n", ""),
        ("                if allocated > high:\n", "                if allocated >= high + 512:\n"),
        ("                    summit.split, climbing = dict(by_kind), False\n",
         "                    climbing = False\n"),
        ('        if op.kind == "optimizer":\n' "            walk.held",
         '        if op.kind == "forward":\n' "            walk.held"),
        ("        lift = ledger.allocated - self.before.allocated\n", "        lift = 0\n"),
        ("        _apply_all(ledger, program.before(phase))\n", ""),
    ),
    *_of(
        FLAT_GROUPS, "flat buffers",
        ("        nbytes += parameter.numel * element_nbytes\n",
         "        nbytes += parameter.numel\n"),
        ("        if nbytes >= cap:\n", "        if nbytes > cap:\n"),
        ("            bucket, nbytes = [], 0\n" "    if bucket:\n",
         "            bucket = []\n" "    if bucket:\n"),
        ("    if bucket:\n" "        yield", "    if len(bucket) > 1:\n" "        yield"),
        ("(rest, False)", "(rest, True)"),
    ),
    *_of(
        LAYOUT, "flat buffers",
        ("return group.layout.padded_numel * DTYPE_NBYTES[dtype or self.dtype]",
         "return group.layout.numel * DTYPE_NBYTES[dtype or self.dtype]"),
        ("return group.layout.shard_numel * DTYPE_NBYTES[dtype or self.dtype]",
         "return group.layout.padded_numel * DTYPE_NBYTES[dtype or self.dtype]"),
        ("return self.training.precision.reduce != self.gradient_dtype", "return False"),
        ("return [group.layout.shard_numel for group in self.trained]",
         "return [group.layout.padded_numel for group in self.trained]"),
        ("return self.rounds and self.training.precision.master", "return self.rounds"),
        ("        for group in reversed(self.groups):\n", "        for group in self.groups:\n"),
        ('            gone = Free(buffer_of(group.fqn, "unsharded"))\n'
         '            step.issue("free", group.fqn, stream="host", memory=(gone,))\n',
         "            pass\n"),
    ),
    *_of(
        ZERO1, "flat buffers",
        (' or step.model.training.sync == "every"\n', "\n"),
        ("(step.model.num_shards > 1 and every)", "every"),
        ("    stepped = step.optimizer(first=first)\n",
         "    stepped = step.optimizer(first=True)\n"),
        ("    step.zero_grad()\n\n\n" "STRATEGY", "\n\n" "STRATEGY"),
        ("for group in [group for group in ready[module.fqn] if group.trained]:",
         "for group in ready[module.fqn]:"),
    ),
    *_of(
        ZERO3, "flat buffers",
        ("    done = _last_users(step.model, modules)\n"
         "    for i, module in enumerate(modules):\n"
         "        step.unshard(*_needed(step.model, modules[i : i + 1 + lookahead]))\n"
         "        step.forward(module)\n",
         "    done = _last_users(step.model, modules)\n"
         "    for i, module in enumerate(modules):\n"
         "        step.unshard(*_needed(step.model, modules[i : i + lookahead + 2]))\n"
         "        step.forward(module)\n"),
        ("        step.backward(module)\n" "        step.reshard(*done[module.fqn])\n",
         "        step.reshard(*done[module.fqn])\n" "        step.backward(module)\n"),
        ("for group in [group for group in ready[module.fqn] if group.trained]:",
         "for group in ready[module.fqn]:"),
        ("    if model.num_shards == 1:\n", "    if model.num_shards == 0:\n"),
        ("        if path in known and path != paths[rounds[-1][-1].fqn]:\n",
         "        if False:\n"),
    ),
    *_of(
        FLAT_STEP, "flat buffers",
        ("*waits, *(self._gathered[fqn] for fqn in reads),\n", "*waits,\n"),
        ("waits=self._compute[-1:])\n", "waits=())\n"),
        ('            self._free(group, "unsharded")\n', "            pass\n"),
        ("            del self._gathered[group.fqn]\n", ""),
        ("        ready = self._compute[-1]\n", "        ready = self._compute[0]\n"),
        ("        waits = self._clip() if model.training.optimizer.clip_norm else "
         "self._reduced\n",
         "        waits = self._clip() if model.training.optimizer.clip_norm else ()\n"),
        ("        nbytes = self.model.full_nbytes(group, reduce_dtype)\n",
         "        nbytes = self.model.full_nbytes(group)\n"),
        ("            stream=stream,\n" "            waits=self._reduced[-1:],\n",
         "            stream=stream,\n" "            waits=(),\n"),
        ('            stream="all_reduce",\n' "            waits=self._reduced[-1:],\n",
         '            stream="all_reduce",\n' "            waits=(),\n"),
        ("            group=REPLICAS,\n", "            group=AXIS,\n"),
        ("            nbytes=self.model.shard_nbytes(group, dtype),\n",
         "            nbytes=self.model.full_nbytes(group, dtype),\n"),
        ("        return self.micro_batch == self.model.training.batch.accumulation - 1\n",
         "        return self.micro_batch == self.model.training.batch.accumulation\n"),
        ("        return self.model.num_replicas > 1 and self.in_last_micro_batch\n",
         "        return self.model.num_replicas > 1\n"),
        ("        if self.over_replicas and not model.casts_gradients:\n",
         "        if self.over_replicas:\n"),
        ("                    kept = False\n", ""),
        ('            kind, numel = "all_reduce", group.layout.shard_numel\n',
         '            kind = "all_reduce"\n'),
        ("        self._gradients.remove(group.fqn)\n" '        self._free(group, "gradients")\n',
         "        self._gradients.remove(group.fqn)\n"),
        ("if group.trained and group.fqn not in self._gradients", "if group.trained"),
        ("            waits=(norms, *self._reduced),\n", "            waits=self._reduced,\n"),
        ("                nbytes=count * DTYPE_NBYTES[dtype],\n",
         "                nbytes=count,\n"),
        ("        self._in_place[group.fqn] = self._reduced[-1]\n", ""),
    ),
    *_of(
        BUCKETS, "flat buffers",
        ("    return tuple(parameters[fqn] for fqn in sorted(ready, key=lambda fqn: "
         "ready[fqn]))\n",
         "    return tuple(parameters[fqn] for fqn in ready)\n"),
        ('return DTYPE_NBYTES["int32"] * len(self.reduced)',
         'return DTYPE_NBYTES["int64"] * len(self.reduced)'),
    ),
    *_of(
        "zsim/strategies/fsdp2.py", "fully_shard",
        ('object.__setattr__(self, "reshard_after_forward", False)',
         'object.__setattr__(self, "reshard_after_forward", True)'),
    ),
    *_of(
        GROUP, "fully_shard",
        ("full = rows // shard_size(rows, num_shards)\n",
         "full = -(-rows // shard_size(rows, num_shards))\n"),
        ("return sorted(start for start in starts if start < num_shards)", "return [0]"),
        ("return cls(blocks=True, root=False)", "return cls(blocks=True, root=True)"),
        ("to=value if value != num_shards else 0", "to=value"),
        ("return self.root if group.fqn == ROOT else self.blocks", "return self.blocks"),
        ("        shape: layout.local_numel(rank)\n", "        shape: layout.shard_numel\n"),
        ("tuple([parameter for parameter in self.parameters if parameter.trained])",
         "self.parameters"),
    ),
    *_of(
        UNSHARD, "fully_shard",
        ("            waits=(copy,),\n" '            group="dp_shard"',
         "            waits=(),\n" '            group="dp_shard"'),
        ('group="dp_shard" if not group.resharded_to else part_of("dp_shard", spread)',
         'group="dp_shard"'),
        ('part = group.totals["padded"] // spread', 'part = group.totals["numel"] // spread'),
        ('            nbytes=self.nbytes(group.totals["padded"], dtype),\n',
         '            nbytes=self.nbytes(group.totals["numel"], dtype),\n'),
        ("waits=[self.gathers[group.fqn]] if group.fqn in self.gathers else []", "waits=[]"),
        ("        self.gather_waits = self.last_copy_out if forward else [copied]\n",
         "        self.gather_waits = []\n"),
        ("            memory += self.drop(gathered)\n", "            pass\n"),
        ("        if group.unsharded or group.gathered:\n" "            return\n",
         "        if group.unsharded:\n" "            return\n"),
    ),
    *_of(
        REDUCE, "fully_shard",
        ('            group="dp_replicate",\n', '            group="world",\n'),
        ('            group="dp_shard",\n', '            group="world",\n'),
        ('            nbytes=self.nbytes(group.reduces["shard"], dtype),\n',
         '            nbytes=self.nbytes(group.reduces["padded"], dtype),\n'),
        ("            waits.append(earlier[1])\n", ""),
        ("            memory += [] if beside else self.drop(earlier[0])\n", ""),
        ("        self.unfinished = [done]  # one stream: the last covers all\n",
         "        self.unfinished = []\n"),
        ("        if precision.reduce == precision.parameters:\n" "            return\n", ""),
        ("            if self.mesh.dp_replicate > 1:\n" "                done = self._reduce_over",
         "            if self.mesh.dp_replicate > 2:\n" "                done = self._reduce_over"),
        ("        return not self.live.isdisjoint(self._gradient_buffers(group))\n",
         "        return True\n"),
    ),
    *_of(
        HOOKS, "fully_shard",
        ("                self.unshard_each(self.post_forward_order[:index][-1:])\n",
         "                pass\n"),
        ("                self.unshard_each(self.post_forward_order[:index][-1:])\n",
         "                self.unshard_each(self.post_forward_order[:index][-2:])\n"),
        ("        if resharding.frees(group):\n", "        if not resharding.frees(group):\n"),
        ("        self.reshard(group)\n" "        if not sync:\n", "        if not sync:\n"),
        ('            group.state, group.in_backward = "idle", False\n', ""),
        ("            memory = self.drop(buffer)\n"
         "            if memory:\n"
         "                self.issue(",
         "            memory = self.drop(buffer)\n"
         "            if not memory:\n"
         "                self.issue("),
        ("        self.unshard_each(group.forward_prefetch)\n", ""),
    ),
    *_of(
        OPTIMIZERS, "optimizers",
        ('    return ("momentum_buffer",) if optimizer.momentum else ()\n',
         '    return ("momentum_buffer",)\n'),
        ('on_device = device == "cpu" or optimizer.implementation == "fused"', "on_device = True"),
        ("        elif numel:\n", "        else:\n"),
        ('yield Alloc(state_of(owner, index, name), "optimizer_states", numel * element)',
         'yield Alloc(state_of(owner, index, name), "optimizer_states", numel * 4)'),
        ("    return (*counted, *made, *[Free(alloc.buffer) for alloc in reversed(made)])\n",
         "    return (*counted, *made)\n"),
        ('            yield Free(form_of(name, "root"))\n', ""),
        ('        return ("exp_avg", "exp_avg_sq")\n', '        return ("exp_avg",)\n'),
    ),
    *_of(
        RING, "collectives",
        ("return max(1, alpha_ns + -(-nbytes * 10**9 // bytes_per_s))",
         "return max(1, alpha_ns + nbytes * 10**9 // bytes_per_s)"),
        ('sent = {"all_gather": nbytes - next_rank, "reduce_scatter": nbytes - own}',
         'sent = {"all_gather": nbytes - own, "reduce_scatter": nbytes - own}'),
        ('{"all_reduce": 2 * nbytes - own - next_rank}', '{"all_reduce": 2 * nbytes}'),
        ("return PASSES[op] * (group_size - 1)", "return PASSES[op] * group_size"),
        ("return 0 if (rank - root) % group_size == group_size - 1 else nbytes", "return nbytes"),
        ("return (num - 1) * one_step + last_step", "return num * one_step"),
        ("    next_rank = shard(nbytes, num_shards=group_size, rank=(rank + 1) % "
         "group_size).numel\n",
         "    next_rank = shard(nbytes, num_shards=group_size, rank=rank).numel\n"),
        ("        return group_size - 2 + _num_slices(nbytes)\n",
         "        return group_size - 1 + _num_slices(nbytes)\n"),
    ),
    *_of(
        GLOO, "collectives",
        ('"reduce_scatter": "all_reduce", "all_reduce": "all_reduce"',
         '"reduce_scatter": "reduce_scatter", "all_reduce": "all_reduce"'),
        ("        return nbytes * _num_children((rank - root) % group_size, group_size)\n",
         "        return nbytes * _num_children(rank, group_size)\n"),
        ("        return num_steps(op, nbytes, group_size=group_size) * one_step\n",
         "        return one_step\n"),
    ),
    *_of(
        CLUSTER, "clusters",
        ("return rank // self.devices_per_node", "return rank % self.devices_per_node"),
        ("narrowest = min(self.nic_rates(ranks)", "narrowest = max(self.nic_rates(ranks)"),
        ("widest = min(narrowest, self.links.fabric.bandwidth) if needs_fabric else narrowest",
         "widest = narrowest"),
        ("inside, outside = self.hop_ns\n", "outside, inside = self.hop_ns\n"),
    ),
    *_of(
        ALLOCATOR, "allocator",
        ("size = (nbytes + _BELOW_BLOCK) & _WHOLE_BLOCKS", "size = nbytes & _WHOLE_BLOCKS"),
        ("    if size <= SMALL_SIZE:\n" "        return SMALL_SEGMENT\n",
         "    if size < SMALL_SIZE:\n" "        return SMALL_SEGMENT\n"),
        ("return LARGE_SEGMENT if size < MIN_LARGE else -(-size // ROUND_LARGE) * " "ROUND_LARGE",
         "return LARGE_SEGMENT if size <= MIN_LARGE else -(-size // ROUND_LARGE) * " "ROUND_LARGE"),
        ("if splits else SMALL_SIZE + MIN_BLOCK,", "if splits else MIN_BLOCK,"),
        (" active -= size\n", " active -= block.requested\n"),
        ("elif block.previous is None and block.next is None:", "elif block.previous is None:"),
        ("        self.num_releases += 1\n", ""),
        (" allocated += nbytes\n", " allocated += size\n"),
        ("if active > highest:  #", "if active < highest:  #"),
        ("                        size += previous.size\n", ""),
    ),
    *_of(
        SIMULATE, "engine",
        ("        if ready > collective.ready:\n" "            collective.ready = ready\n",
         "        collective.ready = ready\n"),
        ("        begin = max(collective.ready, communicator.free_at)\n",
         "        begin = collective.ready\n"),
        ("            ready = ends[host_event] + offsets[event]\n",
         "            ready = offsets[event]\n"),
        ("                if end > ready:\n" "                    ready = end\n",
         "                ready = end\n"),
        ("            ends[event] = ready + durations[event]\n",
         "            ends[event] = ready\n"),
        ("        if len(collective.arrived) < communicator.members:\n" "            return\n", ""),
        ("                self.differing = self.differing or collective\n", ""),
        ("            ends[len(schedule.ops)] = durations[kind].start\n",
         "            ends[len(schedule.ops)] = 0\n"),
    ),
    *_of(PROGRESS, "engine", ("        clock += delays.later.get(index, 0)\n", "")),
    *_of(
        SIMULATE, "contention",
        ("        alone = own + collective.longer\n", "        alone = own\n"),
    ),
    *_of(
        SCHEDULE, "engine",
        ("                counts[op.group] = ordinal + 1\n",
         "                counts[op.kind] = ordinal + 1\n"),
        ("op.index, stream, op.group, ordinal, (op.kind, op.nbytes, op.root)",
         "op.index, stream, op.group, ordinal, (op.kind, 0, op.root)"),
        ("        last = {} if stream == _HOST or not queue else {stream: queue[-1]}\n",
         "        last = {}\n"),
        ("            if positions[index] >= heads[streams[index]]:\n"
         "                return False\n",
         "            if positions[index] > heads[streams[index]]:\n"
         "                return False\n"),
    ),
    *_of(
        FOLDING, "engine",
        ("            duration_ns(kind, nbytes, group) for kind, nbytes in "
         "sorted(sizes[axis])\n",
         "            0 for kind, nbytes in sorted(sizes[axis])\n"),
        ("    classes, count = list(program.assignment), 0\n",
         "    classes, count = [0] * len(program.assignment), 0\n"),
    ),
    *_of(
        FAIR, "contention",
        ("        each = left / (len(rest) - index)\n", "        each = left / len(rest)\n"),
        ("        if demand >= each:\n", "        if demand > 2 * each:\n"),
    ),
    *_of(
        LINKS, "contention",
        ("        flow.left = max(0, flow.left - (now - flow.at) * flow.speed)\n",
         "        flow.left = max(0, flow.left - (now - flow.at))\n"),
        ("            if version == flow.version:\n", "            if True:\n"),
        ("sum(usages[index][link] for index in indices) > 1",
         "sum(usages[index][link] for index in indices) > 2"),
        ("                if self.flows:\n" "                    self._share_soon()\n", ""),
    ),
    *_of(
        FLAT_PARAMETER, "flat parameters",
        ('        ("", 0, num_shards if aligned else 1),\n', '        ("", 0, 1),\n'),
        ("any(parameter.requires_grad for parameter in unit.parameters)",
         "all(parameter.requires_grad for parameter in unit.parameters)"),
    ),
    *_of(
        FSDP1_STEP, "flat parameters",
        ('                group="dp_replicate",\n'
         "                nbytes=self.nbytes(flat.shard, dtype),\n",
         '                group="dp_replicate",\n'
         "                nbytes=self.nbytes(flat.padded, dtype),\n"),
        ("len(self.frees) >= MAX_PENDING_FREES", "len(self.frees) > MAX_PENDING_FREES"),
    ),
    *_of(
        FSDP1_HOOKS, "flat parameters",
        ("        if not flat.post_forward_index:\n",
         "        if flat.post_forward_index is None:\n"),
        ("free=self.frees and flat.fqn != ROOT", "free=self.frees"),
    ),
    *_of(
        REAL_RING, "real ring",
        ("            mine = chunks[(self.rank - step - 1) % self.size]\n",
         "            mine = chunks[(self.rank - step) % self.size]\n"),
        ("            summed.add_(arrived)\n", "            summed.copy_(arrived)\n"),
        ("for by in (1, -1))", "for by in (1, 1))"),
        ("    chunks = _chunks(full.clone().view(-1), ring.size)\n",
         "    chunks = _chunks(full.view(-1), ring.size)\n"),
        ("    output.view(-1).copy_(chunks[ring.rank])\n",
         "    output.view(-1).copy_(chunks[0])\n"),
        ("        return mine.numel() * mine.element_size()\n", "        return mine.numel()\n"),
        ("    return ring.sum_up(chunks) + ring.pass_on(chunks, first=0)\n",
         "    return ring.sum_up(chunks)\n"),
    ),
    *_of(
        REAL_SHARDS, "real zero",
        ("            if low < high:\n"
         "                cuts.append((index, low - first, high - low))\n",
         "            if low < high:\n" "                cuts.append((index, low, high - low))\n"),
        ("            self.buffers.gradient(unit).mul_(self.scale)\n", "            pass\n"),
        ("        write_back(self.settings, targets, self._tensors)\n", ""),
    ),
)

SURVIVORS: dict[tuple[str, str, str], str] = {
    (SIMULATE, "        if len(collective.arrived) < communicator.members:\n"
     "            return\n", ""):
        "a shortcut: the loop behind it asks the same of the next collective",
}
"""Reasons for which a defect survives its suite."""
