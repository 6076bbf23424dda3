"""Token selection against numpy: argmax, finish, the sampler's edges and its statistics."""

import numpy as np
import pytest

from tests.kernels.compare import check
from tests.kernels.harness import poison, run
from tests.reference import sampling
from tests.reference.numbers import DONE, FLAGS, HISTORY, NONFINITE, POSITION, STEP, STOPPED, TOKENS, step_state

TINY, REAL = 6144, 248_320


def argmax(logits, blocks, threads=64):
    partial, flags = poison((blocks, 2), np.uint32), poison(blocks, np.uint32)
    args = ("ArgmaxArgs", {"vocab": len(logits), "blocks": blocks})
    return check("sampling", "argmax_partial", sampling.argmax_partial, [logits, partial, flags], args, (blocks,), threads)[1:]


def finish(step, partial=None, flags=None, stops=(), sampled=(0, 0), sample=0, rows=1):
    partial = np.zeros((1, 2), np.uint32) if partial is None else partial
    flags = np.zeros(len(partial), np.uint32) if flags is None else flags
    stop_ids = np.array([*stops, 0xFFFFFFFF], np.uint32)
    args = ("FinishArgs", {"rows": rows, "blocks": len(partial), "stop_count": len(stops), "sample": sample})
    buffers = [partial, flags, step, stop_ids, np.array(sampled, np.uint32)]
    return check("sampling", "finish", sampling.finish, buffers, args, (1,), 32, args_index=4)[2]


@pytest.mark.parametrize("vocab,blocks,threads", [(TINY, 8, 64), (REAL, 64, 256), (1000, 7, 32), (5, 4, 32), (8, 1, 128)])
def test_argmax(vocab, blocks, threads):
    logits = np.random.default_rng(0).normal(0, 3, vocab).astype(np.float32)
    partial, flags = argmax(logits, blocks, threads)
    step = finish(step_state(position=7, step=3), partial, flags)
    assert step[HISTORY + 3] == step[TOKENS] == logits.argmax()
    assert step[POSITION] == 8 and step[STEP] == 4


@pytest.mark.parametrize("places", [(5, 900), (0, 1), (17, 16), (2047, 2048), (6143, 12), (100, 108, 164)])
def test_ties_go_to_the_lowest_id(places):
    logits = np.random.default_rng(1).normal(0, 1, TINY).astype(np.float32)
    logits[list(places)] = 50
    partial, flags = argmax(logits, 6)
    assert finish(step_state(), partial, flags)[HISTORY] == min(places)


def test_all_equal_and_negative_zero():
    for value in (0.0, -3.5):
        logits = np.full(1000, value, np.float32)
        logits[500] *= -1 if value == 0 else 1
        partial, flags = argmax(logits, 3)
        assert finish(step_state(), partial, flags)[HISTORY] == 0


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 3000, TINY - 1])
def test_non_finite_logits_end_the_generation(bad, place):
    """Case 37: flagged whatever its sign, done = 2 and nothing advances."""
    logits = np.random.default_rng(2).normal(0, 1, TINY).astype(np.float32)
    logits[place] = bad
    partial, flags = argmax(logits, 4)
    before = step_state(position=9, slot=1, step=20)
    after = finish(before, partial, flags)
    assert after[DONE] == NONFINITE == after[FLAGS + 20 % 16] and after[STEP] == 21
    assert after[POSITION] == 9 and (after[[1, 4, 5]] == before[[1, 4, 5]]).all()
    assert sample(logits, sampling.sample_params()) == (0, 1)


def test_all_nan():
    partial, flags = argmax(np.full(100, np.nan, np.float32), 2)
    assert finish(step_state(), partial, flags)[DONE] == NONFINITE


def test_stop_id_advances_once_and_then_nothing_moves():
    partial = np.array([[np.float32(1).view(np.uint32), 42]], np.uint32)
    step = finish(step_state(position=5, slot=2, step=1), partial, stops=(7, 42))
    assert step[DONE] == STOPPED == step[FLAGS + 1] and step[POSITION] == 6 and step[1] == 0 and step[TOKENS] == 42
    np.testing.assert_array_equal(finish(step, partial, stops=(7, 42)), step)


def test_finish_takes_the_sampled_token_and_prefill_rows():
    step = finish(step_state(position=100, step=15), sampled=(33, 0), sample=1, rows=17)
    assert step[POSITION] == 117 and step[TOKENS] == 33 == step[HISTORY + 15]
    assert finish(step_state(), sampled=(33, 1), sample=1)[DONE] == NONFINITE


