"""Rate of the decode kernels on one core of the CPU device, in weights a second, at the shapes of the 35B and of lily-tiny.

    python docs/results/cpu_gemv_rate.py --rounds 15 --json docs/results/cpu_gemv_rate.json

Each kernel is launched as the CPU's plan does (policy.py, Tuning), several launches in one command buffer, with random weights
that change from launch to launch and together exceed the caches a core has for itself. One worker. Time is the CPU time of the
process, so that what other programs take of the core does not count (what they take of caches and memory does).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any

os.environ["LILY_METAL_HOST"] = "workers=1"

import numpy as np

from lily import _native
from lily.gpu import Gpu
from lily.kernel_args import structs
from lily.plans import geometry as geo

BYTES = 8 << 20  # of weights in a command buffer, at least

# name: outputs, inputs
SHAPES = {"35B, GDN projections": (12352, 2048), "35B, output projection": (2048, 4096), "lily-tiny, GDN projections": (1544, 256), "lily-tiny, head": (6144, 256)}


def launches(gpu: Gpu, rng: np.random.Generator, n: int, k: int, fused: bool) -> tuple[Any, int]:
    """A program of launches over different weights, and the weights it reads."""
    tuning, count = gpu.capabilities.tuning, -(-BYTES // (n * k // 2))

    def buffer(a: np.ndarray) -> Any:
        made = gpu.buffer(a.nbytes, "operand")
        gpu.write(made, a)
        return made

    def bf16(x: np.ndarray) -> np.ndarray:
        return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)

    words = buffer(rng.integers(0, 1 << 32, (count, n, k // 8), dtype=np.uint32))
    scales, biases = (buffer(bf16(rng.normal(0, 0.02, (count, n, k // 64)))) for _ in range(2))
    x, y, norm = buffer(bf16(rng.normal(size=k))), buffer(np.zeros(n, np.uint16)), buffer(rng.normal(1, 0.1, k).astype(np.float32))
    if fused:
        threads = geo.team_threads(k, geo.NORM_GEMV_THREADS, tuning)
        groups, constants = geo.row_job(n, 1, k, geo.shared_out(-(-n // geo.TEAM_ROWS), tuning), tuning)
        pipeline, args = gpu.pipeline("fused_projection", "gemv_norm_bf16_b4_g64", constants, threads), structs()["GemvNormArgs"].pack({"n": n, "k": k, "eps": 1e-6})
    else:
        threads, groups = geo.gemv(n, k, tuning)
        pipeline, args = gpu.pipeline("gemv", "gemv_bf16_b4_g64", (), threads), structs()["GemvArgs"].pack({"rows": 1, "n": n, "k": k, "ldx": k, "ldy": n})
    dispatches = []
    for i in range(count):
        bound = [(0, words, i * n * k // 2), (1, scales, i * n * k // 32), (2, biases, i * n * k // 32), (3, x, 0), (4, y, 0)]
        dispatches.append((pipeline, [*bound, (6, norm, 0)] if fused else bound, args, 5, (groups, 1, 1), (threads, 1, 1), True, 0.0, "gemv", []))
    return _native.Program(gpu.native, dispatches, True), count * n * k


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json")
    options = parser.parse_args()
    gpu, rng = Gpu("cpu"), np.random.default_rng(0)
    cases = {(name, kernel): launches(gpu, rng, n, k, kernel == "gemv_norm") for name, (n, k) in SHAPES.items() for kernel in ("gemv", "gemv_norm")}
    rates: dict[tuple[str, str], list[float]] = {case: [] for case in cases}
    load = os.getloadavg()[0]
    for round_ in range(options.rounds + 1):
        for case, (program, weights) in cases.items():
            start = time.process_time()
            program.run()
            if round_:
                rates[case].append(weights / (time.process_time() - start) / 1e9)
    rows = [{"shape": name, "outputs": SHAPES[name][0], "inputs": SHAPES[name][1], "kernel": f"{kernel}_bf16_b4_g64", "median": statistics.median(r),
             "min": min(r), "max": max(r), "all": r} for (name, kernel), r in rates.items()]
    for row in rows:
        print(f"{row['shape']:28} {row['kernel']:24} {row['median']:.2f} G weights/s ({row['min']:.2f}–{row['max']:.2f})")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"command": "cpu_gemv_rate.py", "unit": "G weights a second on one core", "device": gpu.name, "load_average": [load, os.getloadavg()[0]], "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
