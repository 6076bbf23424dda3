"""Every switch of ExecutionOptions, alone and all off, leaves the answer alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from lily.errors import RequestError
from lily.options import ExecutionOptions
from lily.sampling import SamplingParams
from lily.session import Session
from tests.test_goldens import teacher_figures

SWITCHES = [f.name for f in dataclasses.fields(ExecutionOptions) if f.name != "chunk_size"]
CASES = {**{name: {name: False} for name in SWITCHES}, "all": dict.fromkeys(SWITCHES, False)}
LONG = 9  # the golden of several chunks' length: it has prompt, thought and answer


@pytest.mark.parametrize("off", CASES)
def test_a_long_golden_keeps_its_greedy_tokens_with_a_switch_off(model: Any, goldens: list[dict[str, Any]], off: str) -> None:
    assert_greedy(model, goldens[LONG], ExecutionOptions(**CASES[off]))


@pytest.mark.slow
@pytest.mark.parametrize("off", CASES)
def test_every_golden_keeps_its_greedy_tokens_with_a_switch_off(model: Any, goldens: list[dict[str, Any]], off: str) -> None:
    for golden in goldens:
        assert_greedy(model, golden, ExecutionOptions(**CASES[off]))


@pytest.mark.parametrize("off", CASES)
def test_teacher_forced_logits_stay_within_the_bounds_with_a_switch_off(model: Any, golden_arrays: dict[str, np.ndarray], off: str) -> None:
    ids = golden_arrays["teacher_ids"].astype(int)
    figures = teacher_figures(model.logits(ids[:-1].tolist(), options=ExecutionOptions(**CASES[off])), golden_arrays["teacher_logits"], ids)
    print(off, figures)
    assert figures["kl"] <= 1e-4 and abs(figures["perplexity"]) <= 0.002 and figures["top"] >= 0.98


def assert_greedy(model: Any, golden: dict[str, Any], options: ExecutionOptions) -> None:
    reply = model.generate(prompt_ids=golden["prompt_ids"], max_tokens=golden["max_tokens"], temperature=0, options=options)
    assert list(reply.token_ids) == golden["greedy_ids"]


@pytest.mark.parametrize("extended_fusion", [True, False])
def test_d6_packing_changes_no_byte(model: Any, goldens: list[dict[str, Any]], extended_fusion: bool) -> None:
    """Tokens, KV, convolution and recurrent state after a prompt and 40 steps, across the edge of 256 keys where attention is split."""
    ids = (goldens[LONG]["prompt_ids"] * 2)[:236]
    packed, plain = Session(model.engine), Session(model.engine)
    runs = [[s.token for s in session.generate(ids, SamplingParams(), 40, (), ExecutionOptions(gqa_packing=on, extended_fusion=extended_fusion))]
            for session, on in ((packed, True), (plain, False))]
    assert runs[0] == runs[1] and len(packed.tokens) == 236 + 39
    expected = plain.state_arrays()
    for name, value in packed.state_arrays().items():
        assert np.array_equal(value.view(np.uint32), expected[name].view(np.uint32)), name


@pytest.mark.parametrize("value", [1, "off", None])
def test_a_switch_is_a_bool(value: object) -> None:
    with pytest.raises(RequestError, match="gqa_packing must be True or False"):
        ExecutionOptions(gqa_packing=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [0, -1, True, 2.5])
def test_a_chunk_size_is_a_positive_integer(size: Any) -> None:
    with pytest.raises(RequestError, match="chunk_size must be a positive integer"):
        ExecutionOptions(chunk_size=size)
