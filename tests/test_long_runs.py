"""Long sequences: many steps on one state, and the switch of the attention path at 32K keys (D7)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lily
from lily.model_files import resolve
from lily.options import ExecutionOptions
from lily.policy import THRESHOLDS
from lily.sampling import SamplingParams
from lily.session import Session
from tests.reference.model import ReferenceModel
from tests.test_goldens import long_prompt


def decode_logits(session: Session) -> np.ndarray:
    """float32 [vocab] of the session's last decode step."""
    ctx, _ = [program for key, program in session._programs.items() if key[0] == "decode"][-1]
    return session.engine.read(ctx.arena()["logits"]).view(np.float32)[: session.config.vocab_size].copy()


def relative(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.sqrt(np.square(actual - expected).mean() / np.square(expected).mean()))


@pytest.mark.parametrize("steps", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_case_31_decode_steps_after_one_token_stay_on_the_reference(model: Any, steps: int) -> None:
    """The float32 state does not drift: the last steps' logits are as near to the float32 reference as the first ones'
    (measured: 0.8 % relative RMS on average from the first step to the 2,000th, single steps up to 7 %)."""
    session, tokens, logits = Session(model.engine), [], []
    first = model.tokenizer.encode("The")[0]
    for sampled in session.generate([first], SamplingParams(), steps + 1, (), ExecutionOptions(gpu_token_handoff=False)):
        if tokens:
            logits.append(decode_logits(session))
        tokens.append(sampled.token)
    reference = ReferenceModel(resolve("lily-tiny")).logits([first, *tokens[:-1]])
    errors = np.array([relative(ours, expected) for ours, expected in zip(logits, reference[1:], strict=True)])
    assert errors.max() < 0.1 and errors.mean() < 0.012
    # Medians: a single step with a near tie between experts moves a mean of fifty by a third.
    assert np.median(errors[-steps // 4 :]) < 1.5 * np.median(errors[: steps // 4])


@pytest.mark.slow
def test_d7_200_steps_across_32k_keys_equal_the_general_path(goldens: list[dict[str, Any]]) -> None:
    """A prompt of 32,700 tokens and 200 tokens more: the fixed blocks take over at 32,768 keys and change no token."""
    model: Any = lily.Model.load("lily-tiny", cache_bytes=0)
    ids, edge = long_prompt(goldens, 32_700), THRESHOLDS.fixed_block_min_keys
    assert len(ids) < edge < len(ids) + 200
    runs = []
    for options in (ExecutionOptions(), ExecutionOptions(fixed_block_attention=False)):
        session = Session(model.engine)
        tokens = [s.token for s in session.generate(ids, SamplingParams(), 200, (), options)]
        assert len(session.tokens) == len(ids) + 199
        runs.append((tokens, decode_logits(session)))
    (tokens, logits), (general, expected) = runs
    assert tokens == general
    print("relative RMS of the logits at", len(ids) + 199, "keys:", relative(logits, expected))
    assert relative(logits, expected) < 1e-2
