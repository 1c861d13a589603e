"""Keys that scripts over transformers' Trainer add to its TrainingArguments: trl's, axolotl's and
LLaMA-Factory's.

Source: trl 1.16; axolotl 0.19, utils/schemas; LLaMA-Factory 0.9.5, hparams.
"""

from __future__ import annotations

from zsim.configs.config_keys import MODEL_PARALLEL, ConfigKeys
from zsim.configs.draft import Draft

DROPPED = "not modelled; --drop leaves it out"
ADAPTERS = "adapters are not modelled; --drop leaves it out: all parameters are trained"
KERNELS = f"fused kernels are {DROPPED}"
SECOND = "training by preferences has a second model, which is not modelled"
GENERATION = ("num_generations", "max_completion_length")
UNMODELLED = {
    "finetuning_type": ("full", ADAPTERS), "adapter": ("none", ADAPTERS),
    "use_peft": (False, ADAPTERS), "load_in_4bit": (False, ADAPTERS),
    "load_in_8bit": (False, ADAPTERS), "quantization_bit": (None, ADAPTERS),
    "use_liger_kernel": (False, KERNELS), "use_liger": (False, KERNELS),
    "enable_liger_kernel": (False, KERNELS), "use_v1_kernels": (False, KERNELS),
    "use_kernels": (False, KERNELS), "use_unsloth": (False, KERNELS),
    **dict.fromkeys(("flash_attn_cross_entropy", "flash_attn_fuse_mlp", "flash_attn_rms_norm"),
                    (False, KERNELS)),
    "plugins": (None, f"their kernels are {DROPPED}"),
    **dict.fromkeys(("use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_muon"),
                    (False, f"this optimizer is {DROPPED}")),
    **dict.fromkeys(("use_dft_loss", "use_asft_loss", "use_eaft_loss", "use_eaft"),
                    (False, f"this loss is {DROPPED}")),
    **dict.fromkeys(("freeze_vision_tower", "freeze_multi_modal_projector",
                     "freeze_language_model", "unfrozen_parameters"),
                    (False, "give it as the scenario's frozen; --drop leaves it out")),
    **dict.fromkeys(("fp8", "qat", "mixture_of_depths", "auto_find_batch_size",
                     "neftune_noise_alpha", "parallelism_config", "activation_offloading"),
                    (False, f"it is {DROPPED}")),
    "beta": (None, f"{SECOND}; --drop leaves it out"), "rl": (None, SECOND),
    "reward_model": (False, SECOND), "process_reward_model": (False, SECOND),
    "tensor_parallel_size": (1, MODEL_PARALLEL),
    "context_parallel_size": (1, f"it is {DROPPED}"),
    "expert_parallel_size": (1, f"it is {DROPPED}"),
}
"""Keys with the value that is modelled, and how a refusal of any other ends."""
OFF = (
    "apollo_*", "asft_*", "badam_*", "ddp_static_graph", "double_quantization", "eaft_*", "fp8_*",
    "freeze_*", "galore_*", "gptq_*", "liger_*", "lora_*", "loraplus_*", "num_labels", "oft_*",
    "peft_*", "pissa_*", "quantization_*",
)
"""Shell-style patterns of options of what is refused, or off."""
NO_STEP = (
    "assistant_only_loss", "attn", "attn_implementation", "base_model*", "chat_template*",
    "completion_only_loss", "cosine_*", "dataset*", "default_system_message", "early_stopping*",
    "enable_thinking", "eos_token", "eot_tokens", "eta_min", "eval_dataset", "evals_per_epoch",
    "excess_length_strategy", "experimental_*", "flash_attention", "flash_attn", "image_max_pixels",
    "include_mfu", "is_*_derived_model", "is_preprocess", "log_completions", "log_evals",
    "loss_type", "mask_history", "max_prompt_length", "max_samples", "min_sample_len", "mlflow_*",
    "model_*", "overwrite_cache", "pack*", "pad_*", "plot_loss", "precompute_ref_log_probs",
    "pref_*", "preprocessing_*", "pretraining_dataset", "processor_*", "ray_*", "resize_token_*",
    "rope_scaling", "sample_packing*", "saves_per_epoch", "sdp_attention", "seed_worker",
    "shuffle_*", "skip_prepare_dataset", "special_tokens", "streaming*", "strict", "template",
    "test_datasets", "tokenized_path", "tokenizer_*", "tokens", "trackio_*", "train_on_inputs",
    "trust_remote_code", "type_of_model", "use_flash_attention_2", "use_tensorboard", "val_*",
    "video_max_pixels", "wandb_*", "xformers_attention",
)
"""Shell-style patterns of keys of data, logs and models that change no step."""


def name_model(config: ConfigKeys, draft: Draft) -> None:
    """Name the model, before anything that depends on it is put."""
    key = next((key for key in ("base_model", "model_name_or_path") if key in config), "")
    draft.name_model(config.text(key) if key else None, key)


def read(config: ConfigKeys, draft: Draft) -> None:
    """Refuse what is not modelled, and leave out what changes no step."""
    for name, (value, unmodelled) in UNMODELLED.items():
        config.only(name, value, unmodelled=unmodelled)
    if config.text("stage", "sft") not in ("sft", "pt"):
        draft.notes.problem("stage", f"expected sft or pt, found another; {SECOND}")
    generation = [key for key in config.left if "vllm" in key or key in GENERATION]
    if generation:
        draft.notes.problem(generation[0], "expected none, found some; reinforcement learning "
                                           "generates text, which is not modelled")
        config.ignore("an option of generation", *generation)
    config.ignore("an option of what is off", *OFF)
