"""What docs/performance.md says of an H200, in one process: both phases at ten lengths, ablations, time by kernel.

    python docs/results/h200.py OUT.json [--device cuda] [--dims qwen3.6-35b-a3b] [--longest 131072]

Random 4-bit weights in memory. Prefill of 16K tokens and more is timed in one pass over the longest prompt: what its first n tokens take is
what a prompt of n tokens takes. Decode at those lengths continues from the same pass.
"""

import argparse
import json
import time
from dataclasses import asdict

import numpy as np

from lily.bench.kernels import measure_kernels
from lily.bench.limits import Probe
from lily.bench.random_weights import RandomWeights
from lily.bench.report import kernel_table, limits_line, speed_line
from lily.bench.speed import Speed
from lily.engine import Engine
from lily.gpu import Gpu
from lily.options import ExecutionOptions
from lily.plan_report import load_dims
from lily.sampling import SamplingParams

DECODE = ["gpu_token_handoff", "concurrent_pass", "fused_chains", "extended_fusion", "coalesced_kv", "gqa_packing", "fixed_block_attention"]
PREFILL = ["fused_dequant", "gpu_routing", "tile_by_load", "register_scan", "chunked_gdn", "tensor_ops"]
SHORT, LONG = [256, 512, 1024, 2048, 4096, 8192], [16384, 32768, 65536, 131072]


def variants(names, **more):
    return {"default": ExecutionOptions()} | {f"{n}=off": ExecutionOptions(**{n: False}) for n in names} | more


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dims", default="qwen3.6-35b-a3b")
    parser.add_argument("--longest", type=int, default=131072)
    args = parser.parse_args()
    config, longest = load_dims(args.dims)[0], args.longest
    engine = Engine(RandomWeights(config, 0), Gpu(args.device), context=min(longest + 400, config.max_position), cache_bytes=0)
    limits = Probe(engine.gpu).limits()
    print(limits_line(limits))
    found = {"device": engine.gpu.name, "limits": asdict(limits), "memory_bytes": engine.memory_bytes(), "rows": [], "ablations": [], "kernels": []}
    speed = Speed(engine, limits, steps=64)

    def measure(key, phases, lengths, rounds, options):
        for row in speed.measure(phases, [n for n in lengths if n <= longest], rounds, options, lambda r: print(speed_line(r), flush=True)):
            found[key].append(row.to_json())

    measure("rows", ["prefill", "decode"], SHORT, 2, variants([]))
    measure("ablations", ["decode"], [512, 4096], 2, variants(DECODE))
    for phase in ("decode", "prefill"):
        rows, seconds = measure_kernels(speed, phase, min(4096, longest), limits)
        print(kernel_table(phase, min(4096, longest), rows, seconds), flush=True)
        found["kernels"].append({"phase": phase, "length": min(4096, longest), "seconds": seconds, "rows": [r.to_json() for r in rows]})
    chunks = {f"chunk_size={n}": ExecutionOptions(chunk_size=n) for n in (512, 4096)}
    measure("ablations", ["prefill"], [512, 4096], 1, variants(PREFILL, **chunks))

    ids = np.random.default_rng(5).integers(0, config.vocab_size, longest).tolist()
    speed.session.ensure_capacity(min(longest + 200, engine.context_length))
    speed.session.reset()
    stamps, start = [], time.perf_counter()
    for _ in speed.session.generate(ids, SamplingParams(), 1, (), ExecutionOptions(), lambda done, _: stamps.append((done, time.perf_counter() - start))):
        pass
    found["long_pass"] = {"tokens": [n for n, _ in stamps], "seconds": [s for _, s in stamps]}
    for done, seconds in stamps:
        if done in LONG:
            print(f"prefill {done}: {done / seconds:,.1f} tok/s", flush=True)
    speed._run = lambda ids: None   # the state is there
    measure("rows", ["decode"], LONG, 2, variants([]))
    measure("ablations", ["decode"], [32768], 1, variants(DECODE))
    with open(args.out, "w") as file:
        json.dump(found, file, indent=1)


main()
