"""ShardedParameters: each parameter in equal shards, as DeepSpeed lays them out at stage 3."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from zsim.io.units import counted, format_bytes
from zsim.ir.buffers import Buffer
from zsim.ir.mesh import Mesh
from zsim.ir.ops import Alloc
from zsim.ir.sharding import padded_size, shard, shard_size
from zsim.models.called_modules import containers, is_leaf
from zsim.models.spec import ROOT, ModelSpec, Parameter
from zsim.models.training_options import (
    BLOCK_NBYTES,
    DTYPE_NBYTES,
    Offload,
    Optimizer,
    Precision,
)
from zsim.strategies.building.parameters import (
    named_parameters,
    trained_parameters,
    used_parameters,
)
from zsim.strategies.deepspeed_engine.layout import AXIS, EngineLayout
from zsim.strategies.deepspeed_engine.options import ShardOptions, turned
from zsim.strategies.deepspeed_engine.partition import MASTER_NBYTES
from zsim.strategies.deepspeed_engine.shards.drives import SECTOR, DriveLayout, whole_kib
from zsim.strategies.strategy import DriveFiles


def sub_group_starts(numels: Sequence[int], *, most: int) -> tuple[int, ...]:
    """The first shard of each sub-group, by the elements of all shards: a group ends once it has
    `most` elements."""
    starts, filled = [0], 0
    for index, numel in enumerate(numels):
        if filled >= most:
            starts.append(index)
            filled = 0
        filled += numel
    return tuple(starts)


def _in_sub_groups(
    options: ShardOptions, model: ModelSpec, mesh: Mesh
) -> list[list[tuple[str, int]]]:
    """The trained parameters of each sub-group, with the elements of their shards."""
    trained = trained_parameters(model)
    shards = [(p.fqn, shard_size(p.numel, mesh.size(AXIS))) for p in trained]
    starts = sub_group_starts([numel for _, numel in shards], most=options.sub_group_size)
    return [shards[a:b] for a, b in pairwise((*starts, len(shards)))]


def drives_of(
    offload: Offload, options: ShardOptions, model: ModelSpec, mesh: Mesh
) -> DriveLayout:
    """The layout on drives of each rank of `mesh`."""
    groups = _in_sub_groups(options, model, mesh)
    return DriveLayout(tuple(sum(numel for _, numel in group) for group in groups), offload)


def _differ_in_files(
    offload: Offload, options: ShardOptions, model: ModelSpec, mesh: Mesh
) -> bool:
    """True where a parameter of one block is in a file, and that of another block is in none."""
    drives, groups = drives_of(offload, options, model, mesh), _in_sub_groups(options, model, mesh)
    in_files = {
        fqn: (number in drives.swapped, offload.parameters == "nvme" and end > offload.max_in_cpu)
        for number, (group, end) in enumerate(zip(groups, accumulate(drives.sizes), strict=True))
        for fqn, _ in group
    }
    return any(in_files.get(fqn) != in_files.get(p.fqn) for fqn, p in turned(model).items())


def files_on_drives(
    offload: Offload, options: ShardOptions, model: ModelSpec, mesh: Mesh, precision: Precision
) -> Mapping[int, DriveFiles]:
    """Files of sub-groups on drives, by number: they have the numbers of the first and the last
    parameter in their names."""
    groups = _in_sub_groups(options, model, mesh)
    drives, element = drives_of(offload, options, model, mesh), DTYPE_NBYTES[precision.parameters]
    ends = tuple(accumulate(drives.sizes))
    numbers = {p.fqn: number for number, p in enumerate(model.named_parameters)}
    return {
        each: DriveFiles(
            f"{numbers[groups[each][0][0]]}_{numbers[groups[each][-1][0]]}",
            sum(
                whole_kib(numel * element) for _, numel in groups[each]
                if numel * element >= drives.least_nbytes
            ) if offload.parameters == "nvme" and ends[each] > offload.max_in_cpu else 0,
        )
        for each in drives.swapped
    }


def drive_nbytes(
    offload: Offload, options: ShardOptions, model: ModelSpec, mesh: Mesh, precision: Precision,
    optimizer: Optimizer,
) -> int:
    """Bytes of a rank's files. Of parameters even those have one that stay in memory later."""
    drives = drives_of(offload, options, model, mesh)
    shards = (
        shard_size(p.numel, mesh.size(AXIS)) * DTYPE_NBYTES[precision.parameters]
        for p in model.parameters if offload.parameters == "nvme"
    )
    files = sum(whole_kib(nbytes) for nbytes in shards if nbytes >= drives.least_nbytes)
    return files + drives.nbytes(optimizer)


