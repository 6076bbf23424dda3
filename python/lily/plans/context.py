"""What a lowering knows: dims, weight groups, rows of the pass, and where each named value lives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .. import policy
from ..config import ModelConfig
from ..options import ExecutionOptions
from ..schedule import Binding, Dispatch, Region
from ..weight_layout import Group, Part

ALIGN = 256  # byte alignment of every value in the arena and of every tensor in a weight buffer


def aligned(n: int) -> int:
    return -(-n // ALIGN) * ALIGN


def weight_region(group: Group, part: Part) -> Region:
    """The buffer of one part of a weight group."""
    return Region(f"{part}:{group.name}", 0, group.weight_bytes if part == "weight" else group.scale_bytes)


def row_stride(group: Group) -> int:
    """Elements between rows of a projection's output: kernels load eight bf16 at a time, whatever the head counts are."""
    return -(-group.n // 8) * 8


@dataclass(frozen=True)
class PlanContext:
    """Inputs of a plan. `phase`: "prefill" or "decode"; `rows`: rows of the pass; `context`: keys that attention may see (end of the context range);
    `head_rows`: rows of logits (0 = none, 1 = the last row, rows = all); `capacity`: rows of the KV cache."""

    config: ModelConfig
    groups: Mapping[str, Group]
    plain: Mapping[str, int]  # bytes of every plain tensor
    phase: str
    rows: int
    context: int
    capacity: int
    head_rows: int
    options: ExecutionOptions
    capabilities: policy.Capabilities

    # -- dims --------------------------------------------------------------------------------------------------------
    @property
    def slots(self) -> int:
        return self.config.top_k + self.shared_slots

    @property
    def shared_slots(self) -> int:
        """Pseudo experts that the shared expert makes: as many as its width holds expert widths."""
        return max(1, self.config.shared_width // self.config.expert_width) if self.shared_joined else 1

    @property
    def shared_joined(self) -> bool:
        """Whether the shared expert lies behind the routed ones in their groups."""
        return "layers.0.shared_gate_up" not in self.groups

    @property
    def expert_count(self) -> int:
        """Experts that routing knows, the shared pseudo experts included."""
        return self.config.num_experts + self.shared_slots

    @property
    def expert_gemv(self) -> bool:
        return policy.use_gemv(self.phase, self.rows)

    @property
    def tile(self) -> int:
        c = self.config
        return policy.expert_tile(self.rows, c.top_k, c.num_experts, self.options.tile_by_load, self.largest_tile)

    @property
    def largest_tile(self) -> int:
        return policy.largest_tile(self.options.tensor_ops, self.capabilities)

    @property
    def total(self) -> int:
        return self.rows * self.slots

    @property
    def max_blocks(self) -> int:
        return policy.block_map_size(self.total, self.tile, self.expert_count)

    @property
    def split_tiles(self) -> bool:
        """P3: a list of large tiles and a list of small ones for what is left of each expert, both in one level."""
        return self.tile > 16

    @property
    def tail_tile(self) -> int:
        """Rows of a tile of the second list."""
        return self.tile // 2

    @property
    def max_tail(self) -> int:
        return min(self.expert_count, self.total) if self.split_tiles else 0

    @property
    def key_blocks(self) -> int:
        """Key blocks of decode attention (D7)."""
        if self.phase != "decode":
            return 1
        c = self.config
        fixed = self.options.fixed_block_attention and policy.fixed_block_shape(c.head_dim, c.q_heads, c.kv_heads)
        return policy.attention_blocks(self.context, fixed, self.capabilities.tuning)

    # -- where values live ---------------------------------------------------------------------------------------------
    def value_bytes(self) -> dict[str, int]:
        """Bytes of every activation of a pass; bf16 unless the comment says otherwise."""
        c, r, s = self.config, self.rows, self.total
        proj = max((row_stride(g) for n, g in self.groups.items() if n.endswith((".gdn_in", ".attn_in"))), default=0)
        ba = max((row_stride(g) for n, g in self.groups.items() if n.endswith(".gdn_ba")), default=0)
        hidden, gdn_v, att = c.hidden_size, c.value_width, c.q_width
        shared = c.shared_width
        blocks = self.key_blocks
        scratch = max((max(1, g.experts) * g.n * g.k for g in self.groups.values() if g.bits != 16 and g.name != "embed"), default=0)
        return {
            "ids": 4 * r,
            "h": 2 * r * hidden, "x": 2 * r * hidden, "y": 2 * r * hidden,
            "proj": 2 * r * proj, "ba": 2 * r * ba,
            "conv": 2 * r * c.conv_channels,
            "beta": 4 * r * c.v_heads, "decay": 4 * r * c.v_heads,  # f32
            "k": 2 * r * c.kv_width,
            "scan": 2 * r * gdn_v, "mix": 2 * r * max(gdn_v, att), "q": 2 * r * att,
            "attn_partial": 4 * c.q_heads * blocks * (c.head_dim + 2) if blocks > 1 else 0,  # f32
            "router_logits": 4 * r * (c.num_experts + 1), "shared_logit": 4 * r,  # f32
            "expert_ids": 4 * s, "expert_weights": 4 * s,  # uint, f32
            "offsets": 4 * (self.expert_count + 1), "sorted_rows": 4 * s, "row_pos": 4 * s,  # uint
            "block_map": 16 * self.max_blocks, "tail_map": 16 * self.max_tail,  # uint4
            "expanded": 0 if self.options.fused_dequant or self.phase == "decode" else 2 * scratch,  # P1's control
            "gate_up": 2 * s * 2 * c.expert_width, "act": 2 * s * c.expert_width, "expert_out": 2 * s * hidden,
            "shared_gate_up": 0 if self.shared_joined else 2 * r * 2 * shared,
            "shared_act": 0 if self.shared_joined else 2 * r * shared,
            "head_x": 2 * self.head_rows * hidden, "logits": 4 * self.head_rows * c.vocab_size,  # f32
            "partial": 8 * policy.argmax_blocks(c.vocab_size), "nonfinite": 4 * policy.argmax_blocks(c.vocab_size),
            "sampled": 8,
        }

    def arena(self) -> dict[str, Region]:
        """A region of the buffer `arena` for every activation."""
        out, at = {}, 0
        for name, nbytes in self.value_bytes().items():
            out[name] = Region("arena", at, nbytes)
            at += aligned(nbytes)
        if self.phase == "decode":  # a gate with a format of its own still stands behind the experts' logits
            out["shared_logit"] = out["router_logits"].slice(4 * self.config.num_experts)
        return out

    def arena_bytes(self) -> int:
        return sum(aligned(n) for n in self.value_bytes().values())

    # -- state ---------------------------------------------------------------------------------------------------------
    def state_bytes(self) -> dict[str, int]:
        """Bytes of every state buffer of a session, by buffer name."""
        return session_state_bytes(self.config, self.capacity)


def session_state_bytes(config: ModelConfig, capacity: int) -> dict[str, int]:
    """Bytes per state buffer: bf16 KV of `capacity` rows, and the rings of three conv and GDN slots (f32 state)."""
    out: dict[str, int] = {}
    for i in range(config.num_layers):
        if config.is_attention(i):
            out[f"kv_k.{i}"] = out[f"kv_v.{i}"] = 2 * capacity * config.kv_heads * config.head_dim
        else:
            out[f"conv.{i}"] = 3 * 2 * (config.conv_taps - 1) * config.conv_channels
            out[f"gdn.{i}"] = 3 * 4 * config.v_heads * config.dv * config.dk
    return out


class Builder:
    """Collects dispatches; resolves names to regions."""

    def __init__(self, ctx: PlanContext, fixed: Mapping[str, Region]) -> None:
        self.ctx = ctx
        self.config = ctx.config
        self.regions: dict[str, Region] = {**ctx.arena(), **fixed}
        for name, nbytes in ctx.state_bytes().items():
            self.regions[name] = Region(name, 0, nbytes)
        for name, nbytes in ctx.plain.items():
            self.regions[f"p:{name}"] = Region(f"p:{name}", 0, nbytes)
        self.out: list[Dispatch] = []

    def region(self, name: str) -> Region:
        return self.regions[name]

    def bind(self, index: int, name: str | Region, mode: str = "r", touched: int | None = None) -> Binding:
        return Binding(index, name if isinstance(name, Region) else self.regions[name], mode, touched)

    def emit(
        self, id: str, family: str, function: str, bindings: list[Binding], args_index: int, struct: str,
        args: Mapping[str, float | int], grid: tuple[int, int, int], threads: int, macs: int = 0,
        constants: tuple[tuple[int, str, float | int | bool], ...] = (),
    ) -> None:
        self.out.append(Dispatch(id, family, function, tuple(bindings), args_index, struct, tuple(args.items()),
                                 grid, (threads, 1, 1), constants, macs=macs))