@pytest.mark.parametrize("done", [0, STOPPED])
def test_advance(done):
    check("sampling", "advance", sampling.advance, [step_state(position=3, slot=2, done=done)], ("AdvanceArgs", {"rows": 512}), (1,), 32)


def sample(logits, params, step=0, threads=128):
    out = poison(2, np.uint32)
    run("sampling", "sample_token", {0: logits, 1: params, 2: step_state(step=step), 3: out}, ("SampleArgs", {"vocab": len(logits)}), 4, (1, 1, 1), (threads, 1, 1))
    return tuple(int(x) for x in out)


def expected(logits, params, step=0):
    out = np.zeros(2, np.uint32)
    sampling.sample_token(logits, params, step_state(step=step), out, {"vocab": len(logits)})
    return tuple(int(x) for x in out)


def test_philox_known_answer():
    """Random123's vector for counter 0, key 0."""
    assert sampling.philox((0, 0), 0) == (0x6627E8D5, 0xE169C58D)


SETTINGS = [
    {}, {"temperature": 0.3}, {"temperature": 5.0}, {"top_k": 1}, {"top_k": 20}, {"top_k": 300}, {"top_k": 10**6}, {"top_p": 0.95},
    {"top_p": 0.1}, {"top_p": 0.0}, {"min_p": 0.1}, {"min_p": 1.0}, {"temperature": 0.0}, {"temperature": 1e-30},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("vocab,threads", [(TINY, 128), (1001, 32), (3, 64), (777, 512)])
def test_sampler_draws_what_numpy_draws(vocab, threads, settings):
    logits = np.random.default_rng(3).normal(0, 4, vocab).astype(np.float32)
    for seed in (0, 1, 2**40 + 5):
        params = sampling.sample_params(**settings, seed=seed)
        for step in range(3):
            assert sample(logits, params, step, threads) == expected(logits, params, step)


def test_sampler_real_vocabulary():
    logits = np.random.default_rng(4).normal(0, 3, REAL).astype(np.float32)
    for settings in ({}, {"top_k": 20, "top_p": 0.95}, {"top_p": 0.5}):
        params = sampling.sample_params(**settings, seed=9)
        assert sample(logits, params, threads=512) == expected(logits, params)


@pytest.mark.parametrize("settings", [{"top_k": 3}, {"top_p": 0.5}, {"temperature": 0.0}], ids=str)
def test_ties_at_a_threshold_stay_together(settings):
    logits = np.zeros(16, np.float32)
    seen = {sample(logits, sampling.sample_params(**settings, seed=s), threads=32)[0] for s in range(300)}
    assert seen == ({0} if settings.get("temperature") == 0 else set(range(16)))


def test_top_k_1_and_small_top_p_are_greedy():
    logits = np.random.default_rng(5).normal(0, 1, TINY).astype(np.float32)
    for settings in ({"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-6}, {"min_p": 1.0}):
        for seed in range(5):
            assert sample(logits, sampling.sample_params(**settings, seed=seed)) == (logits.argmax(), 0)


def test_same_seed_same_tokens_other_seed_others():
    logits = np.random.default_rng(6).normal(0, 1, TINY).astype(np.float32)
    runs = [[sample(logits, sampling.sample_params(seed=seed), step, threads)[0] for step in range(20)] for seed, threads in ((1, 128), (1, 32), (2, 128))]
    assert runs[0] == runs[1] != runs[2]   # the threadgroup's size plays no role


@pytest.mark.parametrize("settings", [{}, {"top_k": 8}, {"top_p": 0.7}, {"min_p": 0.2, "temperature": 1.5}], ids=str)
def test_statistics(settings):
    """Chi-square of 2,000 draws against softmax after the filters (fixed seeds; limit far beyond p = 1e-6)."""
    logits = np.random.default_rng(7).normal(0, 1.5, 24).astype(np.float32)
    params = sampling.sample_params(**settings, seed=11)
    draws = 2000
    counts = np.bincount([sample(logits, params, step, 32)[0] for step in range(draws)], minlength=24)
    w = sampling.weights(logits, params)
    exact = np.exp(logits.astype(np.float64) / settings.get("temperature", 1.0)) * (w > 0)
    p = exact / exact.sum()
    assert (counts[p == 0] == 0).all()
    live = p > 0
    chi2 = ((counts[live] - draws * p[live]) ** 2 / (draws * p[live])).sum()
    degrees = live.sum() - 1
    assert chi2 < degrees + 5 * np.sqrt(2 * degrees) + 8