def drive_problems(
    offload: Offload, options: ShardOptions, model: ModelSpec, mesh: Mesh, precision: Precision,
    optimizer: Optimizer,
) -> Iterator[str]:
    """Refusals of too few buffers and of parameters on drives, one line each, the scenario's key
    first."""
    drives = drives_of(offload, options, model, mesh)
    if options.trace == "breaks" and _differ_in_files(offload, options, model, mesh):
        yield (
            'strategy.trace: expected "holds" with some blocks alone on drives, found "breaks", of '
            "which each order has other requests; take strategy.sub_group_size = 1"
            + ", offload.max_in_cpu = 0" * (offload.parameters == "nvme")
        )
    if offload.buffer_count < (needed := drives.least_buffers(optimizer)):
        yield (
            f"offload.buffer_count: expected at least {needed}, for gradient, copy and states of "
            f"each sub-group in flight, found {offload.buffer_count}"
        )
    if offload.parameters != "nvme":
        return
    most = max(shard_size(p.numel, mesh.size(AXIS)) for p in model.parameters)
    nbytes = most * DTYPE_NBYTES[precision.parameters]
    least = drives.least_nbytes
    if most > offload.parameter_buffer_size and nbytes >= least:
        yield (
            f"offload.parameter_buffer_size: expected at least {most:,} elements, the largest "
            f"shard, found {offload.parameter_buffer_size:,}"
        )
    stays = [p for p in model.parameters if p.numel <= options.stage3_param_persistence_threshold]
    whole = max((shard_size(p.numel, mesh.size(AXIS)) for p in stays), default=0)
    if whole * DTYPE_NBYTES[precision.parameters] >= least:
        yield (
            "strategy.stage3_param_persistence_threshold: expected less with parameters on drives, "
            f"found {options.stage3_param_persistence_threshold:,}, with which some in files stay "
            "whole; this is not modelled"
        )
    if len(model.trained) < len(model.parameters):
        yield "offload.parameters: expected cpu with frozen parameters, found nvme"
    if (copies := options.zero_hpz_partition_size) > 1:
        yield (
            f"strategy.zero_hpz_partition_size: expected 1 with parameters on drives, found "
            f'{copies}; use offload.parameters = "cpu"'
        )


def kept_in_memory(
    offload: Offload, options: ShardOptions, model: ModelSpec, mesh: Mesh
) -> str:
    """The sub-groups that a large `block_size` keeps off drives, or all of them; "" for none."""
    drives = drives_of(offload, options, model, mesh)
    least = BLOCK_NBYTES if drives.swapped else 0
    sizes = [MASTER_NBYTES * size for size in drives.sizes]
    stay = [nbytes for nbytes in sizes if least <= nbytes < drives.least_nbytes]
    if offload.optimizer != "nvme" or not stay:
        return ""
    return (
        f"{len(stay):,} of {counted(len(sizes), 'sub-group')} in host memory and not on drives, "
        f"the largest with {format_bytes(max(stay))} of float32 on a rank, below "
        f"{format_bytes(drives.least_nbytes)} of a request; take "
        + ("a smaller offload.block_size" if max(stay) >= BLOCK_NBYTES
           else 'offload.optimizer = "cpu"')
    )


def write_buffer_nbytes(
    offload: Offload, options: ShardOptions, model: ModelSpec, mesh: Mesh, precision: Precision
) -> int:
    """Bytes of the buffer through which a sub-group's parameters are written, where some are.

    DeepSpeed makes it for whole parameters, and fills it with a rank's shards.
    """
    groups = _in_sub_groups(options, model, mesh)
    numels = {p.fqn: p.numel for p in model.parameters}
    sizes = drives_of(offload, options, model, mesh).sizes
    if offload.parameters != "nvme" or sum(sizes) <= offload.max_in_cpu:
        return 0
    element, largest = DTYPE_NBYTES[precision.parameters], groups[sizes.index(max(sizes))]
    return sum(whole_kib(numels[fqn] * element) for fqn, _ in largest)


