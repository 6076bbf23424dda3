"""Penalties, bias, mask and logprobs against numpy."""

import numpy as np
import pytest

from tests.kernels.compare import check
from tests.kernels.harness import poison, run
from tests.reference import logits as reference
from tests.reference.logits import BIAS, MASK, MASKED, PENALTIES, STEP_LOGPROBS, TOP
from tests.reference.numbers import STOPPED, TOKENS, step_state
from tests.reference.sampling import sample_params

TINY, REAL = 6144, 248_320
SETTINGS = [
    {"adjust": 0}, {"adjust": PENALTIES, "repetition": 1.3}, {"adjust": PENALTIES, "presence": 1.5}, {"adjust": PENALTIES, "frequency": 0.7},
    {"adjust": PENALTIES, "repetition": 0.5, "presence": -2.0, "frequency": 1.0}, {"adjust": BIAS}, {"adjust": MASK},
    {"adjust": PENALTIES | BIAS | MASK, "repetition": 1.1, "frequency": 0.5},
]


def inputs(vocab, seed=0):
    rng = np.random.default_rng(seed)
    counts = np.where(rng.random(vocab) < 0.2, rng.integers(1, 9, vocab), 0).astype(np.uint32)
    bias = np.where(rng.random(vocab) < 0.3, rng.normal(0, 20, vocab), 0).astype(np.float32)
    mask = rng.integers(0, 2**32, -(-vocab // 32), dtype=np.uint32)
    return rng.normal(0, 4, vocab).astype(np.float32), counts, bias, mask


def adjust(logits, counts, bias, mask, params, step, threads=64):
    groups = -(-len(logits) // (8 * threads))
    args = ("SampleArgs", {"vocab": len(logits)})
    return check("logits", "adjust_logits", reference.adjust_logits, [logits, counts, bias, mask, params, step], args, (groups,), threads, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("vocab,threads", [(TINY, 256), (1001, 32), (5, 32), (777, 64)])
def test_adjust(vocab, threads, settings):
    step = step_state(step=3)
    step[TOKENS + 1] = vocab // 2
    adjust(*inputs(vocab), sample_params(**settings), step, threads)


def test_adjust_real_vocabulary():
    adjust(*inputs(REAL), sample_params(adjust=7, repetition=1.2, presence=0.5), step_state(step=2), 256)


def test_case_48_a_step_counts_the_token_that_it_was_fed_and_the_first_one_none():
    logits, _, bias, mask = inputs(100)
    counts = np.zeros(100, np.uint32)
    params = sample_params(adjust=PENALTIES, presence=1.0)
    step = step_state(step=0)
    step[TOKENS] = 7
    first = adjust(logits, counts, bias, mask, params, step)
    np.testing.assert_array_equal(first[0], logits)
    assert not first[1].any()
    step = step_state(step=1)
    step[TOKENS], step[TOKENS + 1] = 9, 7
    second = adjust(logits, counts, bias, mask, params, step)
    assert second[1][7] == 1 == second[1].sum() and (second[0] != logits).nonzero()[0].tolist() == [7]


def test_after_the_end_nothing_changes():
    given = inputs(100)
    left = adjust(*given, sample_params(adjust=7, presence=1.0), step_state(step=4, done=STOPPED))
    for before, after in zip(given, left):
        np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_case_37_a_mask_does_not_hide_a_logit_that_is_not_finite(bad):
    logits, counts, bias, mask = inputs(64)
    logits[40], mask[:] = bad, 0
    left = adjust(logits, counts, bias, mask, sample_params(adjust=MASK), step_state())[0]
    np.testing.assert_array_equal(left[40], np.float32(bad))
    assert (np.delete(left, 40) == MASKED).all()


def logprobs(logits, params, step=None, sampled=(3, 0), threads=128):
    """The entry of the step; checks that every other word kept its poison."""
    step = step_state(step=5) if step is None else step
    out = poison(16 * STEP_LOGPROBS.itemsize // 4, np.uint32)
    expected = out.copy()
    buffers = {0: logits, 1: params, 2: step, 3: np.array(sampled, np.uint32), 4: out}
    run("logits", "token_logprobs", buffers, ("SampleArgs", {"vocab": len(logits)}), 5, (1, 1, 1), (threads, 1, 1))
    reference.token_logprobs(logits, params, step, np.array(sampled, np.uint32), expected, {"vocab": len(logits)})
    actual, wanted = out.view(STEP_LOGPROBS), expected.view(STEP_LOGPROBS)
    for name in ("token", "count", "ids"):
        np.testing.assert_array_equal(actual[name], wanted[name], err_msg=name)
    for name in ("value", "values"):
        np.testing.assert_allclose(actual[name], wanted[name], rtol=1e-5, atol=2e-5, err_msg=name)
    return actual


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.0}, {"temperature": 0.4, "top_logprobs": TOP}, {"temperature": 3.0, "top_logprobs": 5}], ids=str)
@pytest.mark.parametrize("vocab,threads", [(TINY, 128), (TINY, 512), (1001, 32), (7, 64)])
def test_logprobs(vocab, threads, settings):
    logits = np.random.default_rng(1).normal(0, 4, vocab).astype(np.float32)
    entry = logprobs(logits, sample_params(**settings), threads=threads)[5]
    assert entry["count"] == min(settings.get("top_logprobs", 0), vocab)


def test_logprobs_of_the_real_vocabulary():
    logits = np.random.default_rng(2).normal(0, 3, REAL).astype(np.float32)
    logprobs(logits, sample_params(top_logprobs=TOP), sampled=(248_319, 0), threads=512)


def test_logprobs_of_equals_come_by_id_and_masked_tokens_never():
    logits = np.full(600, MASKED, np.float32)
    logits[[500, 20, 300]] = 2.5
    entry = logprobs(logits, sample_params(top_logprobs=10), sampled=(300, 0))[5]
    assert entry["count"] == 3 and entry["ids"][:3].tolist() == [20, 300, 500]
    np.testing.assert_allclose(entry["value"], -np.log(3), rtol=1e-5)


@pytest.mark.parametrize("step,sampled", [(step_state(step=5, done=STOPPED), (3, 0)), (step_state(step=5), (0, 1))])
def test_logprobs_after_the_end_write_nothing(step, sampled):
    logits = np.random.default_rng(3).normal(0, 1, 100).astype(np.float32)
    assert (logprobs(logits, sample_params(top_logprobs=4), step, sampled).view(np.uint32) == 0xFFFFFFFF).all()
