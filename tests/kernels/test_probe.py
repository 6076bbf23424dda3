"""metal/probe.metal: the probes really read, copy and multiply what they say."""

import numpy as np
import pytest

from tests.kernels.harness import bf16, poison, run


@pytest.mark.parametrize("words, groups, threads", [(1, 1, 32), (1000, 3, 64), (8 * 32 * 12 + 5, 4, 96)])
def test_read_folds_every_word_once(words, groups, threads):
    rng = np.random.default_rng(words)
    data, out = rng.integers(0, 2**32, (words + 4, 4), np.uint32), poison((groups * threads // 32,), np.uint32)
    run("probe", "probe_read", {0: data, 1: out}, ("ProbeArgs", {"count": words}), 2, (groups, 1, 1), (threads, 1, 1))
    assert np.bitwise_xor.reduce(out) == np.bitwise_xor.reduce(data[:words].reshape(-1))


@pytest.mark.parametrize("words, groups, threads", [(1, 1, 32), (1000, 3, 64), (8 * 32 * 12 + 5, 4, 96)])
def test_copy_moves_every_word_and_no_other(words, groups, threads):
    data, out = np.random.default_rng(words).integers(0, 2**32, (words + 4, 4), np.uint32), poison((words + 4, 4), np.uint32)
    run("probe", "probe_copy", {0: data, 1: out}, ("ProbeArgs", {"count": words}), 2, (groups, 1, 1), (threads, 1, 1))
    np.testing.assert_array_equal(out[:words], data[:words])
    assert (out[words:] == 0xFFFFFFFF).all()


def test_matrix_products_add_up_over_the_rounds():
    matrices = np.random.default_rng(1).integers(-3, 4, (8, 8, 8)).astype(np.float32)
    out = poison((2 * 16, 8, 8), np.float32)
    run("probe", "probe_matrix", {0: bf16(matrices), 1: out}, ("ProbeArgs", {"count": 5}), 2, (1, 1, 1), (64, 1, 1))
    expected = 5 * np.einsum("iab,jbc->ijac", matrices[:4], matrices[4:]).reshape(16, 8, 8)
    np.testing.assert_array_equal(out, np.concatenate([expected, expected]))