def write_buffer(
    offload: Offload, options: ShardOptions, model: ModelSpec, mesh: Mesh, precision: Precision
) -> str:
    """The bytes of that buffer, and what makes it smaller; "" for none."""
    nbytes = write_buffer_nbytes(offload, options, model, mesh, precision)
    if not nbytes:
        return ""
    most = max(drives_of(offload, options, model, mesh).sizes) * DTYPE_NBYTES[precision.parameters]
    return (
        f"a rank locks {format_bytes(nbytes)} of host memory to write "
        f"{format_bytes(most)}: the buffer is for whole parameters; take a "
        f"smaller sub_group_size than {options.sub_group_size:,}"
    )


def misread(offload: Offload, options: ShardOptions, model: ModelSpec, mesh: Mesh) -> str:
    """The first parameter whose gradient is read to an address that direct reads refuse; "" for
    none."""
    drives = drives_of(offload, options, model, mesh)
    groups = _in_sub_groups(options, model, mesh)
    for group in [groups[number] for number in drives.swapped]:
        starts = accumulate((numel for _, numel in group), initial=0)
        for (fqn, numel), start in zip(group, starts, strict=False):
            if drives.piece(numel) and start % SECTOR:
                return fqn
    return ""


def persistent_among(
    parameters: Iterable[Parameter], options: ShardOptions
) -> Iterator[Parameter]:
    """Small ones, until all have too many elements. A later one may be small enough again."""
    left = options.stage3_model_persistence_threshold
    for parameter in parameters:
        if parameter.numel <= min(options.stage3_param_persistence_threshold, left):
            yield parameter
            left -= parameter.numel


