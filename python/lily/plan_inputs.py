"""What a plan needs of a model without its weights: weight groups and sizes of small tensors, from dims alone."""

from __future__ import annotations

from .config import ModelConfig
from .weight_layout import Format, Group, build_layout
from .weight_map import modules, plain_tensors


def default_formats(config: ModelConfig, bits: int = 4, group_size: int = 64) -> dict[str, Format]:
    """Formats as `mlx_lm.convert -q` chooses them: affine 4 bits, router and shared-expert gate at 8."""
    return {path: Format(8 if path.endswith((".mlp.gate", ".shared_expert_gate")) else bits, group_size) for path in modules(config)}


def default_groups(config: ModelConfig) -> dict[str, Group]:
    """The weight groups of such a checkpoint."""
    return {g.name: g for g in build_layout(config, modules(config), default_formats(config))}


def plain_bytes(config: ModelConfig) -> dict[str, int]:
    """Float32 bytes of every small tensor."""
    out = {}
    for name, spec in plain_tensors(config).items():
        count = 1
        for extent in spec.shape:
            count *= extent
        out[name] = 4 * count
    return out
