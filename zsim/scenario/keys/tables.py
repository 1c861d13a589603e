"""The schema of scenario files: the top level, and tables of fixed keys.

`options` has the tables that a strategy or a family decides. `table_checks` holds tables to the
schema, and `reference` prints it. `refusals` knows what keys mean together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, create_model

from zsim.models.families.layers import LossDtype
from zsim.models.operators import AttentionKind
from zsim.models.repeats import Uses
from zsim.scenario.keys.checkpoint_table import CheckpointTable
from zsim.scenario.keys.table import MAX_USES, MOST_FAULTS, Names, Table
from zsim.scenario.keys.training_tables import TRAINING_TABLES


class UsesTable(Table):
    """Runs of each block in a forward: each in a row, or the whole stack again."""

    times: int = Field(ge=1, le=MAX_USES, description="Runs of each block in a forward.")
    order: Literal["block", "stack"] = Field(
        default=Uses().order,
        description="Each block that often in a row, or the whole stack again.",
    )


class ModelTable(Table):
    """The model: one of preset, family with sizes, huggingface, traced."""

    preset: str | None = Field(default=None, description="A model of `zsim list models`.")
    num_layers: int | None = Field(
        default=None, ge=1, description="Blocks of the preset that are kept; all by default."
    )
    attention: AttentionKind | None = Field(
        default=None,
        description="The preset's attention: explicit scores, sdpa with the kernel that torch "
                    "takes, or one of its kernels.",
    )
    loss_dtype: LossDtype | None = Field(
        default=None,
        description="The dtype of the preset's loss: by default the \"model\"'s, or \"float32\", "
                    "as torchtitan and transformers have it.",
    )
    family: str | None = Field(
        default=None, description="A family of models, with its `sizes`."
    )
    sizes: dict[str, Any] = Field(default={}, description="The family's sizes, see below.")
    huggingface: str | None = Field(
        default=None,
        description="The config.json of a Hugging Face gpt2, llama, mistral, qwen2, qwen3, gemma "
                    "or phi3, beside the scenario.",
    )
    traced: str | None = Field(
        default=None, description="The file of a traced nn.Module, beside the scenario."
    )
    uses: Annotated[int, Field(ge=1, le=MAX_USES)] | UsesTable = Field(
        default=1,
        description="Runs of each block in a forward, on the same weights; a table says in which "
                    "`order`.",
    )
    unused: Names = Field(
        default=(), description="Blocks that own parameters and that forward skips."
    )


class ClusterTable(Table):
    """The cluster: a preset or a file, and how much of it."""

    preset: str | None = Field(default=None, description="A cluster of `zsim list clusters`.")
    file: str | None = Field(
        default=None, description="A cluster's file, as `zsim calibrate --out` writes it."
    )
    device: str | None = Field(
        default=None,
        description="Another GPU in the same nodes: a device of `zsim list devices`.",
    )
    nodes: int = Field(default=1, ge=1, le=100_000, description="Nodes of the cluster.")
    ranks: int | None = Field(
        default=None, ge=1, le=1_000_000,
        description="Ranks on a CPU host; on GPUs each device is a rank.",
    )
    nic_bandwidth: str | None = Field(
        default=None,
        description='Bandwidth of each NIC\'s link, as "100 Gbit/s", where the network is '
                    "oversubscribed or shared.",
    )
    power: str | None = Field(
        default=None,
        description='Watts at which each GPU\'s draw is capped, as "500 W"; clocks and products go '
                    "by it, memory does not.",
    )
    fabric: Literal["ib", "roce", "efa", "tcp"] | None = Field(
        default=None,
        description="The kind of network, as far as NCCL's collectives differ by it; by default "
                    "the preset's.",
    )


TABLES: Mapping[str, Any] = {"model": ModelTable, "cluster": ClusterTable, **TRAINING_TABLES}
"""Tables of fixed keys; `strategy`, `model.sizes` and `expect` depend on what they name."""


class AllocatorTable(Table):
    """torch's caching allocator for CUDA (PYTORCH_CUDA_ALLOC_CONF); on a CPU nothing is reserved
    ahead."""

    expandable_segments: bool = Field(
        default=False,
        description="Segments grow page by page: the same bytes are allocated, fewer reserved.",
    )


class LintTable(Table):
    """`zsim lint` on this scenario."""

    ignore: Names = Field(default=(), description="Rules that are not asked.")


KEYS: dict[str, Any] = {
    "description": (str, Field(default="", description="A sentence on what the scenario shows.")),
    "model": (ModelTable, ...),
    "batch": (TABLES["batch"], ...),
    "cluster": (ClusterTable, ...),
    "strategy": (dict[str, Any], ...),
    **{
        name: (TABLES[name], TABLES[name].model_construct())
        for name in (
            "precision", "optimizer", "offload", "activation_checkpointing", "wrapping",
            "execution",
        )
    },
    "frozen": (
        Names,
        Field(default=(), description="Shell-style patterns over the names of parameters that "
                                      "need no gradient."),
    ),
    "faults": (
        tuple[dict[str, Any], ...],
        Field(
            default=(), max_length=MOST_FAULTS,
            description="Faults and stragglers of the steady step, each with its `kind`.",
        ),
    ),
    "allocator": (AllocatorTable, AllocatorTable.model_construct()),
    "checkpoint": (CheckpointTable, CheckpointTable.model_construct()),
    "lint": (LintTable, LintTable.model_construct()),
    "steps": (
        int,
        Field(default=3, ge=1, le=1000, description="Steps of a real run; parameters are compared "
                                                    "after the last."),
    ),
    "seed": (
        int,
        Field(default=0, ge=0, le=2**31, description="Seed of initial parameters and batches."),
    ),
    "expect": (
        dict[str, bool | int | str],
        Field(default={}, description="Assertions about the steady step."),
    ),
}
"""The top level of a scenario; `strategy` has a table of its own, which its name decides."""
ScenarioTable: type[BaseModel] = create_model(
    "ScenarioTable", __base__=Table, __doc__="A whole scenario file.", **KEYS
)
