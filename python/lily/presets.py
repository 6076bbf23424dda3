"""Dimensions of the models that lily ships or was made for, usable without their checkpoints (plans, random weights)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import ModelConfig


def _preset(layers: int, eos: list[int], **dims: Any) -> ModelConfig:
    fine = {"group_size": 64, "bits": 8}
    overrides = {f"language_model.model.layers.{i}.mlp.{name}": fine for i in range(layers) for name in ("gate", "shared_expert_gate")}
    return ModelConfig.from_dict({
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "eos_token_id": eos,
        "quantization": {"group_size": 64, "bits": 4, "mode": "affine", **overrides},
        "text_config": {
            "num_hidden_layers": layers, "full_attention_interval": 4, "head_dim": 256, "rms_norm_eps": 1e-6,
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_experts_per_tok": 8,
            "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25}, **dims,
        },
    }, where="preset")


PRESETS: Mapping[str, ModelConfig] = {
    "qwen3.6-35b-a3b": _preset(
        40, [248046, 248044], hidden_size=2048, vocab_size=248320, max_position_embeddings=262144, num_attention_heads=16,
        num_key_value_heads=2, linear_num_key_heads=16, linear_num_value_heads=32, num_experts=256, moe_intermediate_size=512,
        shared_expert_intermediate_size=512),
    "lily-tiny": _preset(
        8, [6137, 6135], hidden_size=256, vocab_size=6144, max_position_embeddings=131072, num_attention_heads=8,
        num_key_value_heads=1, linear_num_key_heads=2, linear_num_value_heads=4, num_experts=32, moe_intermediate_size=64,
        shared_expert_intermediate_size=64),
}
