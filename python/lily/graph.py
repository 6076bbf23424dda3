"""The model as a list of operations: what each reads and writes, without sizes, phases or kernels.

Names: activations `h` (residual stream), `x` (normalised input), `proj`, …; weights `w:<group>` and plain tensors
`p:<name>`; state `kv_k.<layer>`, `kv_v.<layer>`, `conv.<layer>`, `gdn.<layer>` and `step`. MODEL.md's mathematics, in
MODEL.md's order; the plans turn operations into dispatches.
"""

from __future__ import annotations

from dataclasses import dataclass

from .config import ModelConfig


@dataclass(frozen=True)
class Op:
    """One operation. `kind` selects the lowering; `layer` is -1 outside the layers; `weight` names a weight group.
    `norm` names a norm weight that the operation applies to its input itself (see fusions)."""

    kind: str
    layer: int
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    weight: str | None = None
    norm: str | None = None

    @property
    def name(self) -> str:
        """The kind, with the weight group for the kinds that occur several times in a layer: `linear:gdn_in`."""
        return f"{self.kind}:{self.weight.split('.')[-1]}" if self.kind in ("linear", "expert_linear") and self.weight else self.kind

    @property
    def id(self) -> str:
        name = self.name.split(":")[-1]
        return f"L{self.layer}.{name}" if self.layer >= 0 else name


def _linear(layer: int, weight: str, source: str, target: str) -> Op:
    return Op("linear", layer, (source,), (target,), weight)


def _gdn(config: ModelConfig, i: int, groups: frozenset[str]) -> list[Op]:
    p = f"layers.{i}"
    ops = [_linear(i, f"{p}.gdn_in", "x", "proj")]
    if f"{p}.gdn_ba" in groups:
        ops.append(_linear(i, f"{p}.gdn_ba", "x", "ba"))
    ba = "ba" if f"{p}.gdn_ba" in groups else "proj"
    return [
        *ops,
        Op("gdn_conv_silu", i, ("proj", f"p:{p}.conv1d", f"conv.{i}", "step"), ("conv", f"conv.{i}")),
        Op("gdn_qk_norm", i, ("conv",), ("conv",)),
        Op("gdn_gates", i, (ba, f"p:{p}.A_log", f"p:{p}.dt_bias"), ("beta", "decay")),
        Op("gdn_scan", i, ("conv", "beta", "decay", f"gdn.{i}", "step"), ("scan", f"gdn.{i}")),
        Op("gdn_gated_norm", i, ("scan", "proj", f"p:{p}.gdn_norm"), ("mix",)),
        _linear(i, f"{p}.gdn_out", "mix", "y"),
    ]


def _attention(config: ModelConfig, i: int) -> list[Op]:
    p = f"layers.{i}"
    return [
        _linear(i, f"{p}.attn_in", "x", "proj"),
        Op("attn_split", i, ("proj",), ("q", "k")),
        Op("attn_qk_norm", i, ("q", "k", f"p:{p}.q_norm", f"p:{p}.k_norm"), ("q", "k")),
        Op("attn_rope", i, ("q", "k", "p:rope_lo", "p:rope_hi", "step"), ("q", "k")),
        Op("attn_cache_write", i, ("k", "proj", "step"), (f"kv_k.{i}", f"kv_v.{i}")),
        Op("attention", i, ("q", f"kv_k.{i}", f"kv_v.{i}", "step"), ("mix",)),
        Op("output_gate", i, ("mix", "proj"), ("mix",)),
        _linear(i, f"{p}.attn_out", "mix", "y"),
    ]


def _moe(config: ModelConfig, i: int, groups: frozenset[str]) -> list[Op]:
    p = f"layers.{i}"
    ops = [_linear(i, f"{p}.router", "x", "router_logits")]
    shared = "router_logits"
    if f"{p}.shared_gate" in groups:
        ops.append(_linear(i, f"{p}.shared_gate", "x", "shared_logit"))
        shared = "shared_logit"
    ops.append(Op("router_topk", i, ("router_logits", shared), ("expert_ids", "expert_weights")))
    ops.append(Op("route", i, ("expert_ids",), ("offsets", "sorted_rows", "row_pos", "block_map")))
    routed = ("sorted_rows", "block_map", "expert_ids")
    if f"{p}.shared_gate_up" in groups:  # the shared expert has a format of its own: a dense pair of launches
        ops.append(_linear(i, f"{p}.shared_gate_up", "x", "shared_gate_up"))
        ops.append(Op("silu_mul_shared", i, ("shared_gate_up",), ("shared_act",)))
        ops.append(_linear(i, f"{p}.shared_down", "shared_act", "expert_out"))
    ops.append(Op("expert_linear", i, ("x", *routed), ("gate_up",), f"{p}.experts_gate_up"))
    ops.append(Op("silu_mul", i, ("gate_up",), ("act",)))
    ops.append(Op("expert_linear", i, ("act", *routed), ("expert_out",), f"{p}.experts_down"))
    ops.append(Op("moe_combine", i, ("h", "expert_out", "expert_weights", "row_pos"), ("h",)))
    return ops


def layer_ops(config: ModelConfig, i: int, groups: frozenset[str]) -> list[Op]:
    """The operations of layer `i`: norm, mixer, residual with norm, mixture of experts."""
    p = f"layers.{i}"
    mixer = _attention(config, i) if config.is_attention(i) else _gdn(config, i, groups)
    return [
        Op("rmsnorm", i, ("h", f"p:{p}.input_norm"), ("x",)),
        *mixer,
        Op("add_rmsnorm", i, ("h", "y", f"p:{p}.post_norm"), ("h", "x")),
        *_moe(config, i, groups),
    ]


def model_ops(config: ModelConfig, groups: frozenset[str]) -> list[Op]:
    """Embedding and all layers; `groups` are the names of the checkpoint's weight groups, which tell what is separate."""
    ops = [Op("embed", -1, ("ids",), ("h",), "embed")]
    for i in range(config.num_layers):
        ops += layer_ops(config, i, groups)
    return ops


def head_ops(config: ModelConfig, sampled: bool, adjusted: bool = False, logprobs: bool = False) -> list[Op]:
    """Final norm, head and the choice of the next token, for the last row of a pass. `adjusted`: penalties, bias or a mask
    first; `logprobs`: of the chosen token, which the sampler must have chosen."""
    ops = [
        Op("final_norm", -1, ("h", "p:final_norm"), ("head_x",)),
        _linear(-1, "lm_head", "head_x", "logits"),
    ]
    if adjusted:
        ops.append(Op("adjust", -1, ("logits", "token_counts", "logit_bias", "token_mask", "sample_params", "step"), ("logits", "token_counts")))
    ops.append(Op("argmax", -1, ("logits",), ("partial", "nonfinite")))
    if sampled:
        ops.append(Op("sample", -1, ("logits", "sample_params", "step"), ("sampled",)))
    if logprobs:
        ops.append(Op("logprobs", -1, ("logits", "sample_params", "step", "sampled"), ("logprobs",)))
    ops.append(Op("finish", -1, ("partial", "nonfinite", "stop_ids", "sampled", "step"), ("step",)))
    return ops
