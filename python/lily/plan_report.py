"""`lily plan`: a plan without weights, as numbers, as JSON and as a picture.

The modelled time is the sum over stages of max(bytes / bandwidth, latency): launches of one stage overlap, a stage cannot
be shorter than its latency. The constants describe one named device and are not fitted to anything measured here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import policy
from .config import ModelConfig
from .errors import RequestError
from .kernel_args import structs
from .options import ExecutionOptions
from .plan_inputs import default_groups, plain_bytes
from .plans.context import PlanContext
from .plans.decode import decode_plan
from .plans.geometry import ROPE_LO_ROWS
from .plans.prefill import prefill_plan
from .presets import PRESETS
from .schedule import HOST, Dispatch, Region
from .weight_layout import Group


@dataclass(frozen=True)
class DeviceModel:
    """Bandwidth in bytes per second, seconds per dependent stage, GPU cores, seconds of a stop for the CPU."""

    name: str
    bandwidth: float
    latency: float
    cores: int
    round_trip: float


# 614 GB/s; the Rust engine of the article: 555 stages took 5.47 ms over a floor of 3.06 ms, about 4.3 µs a stage.
# A CPU round trip takes 130 to 180 µs on Apple GPUs.
M5_MAX = DeviceModel("M5 Max", 614e9, 4.3e-6, 40, 155e-6)
M5_MAX_CAPABILITIES = policy.Capabilities(tensor_ops=True)

WEIGHT_PARTS = ("weight", "scales", "biases")
STATE_PARTS = ("conv", "gdn", "kv_k", "kv_v")


@dataclass(frozen=True)
class PlanReport:
    """A scheduled plan with the context that made it."""

    phase: str
    ctx: PlanContext
    ops: list[Dispatch]
    device: DeviceModel = M5_MAX

    def stages(self) -> list[list[Dispatch]]:
        out: list[list[Dispatch]] = [[] for _ in range(1 + max(d.level for d in self.ops))]
        for d in self.ops:
            out[d.level].append(d)
        return out

    def stage_seconds(self, stage: list[Dispatch]) -> float:
        latency = self.device.round_trip if any(d.family == HOST for d in stage) else self.device.latency
        return max(sum(dram_bytes(d) for d in stage) / self.device.bandwidth, latency)

    def totals(self) -> dict[str, Any]:
        """launches, stops for the CPU, stages, bytes moved past the caches, the floor from dims alone, arena bytes, modelled milliseconds,
        and the fewest threadgroups of a stage that reads over 1 MB."""
        stages = self.stages()
        heavy = [sum(d.threadgroups for d in s) for s in stages if sum(dram_bytes(d) for d in s) > 1_000_000]
        return {
            "launches": sum(d.family != HOST for d in self.ops),
            "cpu_stops": sum(d.family == HOST for d in self.ops),
            "stages": len(stages),
            "bytes": sum(dram_bytes(d) for d in self.ops),
            "floor_bytes": floor_bytes(self.ctx.config, self.ctx.groups, self.ctx.rows, self.ctx.context, self.ctx.head_rows),
            "arena_bytes": self.ctx.arena_bytes(),
            "modelled_ms": 1e3 * sum(self.stage_seconds(s) for s in stages),
            "device": self.device.name,
            "min_heavy_threadgroups": min(heavy, default=0),
        }

    def to_json(self) -> str:
        c = self.ctx.config
        dims = {"layers": c.num_layers, "hidden": c.hidden_size, "experts": c.num_experts, "top_k": c.top_k, "vocab": c.vocab_size}
        ops = [{"id": d.id, "kernel": d.function, "grid": list(d.grid), "threadgroup": list(d.threads), "reads": _regions(d, "r"),
                "writes": _regions(d, "w"), "bytes": d.bytes_read + d.bytes_written, "level": d.level} for d in self.ops]
        return json.dumps({"dims": dims, "phase": self.phase, "context": self.ctx.context, "rows": self.ctx.rows, "totals": self.totals(), "ops": ops})

    def table(self) -> str:
        """One line an op, then the totals."""
        lines = [f"{'level':>5}  {'op':<28} {'kernel':<32} {'grid':<16} {'threads':>7} {'read':>12} {'written':>12}"]
        for d in self.ops:
            grid = "x".join(map(str, d.grid))
            lines.append(f"{d.level:>5}  {d.id:<28} {d.function:<32} {grid:<16} {d.threads[0]:>7} {d.bytes_read:>12,} {d.bytes_written:>12,}")
        t = self.totals()
        lines += ["", f"launches {t['launches']}, stops for the CPU {t['cpu_stops']}, stages {t['stages']}, arena {t['arena_bytes']:,} bytes",
                  f"bytes {t['bytes']:,}, floor {t['floor_bytes']:,} ({t['bytes'] / t['floor_bytes'] - 1:+.1%})",
                  f"fewest threadgroups of a stage over 1 MB: {t['min_heavy_threadgroups']}",
                  f"modelled on {self.device.name} ({self.device.bandwidth / 1e9:.0f} GB/s, {self.device.latency * 1e6:.1f} µs a stage): {t['modelled_ms']:.2f} ms"]
        return "\n".join(lines)

    def svg(self) -> str:
        """A timeline: a row of bars per layer, a bar per stage as wide as its modelled time, bandwidth-bound ones dark."""
        rows: dict[str, list[list[Dispatch]]] = {}
        for stage in self.stages():
            rows.setdefault(stage[0].id.split(".")[0] if "." in stage[0].id else "rest", []).append(stage)
        scale = 900 / max(sum(map(self.stage_seconds, r)) for r in rows.values())
        out = []
        for y, (name, stages) in enumerate(rows.items()):
            out.append(f'<text x="4" y="{y * 18 + 44}" font-size="11">{name}</text>')
            x = 60.0
            for stage in stages:
                seconds = self.stage_seconds(stage)
                colour = "#24506e" if seconds > self.device.latency else "#9cc3dd"
                title = "; ".join(f"{d.id} {d.function}" for d in stage)
                out.append(f'<rect x="{x:.1f}" y="{y * 18 + 33}" width="{max(seconds * scale - 1, 0.5):.1f}" height="14" fill="{colour}">'
                           f"<title>{title}: {seconds * 1e6:.1f} µs</title></rect>")
                x += seconds * scale
        t = self.totals()
        head = f"{self.phase}, context {self.ctx.context}: {t['launches']} launches, {t['stages']} stages, {t['modelled_ms']:.2f} ms modelled on {self.device.name}"
        return (f'<svg xmlns="http://www.w3.org/2000/svg" width="980" height="{len(rows) * 18 + 60}" font-family="sans-serif">'
                f'<rect width="100%" height="100%" fill="white"/><text x="4" y="18" font-size="13">{head} (dark: bandwidth, light: latency)</text>{"".join(out)}</svg>\n')


def _regions(d: Dispatch, mode: str) -> list[list[Any]]:
    return [[b.region.buffer, b.region.offset, b.region.nbytes] for b in d.bindings if mode in b.mode]


def dram_bytes(d: Dispatch) -> int:
    """Bytes of weights and state that a dispatch moves, reads and writes; activations stay in the caches."""
    total = 0
    for b in d.bindings:
        kind = b.region.buffer.replace(":", ".").split(".")[0]
        if kind in WEIGHT_PARTS or kind in STATE_PARTS:
            total += b.moved * (("r" in b.mode) + ("w" in b.mode))
    return total


def floor_bytes(config: ModelConfig, groups: dict[str, Group] | Any, rows: int, context: int, head_rows: int) -> int:
    """The least bytes of a pass (MODEL.md): every weight it needs once, the GDN state read and written, the KV rows read."""
    total = 0
    for g in groups.values():
        nbytes = g.weight_bytes + 2 * g.scale_bytes
        if g.name == "embed":
            nbytes = nbytes * rows // g.n
        elif g.name == "lm_head":
            nbytes = nbytes if head_rows else 0
        elif g.experts:
            slots = config.top_k + g.experts - config.num_experts
            nbytes = nbytes * min(g.experts, rows * slots) // g.experts
        total += nbytes
    return total + 2 * config.gdn_state_bytes + context * config.kv_bytes_per_token


def make_report(config: ModelConfig, groups: dict[str, Group], phase: str, context: int, chunk: int | None, options: ExecutionOptions) -> PlanReport:
    """A plan of a phase: "decode" (one token after `context - 1`) or "prefill" (the last chunk of a prompt of `context`)."""
    if phase not in ("prefill", "decode"):
        raise RequestError(f"phase is prefill or decode, got {phase!r}")
    if not 1 <= context <= config.max_position:
        raise RequestError(f"context must be between 1 and {config.max_position}, got {context}")
    layout = structs()
    fixed = {"step": Region("step", 0, layout["StepState"].size), "sample_params": Region("sample_params", 0, layout["SampleParams"].size),
             "stop_ids": Region("stop_ids", 0, 256)}
    half = config.rotary_dim // 2
    plain = {**plain_bytes(config), "rope_lo": 8 * ROPE_LO_ROWS * half, "rope_hi": 8 * -(-config.max_position // ROPE_LO_ROWS) * half}
    rows = 1 if phase == "decode" else policy.chunk_size(context, chunk if chunk is not None else options.chunk_size)
    ctx = PlanContext(config, groups, plain, phase, rows, context, context + 2, 1, options, M5_MAX_CAPABILITIES)
    if phase == "decode":
        ops = decode_plan(ctx, fixed, sampled=False, stop_count=len(config.eos_ids))
    else:
        ops = prefill_plan(ctx, fixed, choose=True, stop_count=len(config.eos_ids))
    return PlanReport(phase, ctx, ops)


def load_dims(dims: str) -> tuple[ModelConfig, dict[str, Group]]:
    """A preset's name, a config.json, or a model folder. Formats are those `mlx_lm.convert -q` writes."""
    if dims in PRESETS:
        config = PRESETS[dims]
    else:
        path = Path(dims)
        if not path.exists():
            raise RequestError(f"no preset, file or folder {dims!r}", fix=f"presets: {', '.join(PRESETS)}")
        config = ModelConfig.from_folder(path.parent if path.is_file() else path)
    return config, default_groups(config)
