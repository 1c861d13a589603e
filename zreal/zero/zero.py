"""ZeRO: trains any nn.Module in its user's own loop by the Program of zero1, zero2 or zero3.

The first forward traces the module on its inputs, plans the Program, and shards. Every later call
of the loop carries out the ops that the Program has there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zreal import torch_private
from zreal.executor.flat_buffers import release
from zreal.executor.flat_rank import FlatRank
from zreal.meters.mesh_groups import shard_groups
from zreal.modules.initial_values import Make, made
from zreal.modules.modules import own_values
from zreal.tracing.units.param_groups import UnitChoice, find_units
from zreal.zero.boundaries import LiveBoundaries
from zreal.zero.meta_modules import MetaModule, is_meta
from zreal.zero.module_program import Settings, traced, training_of
from zreal.zero.program_walk import ProgramWalk
from zreal.zero.refusals import param_group_of, require_trainable, settings_of
from zreal.zero.same_module import require_same_on_ranks
from zreal.zero.shard_optimizer import ShardOptimizer
from zreal.zero.sharded_gradients import ShardedGradients
from zsim.autograd.traced.model import TracedModel
from zsim.errors import ArgumentError, ZsimError
from zsim.ir.buffers import buffer_of
from zsim.ir.mesh import Mesh
from zsim.ir.program import Program
from zsim.models.training_options import Device, Dtype, Precision
from zsim.strategies import STRATEGIES

Stage = Literal[1, 2, 3]
STAGES: dict[str, Stage] = {"zero1": 1, "zero2": 2, "zero3": 3}
"""Stages by strategy."""


class ZeRO:
    """`module` trained over the default process group with its states sharded, as arXiv 1910.02054
    does.

    - `optimizer`: torch's SGD, Adam or AdamW over the module's parameters, which has not stepped.
    - `stage`: 1 shards optimizer states, 2 gradients too, 3 parameters too.
    - `units`: the modules gathered and reduced together, as `zreal.tracing.trace` takes them; by
      default the children of the longest ModuleList that is in no other.
    - `lookahead`: modules that stage 3 gathers ahead.
    - `accumulation`: micro-batches, each a forward and a backward, before a step.
    - `clip_norm`: the global norm that gradients are clipped to; 0 for none.
    - `loss`: makes the loss of the module's output where the loop does so, for the prediction of
      memory; by default that of `trace`.
    - `reduce`: the dtype that gradients are reduced in.
    - `master`: the optimizer steps float32 copies of two-byte parameters, or else them themselves.
    - `sync`: the micro-batches after which gradients are reduced.
    - `state`: on rank 0, the values of a module on the meta device. Without it its
      `reset_parameters()` make them there.
    - `device`: of a module on the meta device.
    - `mesh`: of all ranks, to shard over its last dim alone. Along the other one of two dims shards
      have replicas, over which gradients are reduced once a step.

    Gradients are means over ranks. Between `backward` and `step` they are shards: a read of
    `parameter.grad` is an ArgumentError. A forward under `torch.no_grad()` trains nothing and,
    under stage 3, gathers the parameters for its time on all ranks. ArgumentError names what cannot
    be trained; UntraceableError, in the first forward, what the tracer refuses.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        stage: Stage = 1,
        units: UnitChoice = None,
        lookahead: int = 1,
        accumulation: int = 1,
        clip_norm: float = 0.0,
        loss: Callable[[Any], Tensor] | None = None,
        reduce: Dtype = "float32",
        master: bool = True,
        sync: Literal["every", "last"] = "every",
        state: Mapping[str, Tensor] | None = None,
        device: str | torch.device = "cpu",
        mesh: DeviceMesh | None = None,
    ) -> None:
        require_trainable(module, optimizer, stage=stage, accumulation=accumulation, mesh=mesh)
        world = dist.group.WORLD
        assert world is not None
        self.module, self.optimizer, self.stage = module, optimizer, stage
        self._world: dist.ProcessGroup = world
        self.group, self._replicas = (world, None) if mesh is None else shard_groups(mesh)
        """The ranks that shards are cut for, and those with the same shards."""
        self._units, self._lookahead, self._loss = units, lookahead, loss
        self._accumulation, self._clip_norm, self._reduce = accumulation, clip_norm, reduce
        self._sync, self._master = sync, master
        self._meta: MetaModule | None = None
        self.make: Make = made
        """Makes the parameters of a group; those of a user's loop are there already."""
        self._device = (
            torch.device(device) if is_meta(module) else next(module.parameters()).device
        )
        if is_meta(module) and own_values(module) is None:
            self._meta = MetaModule(
                module=module, device=torch.device(device), group=world, state=state
            )
            self._meta.require_values()
            self.make = self._meta.make
        self._param_groups = param_group_of(module, optimizer)
        require_same_on_ranks(module, world)
        self._program: Program | None = None
        self._walk: ProgramWalk | None = None
        self._shards: ShardOptimizer | None = None
        self._boundaries: LiveBoundaries | None = None
        self._gradients = ShardedGradients(())
        self._tracing = False
        self._gathered: list[str] | None = None
        """Units gathered for a forward that does not train."""
        module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
        module.register_forward_hook(self._after, always_call=True)

    @property
    def program(self) -> Program:
        """The Program that the loop follows: its text is one line per op. ArgumentError before the
        first forward."""
        if self._program is None:
            raise ArgumentError(
                where="zero", expected="a forward first, which traces the module", found="none"
            )
        return self._program

    def step(self) -> None:
        """Clip, step this rank's shards with the user's optimizer, and gather what is whole."""
        walk, shards = self._begun("zero.step()")
        walk.require("optimizer", "zero.step()")
        walk.rank.streams.join()  # the means are made of reduced gradients
        with torch.no_grad():
            shards.mean()
        walk.step()

    def zero_grad(self) -> None:
        """Free the gradients. Before `step`, on all ranks, it drops the unfinished step with its
        gradients, as after an exception or a loss that is not finite."""
        if self._walk is not None:
            self._gradients.hide()
            self._walk.zero_grad()

    def full_state_dict(
        self, *, rank0_only: bool = False, cpu_offload: bool = False
    ) -> dict[str, Any]:
        """The module's state_dict() with whole parameters, gathered one unit at a time, and this
        rank's buffers. Call it on all ranks, between steps.

        With `rank0_only` other ranks get {}; with `cpu_offload` the tensors are in host memory.
        """
        walk, _ = self._begun("zero.full_state_dict()")
        keeps = not rank0_only or self._world.rank() == 0
        whole, state = dict[int, Tensor](), dict[str, Any]()

        def kept(tensor: Tensor) -> Tensor:
            return tensor.detach().to("cpu" if cpu_offload else tensor.device, copy=True)

        with torch.no_grad():
            for fqn, view in walk.rank.each_parameter():
                if keeps:
                    whole[id(self.module.get_parameter(fqn))] = kept(view)
            if keeps:  # tied parameters have a name each
                for name, value in self.module.state_dict(keep_vars=True).items():
                    if isinstance(value, Tensor):
                        value = whole[id(value)] if id(value) in whole else kept(value)
                    state[name] = value
        return state

    def _begun(self, found: str) -> tuple[ProgramWalk, ShardOptimizer]:
        if self._walk is None or self._shards is None:
            raise ArgumentError(where="the training loop", expected="a forward first", found=found)
        return self._walk, self._shards

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The module is called: shard it if this is the first time, and begin a forward."""
        if self._tracing or (self._boundaries is not None and self._in_backward):
            return
        if self._walk is None:
            self._shard_by(args, kwargs)
        walk, boundaries = self._walk, self._boundaries
        assert walk is not None
        assert boundaries is not None
        if not torch.is_grad_enabled():
            self._gather_whole(walk.rank)
            return
        walk.begin_forward()
        self._gradients.hide()
        boundaries.begin()

    @property
    def _in_backward(self) -> bool:
        return self._walk is not None and self._walk.in_backward

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._tracing or self._boundaries is None or self._walk is None:
            return
        if self._gathered is not None:
            self._free_whole(self._walk.rank)
        elif self._boundaries.active and output is None:  # the module has raised
            self._boundaries.active = False
            self._walk.abandon_forward()
        elif self._boundaries.active:
            try:
                self._boundaries.end(output)
                self._walk.end_forward()
            except ZsimError:
                self._walk.abandon_forward()
                raise

    def _shard_by(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Trace the module on the inputs of its first forward, and shard it."""
        if self._meta is not None:
            self._meta.make_buffers()
        model = traced(
            self.module, args, kwargs, units=self._units, loss=self._loss, device=self._kind,
            tracing=self._while_tracing,
        )
        options = {"lookahead": self._lookahead} if self.stage == 3 else {}
        self.shard(model, options=STRATEGIES[f"zero{self.stage}"].options(**options))

    @property
    def _kind(self) -> Device:
        return "cuda" if self._device.type == "cuda" else "cpu"

    @property
    def rank(self) -> FlatRank:
        """This rank's flat buffers; ArgumentError before the module is sharded."""
        return self._begun("zero.rank")[0].rank

    def shard(self, model: TracedModel, *, options: Any) -> None:
        """Plan the step of the trace `model` with the strategy's `options`, and make the flat
        buffers. The first forward does so by itself."""
        strategy, kind = STRATEGIES[f"zero{self.stage}"], self._kind
        settings = Settings(
            model=model, options=options,
            precision=Precision(
                parameters=model.dtype, reduce=self._reduce, autocast=model.autocast,
                master=self._master,
            ),
            optimizer=settings_of(
                self.optimizer, clip_norm=self._clip_norm, device=kind
            ),
        )
        training = training_of(
            settings, strategy=strategy, accumulation=self._accumulation, sync=self._sync,
            device=kind,
        )
        shards, ranks = self.group.size(), self._world.size()
        self._program = strategy.plan(
            training, mesh=Mesh(dp_replicate=ranks // shards, dp_shard=shards), options=options
        )
        rank = self._constructed(settings, self._program)
        groups = rank.buffers.groups.values()
        names = {module.fqn: module for module in model.modules}
        own = [names[module.fqn] for module in training.modules if not module.after_root]
        self._walk = walk = ProgramWalk(
            program=self._program.of_rank(self._world.rank()), rank=rank, modules=own,
            backward=[names[module.fqn] for module in training.backward_modules],
            trained={
                g.fqn: frozenset(p.fqn for p in g.group.parameters) for g in groups if g.trained
            },
        )
        self._boundaries = LiveBoundaries(
            units=find_units(
                self.module, list(dict.fromkeys(m.unit for m in model.modules if m.unit != "root"))
            ),
            known=names,
            enter_forward=walk.forward, enter_backward=self._enter_backward,
        )
        self._boundaries.watch()
        trained = {fqn: self.module.get_parameter(fqn) for fqn in model.trained}
        self._gradients = ShardedGradients(trained.values())
        for fqn, parameter in trained.items():
            parameter.register_post_accumulate_grad_hook(
                cast(Any, lambda _, fqn=fqn: walk.arrived(fqn))
            )

    @contextmanager
    def _while_tracing(self) -> Iterator[None]:
        """Inside, calls of the module are the tracer's."""
        self._tracing = True
        try:
            yield
        finally:
            self._tracing = False

    def _constructed(self, settings: Settings, program: Program) -> FlatRank:
        """The rank after the Program's construction: flat buffers, and the optimizer over shards.
        """
        rank = FlatRank(
            settings, self.module, self.group, self._replicas, make=self.make,
            device=self._device, keeps_whole_gradients=self.stage == 1,
        )
        rank.optimizer = self._shards = ShardOptimizer(
            settings.optimizer, torch_optimizer=self.optimizer, param_group_of=self._param_groups,
            buffers=rank.buffers, scale=1 / self._world.size(),
        )
        with torch.no_grad():
            for op in program.of_rank(self._world.rank()).construction:
                rank.construct(op)
        self._shards.take_over()
        return rank

    def _enter_backward(self, fqn: str) -> None:
        walk = self._walk
        assert walk is not None
        if not walk.in_backward:
            walk.begin_backward()
            torch_private.when_backward_ends(self._end_backward)
        walk.enter_backward(fqn)

    def _end_backward(self) -> None:
        walk = self._walk
        assert walk is not None
        walk.end_backward()
        self._gradients.show()

    def _gather_whole(self, rank: FlatRank) -> None:
        """Before a forward that does not train: gather what is sharded."""
        live = rank.buffers.with_memory()
        sharded = [
            unit for unit in rank.buffers.groups
            if not live.get(buffer_of(unit, "unsharded"), True)
        ]
        self._gathered = sharded
        for unit in sharded:
            rank.buffers.gather(unit)

    def _free_whole(self, rank: FlatRank) -> None:
        gathered, self._gathered = self._gathered, None
        for unit in gathered or ():
            release(rank.buffers.full(unit))
