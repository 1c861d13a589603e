"""The columns that tables of each source have as they were published, and which source a table's
own columns make it.

People add columns to such tables, and drop some. So of the sources whose needed columns are all
there a table is of the one that knows most of its columns, where a column that several sources have
says less than one that is a source's own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fractions import Fraction

HEADERS: dict[str, frozenset[str]] = {
    "llm-foundry": frozenset(
        (
            *(
                "table", "model", "n_params", "d_model", "n_heads", "n_layers", "vocab_size",
                "expansion_ratio", "tied_embeddings",
            ),
            *(
                "learned_pos_emb", "seq_len", "n_gpus", "gpus_per_node", "gpu", "interconnect",
                "precision", "mp_mode", "sharding",
            ),
            *(
                "activation_checkpointing", "activation_cpu_offload", "micro_batch", "grad_accum",
                "global_batch_seqs",
            ),
            *(
                "global_batch_tokens", "attn_impl", "seqs_per_s", "tokens_per_s",
                "tokens_per_s_per_gpu", "step_time_s_derived",
            ),
            *(
                "mfu_pct", "hfu_pct", "model_tflops_per_gpu", "mfu_pct_recomputed",
                "n_params_formula_ok", "peak_tflops_used",
            ),
            *("readme_revision", "measured_by", "source"),
        )
    ),
    "torchtitan": frozenset(
        (
            *(
                "model", "n_gpus", "seq_len", "local_batch", "global_batch", "dp_shard", "tp", "pp",
                "cp",
            ),
            *(
                "activation_checkpointing", "torch_compile", "precision", "float8", "async_tp",
                "technique", "gpu", "interconnect",
            ),
            *(
                "tokens_per_s_per_gpu", "peak_mem_gib", "mem_metric", "mfu_pct", "framework",
                "date", "source", "tokens_per_s_range",
            ),
            "peak_active_gib",
        )
    ),
    "fms-fsdp": frozenset(
        (
            *(
                "model", "n_gpus", "gpu", "interconnect", "seq_len", "micro_batch", "grad_accum",
                "sharding",
            ),
            *(
                "activation_checkpointing", "torch_compile", "precision", "attention", "optimizer",
                "vocab_size",
            ),
            *("tokens_per_s_per_gpu", "mfu_frac", "hfu_frac", "readme_revision", "source"),
        )
    ),
    "nanotron": frozenset(
        (
            *(
                "model", "seq_len", "nodes", "n_gpus", "micro_batch", "grad_accum",
                "global_batch_seqs", "dp", "pp", "tp",
            ),
            *(
                "zero_stage", "mfu_pct", "tokens_per_s_per_gpu", "tokens_per_s_total",
                "peak_mem_gb", "status", "gpu",
            ),
            *(
                "interconnect", "precision", "activation_checkpointing", "source", "n_layers",
                "d_model", "n_heads", "n_kv_heads",
            ),
            *(
                "d_ff", "vocab_size", "tied_embeddings", "n_params", "mfu_pct_recomputed",
                "config_consistent",
            ),
            "step_time_s_derived",
        )
    ),
    "megatron-deepspeed": frozenset(
        (
            *(
                "subset", "params_b_reported", "n_params_derived", "d_model", "n_heads", "n_layers",
                "seq_len", "n_gpus",
            ),
            *(
                "gpus_per_node", "tp", "dp", "pp", "global_batch_seqs", "micro_batch",
                "n_microbatches", "iter_time_ms",
            ),
            *(
                "step_time_s", "tokens_per_s_per_gpu_derived",
                "model_tflops_per_gpu_derived_v51200", "gpu",
            ),
            *(
                "activation_checkpointing", "pipeline_schedule", "framework", "intra_node",
                "inter_node_gbps_per_node", "source",
            ),
        )
    ),
}
"""By the names of sources."""
FILES = {
    "mpt_llm_foundry": "llm-foundry",
    "torchtitan": "torchtitan",
    "fms_fsdp": "fms-fsdp",
    "ultrascale_playbook_sweep": "nanotron",
    "vtrain_megatron_ds_a100": "megatron-deepspeed",
}
"""The names of their files as they were published, without the suffix."""


def likeliest(
    sources: Iterable[str], columns: Collection[str], *, file: str = "",
    filled: Collection[str] = (),
) -> tuple[str, ...]:
    """Of `sources` the one that knows most of the `columns`. Of several that know as much the one
    that the `file` is named after, else the one that knows most of the columns that are `filled` in
    any row; all of them where that tells nothing either.
    """
    best = _most(tuple(sources), columns)
    named = FILES.get(file.replace("\\", "/").rpartition("/")[2].rpartition(".")[0].lower(), "")
    return (named,) if named in best else _most(best, filled)


def _most(sources: tuple[str, ...], columns: Collection[str]) -> tuple[str, ...]:
    known = {
        name: sum(Fraction(1, _sharers(column)) for column in columns if column in HEADERS[name])
        for name in sources
    }
    return tuple(name for name, weight in known.items() if weight == max(known.values()))


def _sharers(column: str) -> int:
    return sum(column in header for header in HEADERS.values())
