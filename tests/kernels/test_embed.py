"""metal/embed.metal against tests/reference/quant.py. D2 is the hand-off of a token from step to step."""

import numpy as np
import pytest

from tests.kernels.harness import poison, run
from tests.reference import quant

STATE_WORDS = 38   # StepState: position, slot, step, done, tokens[2], history[16], flags[16]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("rows, hidden, vocab, threads", [(1, 256, 300, 32), (33, 2048, 500, 64), (5, 384, 7, 64)])
def test_embed(bits, group, rows, hidden, vocab, threads):
    rng = np.random.default_rng(rows * hidden + bits + group)
    w, s, b = quant.random_matrix(rng, (vocab, hidden), bits, group)
    ids = rng.integers(0, vocab, rows, dtype=np.uint32)
    ids[0] = vocab - 1
    out = poison((rows, hidden), np.uint16)
    run("embed", f"embed_b{bits}_g{group}", {0: w, 1: s, 2: b, 3: ids, 4: out}, ("EmbedArgs", {"rows": rows, "hidden": hidden, "vocab": vocab}), 5, (1, rows, 1), (threads, 1, 1))
    assert np.array_equal(out, quant.embed(w, s, b, ids, bits, group))


@pytest.mark.parametrize("step", [0, 1, 7])
def test_embed_step_reads_the_slot_of_its_step(step):
    rng = np.random.default_rng(step)
    w, s, b = quant.random_matrix(rng, (64, 256), 4, 64)
    state = np.zeros(STATE_WORDS, np.uint32)
    state[2], state[4], state[5] = step, 13, 57
    out = poison((1, 256), np.uint16)
    run("embed", "embed_step_b4_g64", {0: w, 1: s, 2: b, 3: state, 4: out}, ("EmbedArgs", {"rows": 1, "hidden": 256, "vocab": 64}), 5, (1, 1, 1), (64, 1, 1))
    assert np.array_equal(out, quant.embed_step(w, s, b, (13, 57), step, 4, 64))


def test_an_id_beyond_the_table_stays_inside_it():
    w, s, b = quant.random_matrix(np.random.default_rng(0), (8, 256), 4, 64)
    out = poison((1, 256), np.uint16)
    run("embed", "embed_b4_g64", {0: w, 1: s, 2: b, 3: np.array([0xFFFFFFFF], np.uint32), 4: out}, ("EmbedArgs", {"rows": 1, "hidden": 256, "vocab": 8}), 5, (1, 1, 1), (64, 1, 1))
    assert np.array_equal(out, quant.embed(w, s, b, np.array([7]), 4, 64))
