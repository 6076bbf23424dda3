"""Runs plans under the hazard recorder and prints what it saw as JSON; a child of test_hazard_proof.py, since
LILY_METAL_HOST is read once per process.

    hazard_child.py MODEL SCENARIO…      MODEL: lily-tiny or a folder; SCENARIO: JSON with the arguments of Bench.scenario
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import lily
from lily import _native
from lily.engine import buffer_map
from lily.errors import DeviceError
from lily.options import ExecutionOptions
from lily.plans.decode import decode_plan
from lily.plans.prefill import prefill_plan
from lily.sampling import SamplingParams
from lily.schedule import Dispatch
from lily.session import Session

Access = tuple[int, str, str, str, int, int]  # dispatch, kernel, buffer, mode, start, end
WHOLE = 1e12  # milliseconds: the program is one pass
STOP_IDS = (1, 2)


def recorded() -> list[Access]:
    accesses = _native.recorded_accesses()
    assert accesses is not None, "LILY_METAL_HOST lacks strict=2,hazards=on"
    return accesses


def declared(d: Dispatch, buffer: str, mode: str) -> list[tuple[int, int]]:
    """Byte ranges of `buffer` that the dispatch may access so, joined where they meet."""
    ranges = sorted((b.region.offset, b.region.offset + b.region.nbytes) for b in d.bindings if b.region.buffer == buffer and mode in b.mode)
    joined: list[tuple[int, int]] = []
    for start, end in ranges:
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def undeclared(plan: Sequence[Dispatch], accesses: Sequence[Access]) -> list[str]:
    wrong = []
    for number, kernel, buffer, mode, start, end in accesses:
        d = plan[number]
        assert kernel == d.function, (kernel, d.id)
        if not any(s <= start and end <= e for s, e in declared(d, buffer, mode)):
            wrong.append(f"{d.id} ({kernel}): {'writes' if mode == 'w' else 'reads'} {buffer}[{start}:{end}], declared {declared(d, buffer, mode)}")
    return wrong


def unused(plan: Sequence[Dispatch], accesses: Sequence[Access]) -> list[str]:
    """Declared bindings of which not a byte was touched."""
    touched = defaultdict(list)
    for number, _, buffer, mode, start, end in accesses:
        touched[number, buffer, mode].append((start, end))
    out = []
    for number, d in enumerate(plan):
        for b in d.bindings:
            for mode in b.mode:
                first, last = b.region.offset, b.region.offset + b.region.nbytes
                if first < last and not any(s < last and first < e for s, e in touched[number, b.region.buffer, mode]):
                    out.append(f"{d.id}[{b.index}] {mode} {b.region.buffer}")
    return out


def meet(a: Sequence[tuple[int, int]], b: Sequence[tuple[int, int]]) -> bool:
    """Whether two sorted lists of ranges overlap; ranges of one list may overlap each other."""
    ends = sorted([(s, e, 0) for s, e in a] + [(s, e, 1) for s, e in b])
    reach = [-1, -1]
    for start, end, side in ends:
        if start < reach[1 - side]:
            return True
        reach[side] = max(reach[side], end)
    return False


def needless(plan: Sequence[Dispatch], accesses: Sequence[Access]) -> list[int]:
    """Barriers between levels whose really touched bytes do not conflict."""
    touched: dict[tuple[int, str, str], list[tuple[int, int]]] = defaultdict(list)
    for number, _, buffer, mode, start, end in accesses:
        touched[plan[number].level, buffer, mode].append((start, end))
    buffers = {buffer for _, buffer, _ in touched}

    def conflict(level: int) -> bool:
        return any(meet(touched[level, b, x], touched[level + 1, b, y]) for b in buffers for x, y in ("rw", "wr", "ww"))

    return [level for level in range(plan[-1].level) if not conflict(level)]


def without_barrier(plan: Sequence[Dispatch], level: int) -> list[Dispatch]:
    """The plan with `level` and the one after it made one."""
    return [replace(d, level=d.level - 1) if d.level > level else d for d in plan]


class EveryToken:
    """A steering that masks nothing away."""

    masks = True

    def fill(self, mask: np.ndarray) -> bool:
        mask[:] = 0xFFFFFFFF
        return True


class Bench:
    """A session on a model, and the plans to run on it."""

    def __init__(self, name: str) -> None:
        self.engine = lily.Model.load(name).engine
        self.session = Session(self.engine)
        self.ids = np.random.default_rng(3).integers(5, self.engine.config.vocab_size - 5, 1024).tolist()

    def generate(self, rows: int, options: ExecutionOptions) -> list[int]:
        """A prompt of `rows` tokens and four decode steps, as a caller has them run."""
        session = Session(self.engine)
        return [s.token for s in session.generate(self.ids[:rows], SamplingParams(), 5, STOP_IDS, options)]

    def plan(self, phase: str, rows: int, context: int, head_rows: int, sampled: bool, options: ExecutionOptions, extended: bool = False) -> list[Dispatch]:
        """A plan for a state of `context` tokens, which is all zeros: what it holds does not matter here."""
        s = self.session
        s.ensure_capacity(context + rows)
        s.reset()
        for name, buffer in s._state.items():
            if name.startswith("kv_"):
                buffer.fill(0)
        sampling = SamplingParams(temperature=0.8)
        if extended:
            sampling = SamplingParams(temperature=0.8, repetition_penalty=1.1, logit_bias=((5, 2.0),), logprobs=True, top_logprobs=5)
        s._write_sampling(sampling, extended)
        if extended:
            s._write_mask(EveryToken())  # type: ignore[arg-type]
        s._state["stop_ids"].view()[: 4 * len(STOP_IDS)] = np.asarray(STOP_IDS, np.uint32).view(np.uint8)
        s.tokens = [1] * context
        ctx = self.engine.context(phase, rows, s.capacity, s.capacity, head_rows, options)
        self.engine.arena(ctx.arena_bytes())
        if phase == "decode":
            return decode_plan(ctx, s._fixed, sampled=sampled, stop_count=len(STOP_IDS), adjusted=extended, logprobs=extended)
        region = ctx.arena()["ids"]
        self.engine.buffers["arena"].view()[region.offset : region.offset + 4 * rows] = np.asarray(self.ids[:rows], np.uint32).view(np.uint8)
        return prefill_plan(ctx, s._fixed, choose=head_rows == 1, sampled=sampled, stop_count=len(STOP_IDS), adjusted=extended, logprobs=extended)

    def run(self, plan: Sequence[Dispatch]) -> list[Access]:
        self.session.place_step(token=7)
        recorded()
        self.engine.gpu.record(plan, buffer_map(self.engine, self.session._state)).run(WHOLE)
        return recorded()

    def mutations(self, plan: Sequence[Dispatch], which: Sequence[int] | None) -> list[dict[str, Any]]:
        """Runs the plan without one barrier at a time; what the recorder said about each."""
        out = []
        for level in range(plan[-1].level) if which is None else which:
            before = [d.id for d in plan if d.level == level]
            after = [d.id for d in plan if d.level == level + 1]
            try:
                self.run(without_barrier(plan, level))
                message = ""
            except DeviceError as error:
                message = str(error)
            out.append({"barrier": level, "before": before, "after": after, "message": message})
        return out

    def scenario(
        self, phase: str, rows: int = 1, options: dict[str, bool] | None = None, context: int = 9, head_rows: int = 1, sampled: bool = False,
        mutate: Any = None, generate: bool = False, extended: bool = False,
    ) -> dict[str, Any]:
        """`extended`: with penalties, bias, mask and logprobs. `mutate`: "all", or the barriers to remove, by number. `generate`: a whole generation instead of one plan."""
        chosen = ExecutionOptions(**(options or {}))
        if generate:
            return {"tokens": self.generate(rows, chosen), "accesses": len(recorded())}
        plan = self.plan(phase, rows, context, head_rows, sampled, chosen, extended)
        accesses = self.run(plan)
        result: dict[str, Any] = {"dispatches": len(plan), "barriers": plan[-1].level, "accesses": len(accesses),
                                  "undeclared": undeclared(plan, accesses), "needless": needless(plan, accesses), "unused": unused(plan, accesses)}
        if mutate is not None:
            result["mutations"] = self.mutations(plan, None if mutate == "all" else [m % plan[-1].level for m in mutate])
        return result


def main() -> None:
    bench = Bench(sys.argv[1])
    for text in sys.argv[2:]:
        print(json.dumps(bench.scenario(**json.loads(text))), flush=True)


if __name__ == "__main__":
    main()
