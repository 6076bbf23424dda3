"""What `lily bench` prints: one line as a figure comes, and tables."""

from __future__ import annotations

from collections.abc import Sequence

from .kernels import KernelRow
from .limits import Limits
from .speed import Row


def limits_line(limits: Limits) -> str:
    return f"copy {limits.copy / 1e9:,.1f} GB/s (read + write), read {limits.read / 1e9:,.1f} GB/s, bf16 matrix products {limits.matrix / 1e12:,.2f} TFLOP/s"


def speed_line(row: Row) -> str:
    """Phase, length, variant, median and spread in tok/s, time to the first token or idle share, share of the limit, memory."""
    of = "copy rate" if row.phase == "decode" else "matrix rate"
    parts = [f"{row.phase:<8}{row.length:>7}  {row.variant:<28}{row.median:>11,.1f} tok/s ({min(row.rates):,.1f} to {max(row.rates):,.1f})"]
    if row.phase == "prefill":
        parts.append(f"first token {sorted(row.seconds_to_first_token)[len(row.rates) // 2] * 1e3:,.1f} ms")
    if row.gpu_idle is not None:
        parts.append(f"GPU idle {row.gpu_idle:.0%}")
    if row.share is not None:
        parts.append(f"{row.share:.0%} of the {of}")
    if row.ratios != (1.0,) * len(row.ratios):
        parts.append(f"{sorted(row.ratios)[len(row.ratios) // 2]:.3f} of the default")
    return "  ".join([*parts, f"{row.memory_bytes / 1e9:.2f} GB"])


def kernel_table(phase: str, length: int, rows: Sequence[KernelRow], seconds: float) -> str:
    """Time, bytes and shares by kernel; the last line compares their sum with the pass."""
    lines = [f"{phase} at {length}: {seconds * 1e3:.3f} ms by the GPU's clock",
             f"{'kernel':<44}{'launches':>9}{'ms':>10}{'µs each':>10}{'GB/s':>9}{'of copy':>9}{'of reads':>9}{'of matrix':>10}"]
    for r in rows:
        lines.append(f"{r.kernel:<44}{r.launches:>9}{r.seconds * 1e3:>10.3f}{r.seconds / r.launches * 1e6:>10.1f}{r.bytes / r.seconds / 1e9:>9.1f}"
                     f"{r.copy_share:>9.0%}{'' if r.share is None else format(r.share, '.0%'):>9}{r.matrix_share:>10.0%}")
    total = sum(r.seconds for r in rows)
    lines.append(f"sum of the kernels alone {total * 1e3:.3f} ms, {total / seconds:.2f} of the pass")
    return "\n".join(lines)
