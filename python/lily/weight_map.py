"""Every tensor that a checkpoint of this architecture must hold, derived from the config alone.

A *module* is a projection (weight, and scales and biases when quantised); a *plain* tensor is small and kept as float32.
Short names (`layers.0.conv1d`) are what the rest of lily uses; stored names follow MLX-LM's layout.
"""

from __future__ import annotations

from dataclasses import dataclass

from .config import ModelConfig

PREFIX = "language_model.model."
HEAD = "language_model.lm_head"


@dataclass(frozen=True)
class Module:
    """A projection of ``k`` inputs to ``n`` outputs, ``experts`` times over if that is not 0.

    ``plain_allowed``: may be stored as bfloat16 without scales. ``sniffed``: MLX-LM quantises it finer than the default,
    so without an override its bits come from the packed width alone.
    """

    path: str
    n: int
    k: int
    experts: int = 0
    plain_allowed: bool = False
    sniffed: bool = False


@dataclass(frozen=True)
class Plain:
    """A small tensor: stored name, logical shape, and whether raw Hugging Face files store it minus one."""

    tensor: str
    shape: tuple[int, ...]
    offset_norm: bool = False


def modules(config: ModelConfig) -> dict[str, Module]:
    """Projections by stored path, in the order of the model."""
    c = config
    found = [Module(PREFIX + "embed_tokens", c.vocab_size, c.hidden_size), Module(HEAD, c.vocab_size, c.hidden_size)]
    for i in range(c.num_layers):
        found += _attention_modules(c, i) if c.is_attention(i) else _gdn_modules(c, i)
        found += _moe_modules(c, i)
    return {module.path: module for module in found}


def _gdn_modules(c: ModelConfig, i: int) -> list[Module]:
    p = f"{PREFIX}layers.{i}.linear_attn."
    return [
        Module(p + "in_proj_qkv", c.conv_channels, c.hidden_size),
        Module(p + "in_proj_z", c.value_width, c.hidden_size),
        Module(p + "in_proj_b", c.v_heads, c.hidden_size, plain_allowed=True),
        Module(p + "in_proj_a", c.v_heads, c.hidden_size, plain_allowed=True),
        Module(p + "out_proj", c.hidden_size, c.value_width),
    ]


def _attention_modules(c: ModelConfig, i: int) -> list[Module]:
    p = f"{PREFIX}layers.{i}.self_attn."
    return [
        Module(p + "q_proj", 2 * c.q_width, c.hidden_size),  # per head: query rows, then gate rows
        Module(p + "k_proj", c.kv_width, c.hidden_size),
        Module(p + "v_proj", c.kv_width, c.hidden_size),
        Module(p + "o_proj", c.hidden_size, c.q_width),
    ]


def _moe_modules(c: ModelConfig, i: int) -> list[Module]:
    p = f"{PREFIX}layers.{i}.mlp."
    return [
        Module(p + "gate", c.num_experts, c.hidden_size, plain_allowed=True, sniffed=True),
        Module(p + "shared_expert_gate", 1, c.hidden_size, plain_allowed=True, sniffed=True),
        Module(p + "switch_mlp.gate_proj", c.expert_width, c.hidden_size, c.num_experts),
        Module(p + "switch_mlp.up_proj", c.expert_width, c.hidden_size, c.num_experts),
        Module(p + "switch_mlp.down_proj", c.hidden_size, c.expert_width, c.num_experts),
        Module(p + "shared_expert.gate_proj", c.shared_width, c.hidden_size),
        Module(p + "shared_expert.up_proj", c.shared_width, c.hidden_size),
        Module(p + "shared_expert.down_proj", c.hidden_size, c.shared_width),
    ]


def plain_tensors(config: ModelConfig) -> dict[str, Plain]:
    """Plain tensors by short name. The convolution's logical shape is [channels, taps], taps oldest first."""
    c = config
    found = {"final_norm": Plain(PREFIX + "norm.weight", (c.hidden_size,), True)}
    for i in range(c.num_layers):
        short, stored = f"layers.{i}.", f"{PREFIX}layers.{i}."
        found[short + "input_norm"] = Plain(stored + "input_layernorm.weight", (c.hidden_size,), True)
        found[short + "post_norm"] = Plain(stored + "post_attention_layernorm.weight", (c.hidden_size,), True)
        if c.is_attention(i):
            found[short + "q_norm"] = Plain(stored + "self_attn.q_norm.weight", (c.head_dim,), True)
            found[short + "k_norm"] = Plain(stored + "self_attn.k_norm.weight", (c.head_dim,), True)
        else:
            found[short + "conv1d"] = Plain(stored + "linear_attn.conv1d.weight", (c.conv_channels, c.conv_taps))
            found[short + "A_log"] = Plain(stored + "linear_attn.A_log", (c.v_heads,))
            found[short + "dt_bias"] = Plain(stored + "linear_attn.dt_bias", (c.v_heads,))
            found[short + "gdn_norm"] = Plain(stored + "linear_attn.norm.weight", (c.dv,))
    return found
