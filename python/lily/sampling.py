"""Sampling parameters of a request: validation and the form the GPU reads."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from .config import GenerationDefaults
from .errors import RequestError
from .kernel_args import structs


@dataclass(frozen=True)
class SamplingParams:
    """temperature >= 0 (0 = greedy), 0 < top_p <= 1, top_k >= 0 (0 = off), 0 <= min_p <= 1, seed (None = fresh).

    The filters apply in this order: temperature, top_k, top_p, min_p.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, 1e6)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise RequestError("top_p must be above 0 and at most 1, got 0")
        _number("min_p", self.min_p, 0.0, 1.0)
        if not isinstance(self.top_k, int) or isinstance(self.top_k, bool) or not 0 <= self.top_k < 1 << 31:
            raise RequestError(f"top_k must be an integer >= 0 (0 = off), got {self.top_k!r}")
        if self.seed is not None and (not isinstance(self.seed, int) or isinstance(self.seed, bool)):
            raise RequestError(f"seed must be an integer or None, got {self.seed!r}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def pack(self) -> bytes:
        """Bytes of the kernels' `SampleParams`; a missing seed is drawn from the system."""
        seed = (secrets.randbits(64) if self.seed is None else self.seed) & (1 << 64) - 1
        return structs()["SampleParams"].pack({
            "temperature": self.temperature, "top_p": self.top_p, "min_p": self.min_p, "top_k": self.top_k,
            "seed_lo": seed & 0xFFFFFFFF, "seed_hi": seed >> 32,
        })


def _number(name: str, value: object, low: float, high: float) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
        raise RequestError(f"{name} must be a number between {low:g} and {high:g}, got {str(value)[:40]}")


def with_defaults(defaults: GenerationDefaults, temperature: float | None, top_p: float | None, top_k: int | None, min_p: float | None,
                  seed: int | None) -> SamplingParams:
    """Request values over the checkpoint's generation_config; an explicit 0 is honoured."""
    def pick(value: float | None, default: float) -> float:
        return default if value is None else value

    return SamplingParams(
        temperature=pick(temperature, defaults.temperature),
        top_p=pick(top_p, defaults.top_p),
        top_k=defaults.top_k if top_k is None else top_k,
        min_p=pick(min_p, defaults.min_p),
        seed=seed,
    )