@dataclass(frozen=True, kw_only=True)
class ShardedParameters(EngineLayout):
    """The parameters of a training in `num_ranks` shards each, the last ones padded. Frozen ones
    are sharded and gathered as all are, and stay out of buffers and of the optimizer's step."""

    options: ShardOptions

    @cached_property
    def every(self) -> tuple[Parameter, ...]:
        """All parameters in the order of the model, frozen ones too."""
        return named_parameters(self.training.model)

    @cached_property
    def own(self) -> dict[str, tuple[Parameter, ...]]:
        """The parameters of each module that is called, in that order; blocks and the root have
        none."""
        known = {parameter.fqn: parameter for parameter in self.every}
        own: dict[str, tuple[Parameter, ...]] = {ROOT: ()}
        for module in self.training.model.modules:
            read = [known[fqn] for fqn in used_parameters(module)]
            own[module.path] = tuple(sorted(read, key=self.turn))
        for around in containers(self.training.model).values():
            own |= dict.fromkeys(around, ())
        return own

    @cached_property
    def leaves(self) -> frozenset[str]:
        """The modules with others inside whose parameters are theirs."""
        return frozenset(module.path for module in self.training.model.modules if is_leaf(module))

    @cached_property
    def leaf_of(self) -> dict[str, str]:
        """The leaf of each parameter in one."""
        return {parameter.fqn: leaf for leaf in self.leaves for parameter in self.own[leaf]}

    @cached_property
    def gradients_of_values(self) -> frozenset[Buffer]:
        """Buffers that backward makes."""
        return frozenset(
            event.buffer for module in self.training.modules for event in module.backward.memory
            if isinstance(event, Alloc)
        )

    @cached_property
    def _turns(self) -> dict[str, int]:
        return {parameter.fqn: index for index, parameter in enumerate(self.every)}

    def turn(self, parameter: Parameter) -> int:
        """Index of a parameter in the order of the model."""
        return self._turns[parameter.fqn]

    @cached_property
    def persistent(self) -> tuple[Parameter, ...]:
        """Parameters that stay whole from step to step."""
        return tuple(persistent_among(self.every, self.options))

    @cached_property
    def sub_groups(self) -> tuple[tuple[Parameter, ...], ...]:
        """Parameters that the optimizer steps together: a group ends once its shards have
        `sub_group_size` elements."""
        starts = sub_group_starts(
            [self.shard_numel(p) for p in self.parameters], most=self.options.sub_group_size
        )
        ends = (*starts[1:], len(self.parameters))
        return tuple(self.parameters[a:b] for a, b in zip(starts, ends, strict=True))

    @cached_property
    def drives(self) -> DriveLayout:
        """The sub-groups on drives, where the optimizer's states are there."""
        sizes = [sum(map(self.shard_numel, group)) for group in self.sub_groups]
        return DriveLayout(tuple(sizes), self.training.offload)

    @cached_property
    def stays(self) -> tuple[bool, ...]:
        """True for each sub-group whose parameters are in one buffer in memory; with parameters on
        drives the first ones are, of `max_in_cpu` elements in all."""
        offload = self.training.offload
        return tuple(
            offload.parameters != "nvme" or end <= offload.max_in_cpu
            for end in accumulate(self.drives.sizes)
        )

    @cached_property
    def in_one_buffer(self) -> frozenset[str]:
        """The parameters with offloaded shards in one buffer, which is always pinned: not frozen
        ones, nor those of sub-groups with files."""
        return frozenset(
            p.fqn for group, stays in zip(self.sub_groups, self.stays, strict=True) if stays
            for p in group
        )

    @cached_property
    def in_files(self) -> frozenset[str]:
        """The parameters whose shards are in files; smaller ones than a request stay in memory."""
        return frozenset(
            p.fqn for group, stays in zip(self.sub_groups, self.stays, strict=True) if not stays
            for p in group if self.begins_in_file(p)
        )

    def begins_in_file(self, parameter: Parameter) -> bool:
        """True where construction writes the shard to a file, though it may stay in memory later.
        """
        nbytes = self.shard_numel(parameter) * self.element
        return self.training.offload.parameters == "nvme" and nbytes >= self.drives.least_nbytes

    def file_nbytes(self, parameters: Iterable[Parameter]) -> int:
        """Bytes of the files of those of `parameters` that are in any: whole KiB each."""
        return sum(
            whole_kib(self.shard_numel(p) * self.element)
            for p in parameters if p.fqn in self.in_files
        )

    @cached_property
    def parameter_buffer_nbytes(self) -> tuple[int, int]:
        """Bytes of page-locked buffers for parameters: to read them, and to write a sub-group of
        them, which DeepSpeed makes for whole parameters."""
        offload = self.training.offload
        if offload.parameters != "nvme":
            return 0, 0
        read = whole_kib(offload.parameter_buffer_size * self.element)
        sizes = self.drives.sizes
        group = self.sub_groups[sizes.index(max(sizes))] if not all(self.stays) else ()
        return offload.parameter_buffer_count * read, sum(
            whole_kib(p.numel * self.element) for p in group
        )

    @cached_property
    def swapped(self) -> frozenset[str]:
        """The parameters whose sub-groups are on drives."""
        return frozenset(p.fqn for number in self.drives.swapped for p in self.sub_groups[number])

    def shard_numel(self, parameter: Parameter) -> int:
        """Elements of a shard, padding included."""
        return shard_size(parameter.numel, self.num_ranks)

    def padded_nbytes(self, parameter: Parameter) -> int:
        """Bytes of a gathered parameter with its padding."""
        return padded_size(parameter.numel, self.num_ranks) * self.element

    @property
    def per_node(self) -> int:
        """Ranks of a node."""
        return self.training.devices_per_node or self.num_ranks

    @property
    def quantizes_gradients(self) -> bool:
        """True where gradients are reduced in int4, between nodes."""
        return self.options.zero_quantized_gradients and self.num_ranks > self.per_node

    @property
    def spread(self) -> int:
        """Ranks over which copies of released parameters are sharded; 1 for no such copies."""
        return self.options.zero_hpz_partition_size

    def secondary_numel(self, parameter: Parameter) -> int:
        """Elements of a rank's part of such a copy."""
        return padded_size(parameter.numel, self.num_ranks) // self.spread

    def local_numel(self, parameter: Parameter, *, rank: int) -> int:
        """Elements of a rank's shard without padding."""
        return shard(parameter.numel, num_shards=self.num_ranks, rank=rank).numel

    def local_numels(self, rank: int) -> Mapping[str, int]:
        """Elements of all trained shards of a rank without padding, by fqn."""
        of_size = {
            p.numel: self.local_numel(p, rank=rank) for p in self.one_of_each_size
        }
        return {p.fqn: of_size[p.numel] for p in self.parameters}

    @cached_property
    def index_of(self) -> Mapping[str, int]:
        """The first place of each module in forward, by fqn."""
        places = [(module.fqn, index) for index, module in enumerate(self.training.modules)]
        return dict(reversed(places))

    @cached_property
    def one_of_each_size(self) -> tuple[Parameter, ...]:
        """The first parameter of each number of elements."""
        of_size = {p.numel: p for p in reversed(self.parameters)}
        return tuple(of_size[numel] for numel in dict.fromkeys(p.numel for p in self.parameters))

    @cached_property
    def rank_numel(self) -> int:
        """Elements of all shards of a rank."""
        return sum(map(self.shard_numel, self.parameters))
