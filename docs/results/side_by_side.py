"""Times Lily and MLX-LM on the same checkpoint in one run, the two alternating, medians and spread.

    python docs/results/side_by_side.py --mlx-python PATH --model FOLDER --prompt 128 --tokens 64 --rounds 7 --json OUT

Each engine runs in a process of its own interpreter (Lily in this one's) and is timed from inside: prefill = prompt to first
token, decode = the tokens after it. MLX-LM runs its fastest direct path on a CPU, float32 activations. Lily runs without its
prefix cache. Prompts are random token ids, new ones each round; both engines get the same ones. One process works at a time.
Where the system says so (/proc), each timing notes what share of the machine other programs took; --quiet waits for a quiet machine
before each round and repeats rounds that were disturbed by more than that share, up to --retries times in all.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from typing import Any

LILY = """
import json, sys, time
import lily
from lily.sampling import SamplingParams
model = lily.Model.load(sys.argv[1], cache_bytes=0)
print("ready", lily.__version__, flush=True)
for line in sys.stdin:
    ids, tokens = json.loads(line)
    stamps = [time.perf_counter()]
    for _ in model._session.generate(ids, SamplingParams(), tokens, (), lily.ExecutionOptions()):
        stamps.append(time.perf_counter())
    model._session.reset()
    print(json.dumps([len(ids) / (stamps[1] - stamps[0]), (len(stamps) - 2) / (stamps[-1] - stamps[1])]), flush=True)
"""

MLX = """
import json, sys, time
import mlx.core as mx, mlx_lm
from mlx_lm.generate import generate_step
mx.set_default_device(mx.cpu)
model, _ = mlx_lm.load(sys.argv[1])
model.set_dtype(mx.float32)
mx.eval(model.parameters())
print("ready", mlx_lm.__version__, flush=True)
for line in sys.stdin:
    ids, tokens = json.loads(line)
    stamps = [time.perf_counter()]
    for token, _ in generate_step(mx.array(ids), model, max_tokens=tokens):
        stamps.append(time.perf_counter())
    print(json.dumps([len(ids) / (stamps[1] - stamps[0]), (len(stamps) - 2) / (stamps[-1] - stamps[1])]), flush=True)
"""


class Worker:
    def __init__(self, python: str, code: str, model: str) -> None:
        # Settings that keep old OpenBLAS builds right slow a current one down.
        env = {k: v for k, v in os.environ.items() if not k.startswith("OPENBLAS_")}
        self.process = subprocess.Popen([python, "-c", code, model], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        assert self.process.stdout is not None
        self.version = self.process.stdout.readline().split()[1]

    def time(self, ids: list[int], tokens: int) -> tuple[float, float, float]:
        """Prefill and decode rates, and the share of the machine that other programs took meanwhile."""
        assert self.process.stdin is not None and self.process.stdout is not None
        before = busy_ticks() - process_ticks(self.process.pid), time.perf_counter()
        self.process.stdin.write(json.dumps([ids, tokens]) + "\n")
        self.process.stdin.flush()
        prefill, decode = json.loads(self.process.stdout.readline())
        others = busy_ticks() - process_ticks(self.process.pid) - before[0]
        return prefill, decode, max(0.0, others / os.sysconf("SC_CLK_TCK") / (time.perf_counter() - before[1]) / (os.cpu_count() or 1))


def busy_ticks() -> int:
    """Clock ticks that all programs have used since the start of the system; 0 where it does not say."""
    try:
        with open("/proc/stat", encoding="utf-8") as file:
            user, nice, system, _, _, irq, softirq, steal = map(int, file.readline().split()[1:9])
    except OSError:
        return 0
    return user + nice + system + irq + softirq + steal


def process_ticks(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return sum(map(int, file.read().rsplit(")", 1)[1].split()[11:13]))
    except OSError:
        return 0


def wait_for_quiet(share: float, seconds: float = 20) -> None:
    """Returns when other programs took less than `share` of the machine for a second, or after `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        before = busy_ticks()
        time.sleep(1)
        if (busy_ticks() - before) / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1) < share:
            return


def summary(values: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "all": values}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mlx-python", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--vocab", type=int, default=6000)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quiet", type=float, metavar="SHARE", help="for example 0.1")
    parser.add_argument("--retries", type=int, default=10)
    parser.add_argument("--json")
    args = parser.parse_args()

    import random

    rng = random.Random(0)
    workers = {"lily": Worker(sys.executable, LILY, args.model), "mlx_lm": Worker(args.mlx_python, MLX, args.model)}
    load = [os.getloadavg()[0]]
    rates: dict[str, dict[str, list[float]]] = {name: {"prefill": [], "decode": []} for name in workers}
    others: dict[str, list[float]] = {name: [] for name in workers}
    done, repeated = -1, 0  # the first round warms up
    while done < args.rounds:
        ids = [rng.randrange(args.vocab) for _ in range(args.prompt)]
        if args.quiet is not None:
            wait_for_quiet(args.quiet)
        timings = {name: worker.time(ids, args.tokens) for name, worker in workers.items()}
        if done >= 0 and args.quiet is not None and repeated < args.retries and max(t[2] for t in timings.values()) > args.quiet:
            repeated += 1
            continue
        done += 1
        if done:
            for name, (prefill, decode, share) in timings.items():
                rates[name]["prefill"].append(prefill)
                rates[name]["decode"].append(decode)
                others[name].append(round(share, 3))
    result: dict[str, Any] = {
        "command": " ".join(["side_by_side.py", f"--prompt {args.prompt} --tokens {args.tokens} --rounds {args.rounds}"]),
        "model": os.path.basename(args.model.rstrip("/")), "cpu": cpu_name(), "cores": os.cpu_count(), "python": platform.python_version(),
        "load_average": [*load, os.getloadavg()[0]], "share_of_other_programs": others, "rounds_repeated": repeated,
        "versions": {name: worker.version for name, worker in workers.items()},
        "tokens_per_second": {name: {phase: summary(v) for phase, v in phases.items()} for name, phases in rates.items()},
    }
    result["ratio_of_medians"] = {
        phase: result["tokens_per_second"]["lily"][phase]["median"] / result["tokens_per_second"]["mlx_lm"][phase]["median"] for phase in ("prefill", "decode")
    }
    print(json.dumps({"ratio": result["ratio_of_medians"], **{n: {p: round(s["median"], 1) for p, s in v.items()} for n, v in result["tokens_per_second"].items()}}))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


if __name__ == "__main__":
    main()
