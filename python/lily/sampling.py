"""Sampling parameters of a request: validation and the form the GPU reads."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from .config import GenerationDefaults
from .errors import RequestError
from .kernel_args import constant, structs

MAX_BIAS = 100.0  # as OpenAI's; enough to force or forbid a token


@dataclass(frozen=True)
class SamplingParams:
    """temperature >= 0 (0 = greedy), 0 < top_p <= 1, top_k >= 0 (0 = off), 0 <= min_p <= 1, seed (None = fresh).

    repetition_penalty > 0 (1 = off) divides positive logits of generated tokens and multiplies negative ones;
    presence_penalty and frequency_penalty (0 = off) are subtracted once, and once per occurrence. All three count generated
    tokens only, never the prompt's. logit_bias: token id to a number of -100 to 100 that is added. They apply in this order:
    penalties, logit_bias, a grammar's mask, temperature, top_k, top_p, min_p.
    logprobs: whether to report log probabilities, with top_logprobs (0 to 20) of the likeliest tokens (`TokenLogprob`).
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, 1e6)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise RequestError("top_p must be above 0 and at most 1, got 0")
        _number("min_p", self.min_p, 0.0, 1.0)
        _integer("top_k", self.top_k, (1 << 31) - 1, " (0 = off)")
        if self.seed is not None and (not isinstance(self.seed, int) or isinstance(self.seed, bool)):
            raise RequestError(f"seed must be an integer or None, got {self.seed!r}")
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0)
        if self.repetition_penalty < 0.01:
            raise RequestError(f"repetition_penalty must be at least 0.01 (1 = off), got {self.repetition_penalty:g}")
        _number("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _number("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        if not isinstance(self.logprobs, bool):
            raise RequestError(f"logprobs must be True or False, got {self.logprobs!r}", fix="top_logprobs says how many")
        _integer("top_logprobs", self.top_logprobs, constant("LILY_TOP_LOGPROBS"))
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs=True")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def adjusts(self) -> bool:
        """Whether logits change before the choice."""
        return self.penalised or bool(self.logit_bias)

    def pack(self) -> bytes:
        """Bytes of the kernels' `SampleParams`; a missing seed is drawn from the system."""
        seed = (secrets.randbits(64) if self.seed is None else self.seed) & (1 << 64) - 1
        adjust = constant("LILY_ADJUST_PENALTIES") * self.penalised | constant("LILY_ADJUST_BIAS") * bool(self.logit_bias)
        return structs()["SampleParams"].pack({
            "temperature": self.temperature, "top_p": self.top_p, "min_p": self.min_p, "top_k": self.top_k,
            "seed_lo": seed & 0xFFFFFFFF, "seed_hi": seed >> 32, "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty, "frequency_penalty": self.frequency_penalty, "adjust": adjust,
            "top_logprobs": self.top_logprobs,
        })

    def bias_array(self, vocab_size: int) -> np.ndarray:
        """logit_bias as float32 [vocab_size]."""
        bias = np.zeros(vocab_size, np.float32)
        for token, value in self.logit_bias:
            bias[token] = value
        return bias


SAMPLING_KEYWORDS = frozenset(field.name for field in fields(SamplingParams))


def _number(name: str, value: object, low: float, high: float) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
        raise RequestError(f"{name} must be a number between {low:g} and {high:g}, got {str(value)[:40]}")


def _integer(name: str, value: object, high: int, hint: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= high:
        raise RequestError(f"{name} must be an integer between 0 and {high}{hint}, got {str(value)[:40]}")


def with_defaults(defaults: GenerationDefaults, vocab_size: int, asked: Mapping[str, Any]) -> SamplingParams:
    """Request values (names of SamplingParams; None = not given) over the checkpoint's generation_config; an explicit 0 is
    honoured (case 48)."""
    given = {name: value for name, value in asked.items() if value is not None}
    given["logit_bias"] = _bias(given.get("logit_bias"), vocab_size)
    base = {field.name: getattr(defaults, field.name) for field in fields(SamplingParams) if hasattr(defaults, field.name)}
    return SamplingParams(**{**base, **given})


def _bias(bias: object, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """A request's logit_bias: ids (or their decimal text, as in JSON) to numbers."""
    if bias is None:
        return ()
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias must be a mapping of token ids to numbers, got {type(bias).__name__}")
    found: dict[int, float] = {}
    for key, value in bias.items():
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10 else key
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise RequestError(f"logit_bias has the key {str(key)[:40]!r}, expected a token id below {vocab_size}")
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or abs(value) > MAX_BIAS:
            raise RequestError(f"logit_bias of token {token} must be a number between {-MAX_BIAS:g} and {MAX_BIAS:g}, got {str(value)[:40]}")
        found[token] = float(value)
    return tuple(sorted(found.items()))
