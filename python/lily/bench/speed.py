"""Prefill and decode of a model over a range of lengths, variants of the options in turn within each round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..engine import Engine
from ..options import ExecutionOptions
from ..plan_report import dram_bytes
from ..plans.decode import decode_plan
from ..plans.prefill import prefill_plan
from ..policy import chunk_size, context_range
from ..sampling import SamplingParams
from ..schedule import Dispatch
from ..session import Session
from .limits import Limits

BASE = "default"


@dataclass(frozen=True)
class Row:
    """Tokens per second of a phase at a length: every round, their median. `share`: of the copy rate (decode) or of the matrix rate (prefill)."""

    phase: str
    length: int
    variant: str
    rates: tuple[float, ...]
    seconds_to_first_token: tuple[float, ...]
    ratios: tuple[float, ...]  # to the default of the same round
    share: float | None
    gpu_idle: float | None  # share of a decode step's time in which the GPU does nothing, measured from its own clock
    memory_bytes: int

    @property
    def median(self) -> float:
        return statistics.median(self.rates)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "median": self.median, "min": min(self.rates), "max": max(self.rates), "ratio": statistics.median(self.ratios)}


class Speed:
    """Measures an engine. Prompts are random ids, the same for every variant; nothing is cached between rounds."""

    def __init__(self, engine: Engine, limits: Limits | None, *, steps: int, seed: int = 0) -> None:
        self.engine, self.limits, self.steps = engine, limits, steps
        self._rng = np.random.default_rng(seed)
        self.session = Session(engine)

    def measure(self, phases: Sequence[str], lengths: Sequence[int], rounds: int, variants: Mapping[str, ExecutionOptions],
                report: Callable[[Row], None]) -> list[Row]:
        """Rows of every phase, length and variant, given to `report` as they come."""
        rows = []
        for length in lengths:
            self.session.ensure_capacity(length + 2 * self.steps + 4)
            for phase in phases:
                for row in self._length(phase, length, rounds, variants):
                    report(row)
                    rows.append(row)
        return rows

    def _length(self, phase: str, length: int, rounds: int, variants: Mapping[str, ExecutionOptions]) -> list[Row]:
        ids = self._rng.integers(0, self.engine.config.vocab_size, length).tolist()
        measure = self._prefill if phase == "prefill" else self._decode
        if phase == "decode":
            self._run(ids)
        samples: dict[str, list[tuple[float, float, float | None]]] = {name: [] for name in variants}
        names = list(variants)
        for number in range(-1, rounds):  # the first round warms up: programs are recorded, kernels compiled
            at = max(number, 0) % len(names)
            for name in names[at:] + names[:at]:
                sample = measure(ids, variants[name])
                if number >= 0:
                    samples[name].append(sample)
        out = []
        for name, got in samples.items():
            rates = tuple(s[0] for s in got)
            ratios = tuple(a / b[0] for a, b in zip(rates, samples[names[0]], strict=True))
            idle = statistics.median(s[2] for s in got if s[2] is not None) if got[0][2] is not None else None
            out.append(Row(phase, length, name, rates, tuple(s[1] for s in got), ratios, self._share(phase, length, statistics.median(rates), variants[name]),
                           idle, self.memory_bytes()))
        return out

    def memory_bytes(self) -> int:
        """Resident bytes: weights, scratch, the session's state."""
        return sum(self.engine.memory_bytes().values()) + self.session.memory_bytes()

    # -- one sample: tokens per second, seconds to the first token, idle share ---------------------------------------------
    def _prefill(self, ids: Sequence[int], options: ExecutionOptions) -> tuple[float, float, float | None]:
        self.session.reset()
        start = time.perf_counter()
        for _ in self.session.generate(ids, SamplingParams(), 1, (), options):
            seconds = time.perf_counter() - start
        return len(ids) / seconds, seconds, None

    def fill(self, length: int) -> None:
        """Brings the session to `length` random tokens, with room for a chunk and a few steps more."""
        self.session.ensure_capacity(length + chunk_size(length, None) + 2 * self.steps)
        self._run(self._rng.integers(0, self.engine.config.vocab_size, length).tolist())

    def _run(self, ids: Sequence[int]) -> None:
        self.session.reset()
        for _ in self.session.generate(ids, SamplingParams(), 1, (), ExecutionOptions()):
            pass

    def _decode(self, ids: Sequence[int], options: ExecutionOptions) -> tuple[float, float, float | None]:
        """Steps from the length on. The state may be that of other tokens: it is set back by length alone, which keeps every
        variant at the same number of keys."""
        self.session.adopt(ids[:-1])
        stamps = [time.perf_counter()]
        gpu_before = self.session.gpu_seconds
        for _ in self.session.generate(ids, SamplingParams(), self.steps + 1, (), options):
            stamps.append(time.perf_counter())
        seconds = stamps[-1] - stamps[1]
        busy = self.session.gpu_seconds - gpu_before
        return self.steps / seconds, stamps[1] - stamps[0], max(0.0, 1 - busy / seconds)

    # -- shares ------------------------------------------------------------------------------------------------------------
    def plan(self, phase: str, length: int, options: ExecutionOptions = ExecutionOptions()) -> list[Dispatch]:
        """The decode step at `length` keys, or the last chunk of a prompt of `length`."""
        session, engine = self.session, self.engine
        fixed = dict(session.fixed_regions)
        if phase == "decode":
            keys = min(context_range(length), session.capacity)
            return decode_plan(engine.context("decode", 1, keys, session.capacity, 1, options), fixed, sampled=False, stop_count=0)
        rows = chunk_size(length, options.chunk_size)
        ctx = engine.context("prefill", rows, session.capacity, session.capacity, 1, options)
        return prefill_plan(ctx, fixed, choose=True, stop_count=0)

    def _share(self, phase: str, length: int, rate: float, options: ExecutionOptions) -> float | None:
        if self.limits is None:
            return None
        if phase == "decode":
            return rate * sum(map(dram_bytes, self.plan(phase, length, options))) / self.limits.copy
        return rate * 2 * macs_per_token(self.engine) / self.limits.matrix


def macs_per_token(engine: Engine) -> int:
    """Multiply-accumulates of a prompt token in projections, router and chosen experts; attention and the head are left out."""
    total = 0
    for g in engine.groups.values():
        if g.name not in ("embed", "lm_head"):
            matrices = engine.config.top_k + g.experts - engine.config.num_experts if g.experts else 1
            total += matrices * g.n * g.k
    return total
