"""Fusions as data: which neighbouring operations become one launch, under which switch, in which phase.

`fuse` rewrites a list of operations by the table's entries, in their order, and counts what it did; the plans know only the
fused kinds. The four chains of D4 stand first among a phase's entries for the article's form; with `extended_fusion` the
longer chains take their members first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .graph import Op
from .options import ExecutionOptions


@dataclass(frozen=True)
class Fusion:
    """`names` (consecutive operations) become one of kind `into`. `keep_norm`: the last member's norm goes on alone, for
    its readers to take in. `joined_only`: needs the shared expert among the routed ones."""

    id: str
    option: str
    phases: tuple[str, ...]
    names: tuple[str, ...]
    into: str
    why: str
    keep_norm: bool = False
    joined_only: bool = False


BOTH, DECODE, PREFILL = ("prefill", "decode"), ("decode",), ("prefill",)

FUSIONS = (
    Fusion("E1", "extended_fusion", DECODE, ("gdn_conv_silu", "gdn_qk_norm", "gdn_gates", "gdn_scan"), "gdn_step",
           "one stage instead of three; columns over 128 threadgroups, which the article's chain cannot have"),
    Fusion("E2", "extended_fusion", DECODE, ("gdn_gated_norm", "linear:gdn_out", "add_rmsnorm"), "gated_norm_add",
           "the gated norm is a prologue of the projection that reads it, the residual its epilogue", keep_norm=True),
    Fusion("E3", "extended_fusion", DECODE, ("output_gate", "linear:attn_out", "add_rmsnorm"), "gate_add",
           "the same for attention", keep_norm=True),
    Fusion("D4.1", "fused_chains", DECODE, ("expert_linear:experts_gate_up", "silu_mul"), "moe_gate_up",
           "gate, up and activation of a slot in one launch"),
    Fusion("D4.2", "fused_chains", DECODE, ("expert_linear:experts_down", "moe_combine"), "moe_down_add",
           "down projection, routing weights, shared expert and residual in one launch", joined_only=True),
    Fusion("D4.3", "fused_chains", BOTH, ("attn_split", "attn_qk_norm", "attn_rope", "attn_cache_write"), "attn_prepare",
           "a row's heads are read once and written once"),
    Fusion("D4.4", "fused_chains", DECODE, ("gdn_scan", "gdn_gated_norm"), "gdn_scan_norm",
           "recurrent update with its gated norm (few threadgroups: E1 and E2 replace it)"),
    Fusion("E4", "extended_fusion", DECODE, ("router_topk", "moe_gate_up"), "route_gate_up",
           "every threadgroup ranks 256 logits itself, which is cheaper than a stage"),
    Fusion("E5", "extended_fusion", PREFILL, ("expert_linear:experts_gate_up", "silu_mul"), "expert_linear_silu",
           "the activation is the epilogue of the grouped GEMM: gate and up never reach memory"),
)

# E6: a norm that only these kinds read is applied by its readers: its scalar after their dot products, no pre-pass.
NORM_READERS = ("linear", "moe_gate_up", "route_gate_up")


def fuse(ops: Sequence[Op], phase: str, options: ExecutionOptions, joined: bool) -> tuple[list[Op], Counter[str]]:
    """The rewritten operations, and how often each entry applied."""
    out = [op for op in ops if not (phase == "decode" and op.kind == "route")]  # every (row, slot) runs alone there
    applied: Counter[str] = Counter()
    for entry in FUSIONS:
        enabled = options.fused_chains and (entry.option == "fused_chains" or options.extended_fusion)
        if enabled and phase in entry.phases and (joined or not entry.joined_only):
            out, count = _apply(out, entry)
            applied[entry.id] += count
    if phase == "decode" and options.fused_chains and options.extended_fusion:
        out, count = _norms_into_readers(out)
        applied["E6"] += count
    return out, applied


def _apply(ops: list[Op], entry: Fusion) -> tuple[list[Op], int]:
    out: list[Op] = []
    i = count = 0
    width = len(entry.names)
    while i < len(ops):
        part = ops[i : i + width]
        if tuple(op.name for op in part) == entry.names:
            out += _merged(part, entry)
            i += width
            count += 1
        else:
            out.append(ops[i])
            i += 1
    return out, count


def _merged(part: Sequence[Op], entry: Fusion) -> list[Op]:
    written: set[str] = set()
    reads: list[str] = []
    for op in part:
        reads += [r for r in op.reads if r not in written and r not in reads]
        written |= set(op.writes)
    weight = next((op.weight for op in part if op.weight), None)
    last = part[-1]
    if not entry.keep_norm:
        state = [w for op in part for w in op.writes if "." in w]  # caches and rings that a member writes
        return [Op(entry.into, last.layer, tuple(reads), tuple(dict.fromkeys([*last.writes, *state, *_results(part)])), weight)]
    norm = last.reads[-1]  # add_rmsnorm: h, y, weight
    reads.remove(norm)
    return [Op(entry.into, last.layer, tuple(reads), ("h",), weight), Op("rmsnorm", last.layer, ("h", norm), ("x",))]


def _results(part: Sequence[Op]) -> list[str]:
    """Values that outlive the chain: queries for attention, routing for the down projection."""
    return [w for op in part for w in op.writes if w in ("q", "expert_ids", "expert_weights")]


def _norms_into_readers(ops: list[Op]) -> tuple[list[Op], int]:
    out = list(ops)
    count = 0
    for i, op in enumerate(ops):
        if op.kind not in ("rmsnorm", "final_norm"):
            continue
        target = op.writes[0]
        readers = []
        for j in range(i + 1, len(ops)):
            if target in ops[j].reads:
                readers.append(j)
            if target in ops[j].writes:
                break
        if readers and all(ops[j].kind in NORM_READERS for j in readers):
            for j in readers:
                reads = tuple(r for r in ops[j].reads if r != target)
                out[j] = replace(ops[j], reads=("h", *reads), norm=op.reads[1])
            out[i] = replace(op, kind="gone")
            count += 1
    return [op for op in out if op.kind != "gone"], count
