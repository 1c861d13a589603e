"""Configs of other tools, read as scenarios: DeepSpeed, accelerate, transformers, torchtitan,
Megatron-LM, nanotron."""
