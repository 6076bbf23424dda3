"""P4: the recurrence's other forms for many rows, against the float64 scan: in chunks on matrix tiles, and blockwise through memory."""

import numpy as np
import pytest

from tests.kernels.compare import check
from tests.kernels.harness import run
from tests.kernels.test_gdn import REAL, SMALL, TINY, ceil_div, scan_case
from tests.reference import gdn
from tests.reference.numbers import STOPPED, f64, step_state

FORMS = {"scan": ("gdn", "gdn_scan_d{}"), "chunk": ("gdn_chunk", "gdn_chunk_d{}"), "blockwise": ("gdn_blockwise", "gdn_scan_blockwise_d{}")}
COLUMNS = 8   # state columns of a simdgroup, in each form

both_forms = pytest.mark.parametrize("form", ["chunk", "blockwise"])


def launch(form, case, threads):
    """Kernel against reference; what the kernel left."""
    (buffers, args), (family, name) = case, FORMS[form]
    grid = (ceil_div(args[1]["dv"], threads // 32 * COLUMNS), args[1]["v_heads"])
    return check(family, name.format(args[1]["dk"]), gdn.gdn_scan, buffers, args, grid, threads, atol=2**-9)


def relative_rms(actual, expected):
    a, e = f64(actual), f64(expected)
    return np.sqrt(np.square(a - e).mean() / np.square(e).mean())


@pytest.mark.parametrize("dims,rows,threads", [(TINY, 1, 32), (TINY, 16, 128), (TINY, 37, 128), (TINY, 64, 256), (SMALL, 5, 64), (SMALL, 33, 32), (SMALL, 33, 128), (REAL, 19, 128)])
@both_forms
def test_against_the_scan(form, dims, rows, threads):
    case = scan_case(rows, dims)
    got = launch(form, case, threads)
    expected = [b.copy() for b in case[0]]
    gdn.gdn_scan(*expected, case[1][1])
    assert np.abs(got[3][0] - expected[3][0]).max() < 5e-6 * np.abs(expected[3][0]).max()   # the state is float32


@both_forms
def test_hard_gates(form):
    """Gates of zero and near it, betas of 0 and 1, one key repeated: no quotient of decays, a triangular solve far from the unit matrix."""
    (c, decay, beta, ring, out, step), args = scan_case(48, TINY)
    decay[::5], decay[1::7], decay[2::3] = 0.0, 1e-30, 1.0
    beta[::2], beta[1::4] = 1.0, 0.0
    c[:, 256:512] = c[0, 256:512]
    launch(form, ([c, decay, beta, ring, out, step], args), 128)


@both_forms
def test_case_35_ignores_padding(form):
    """NaN rows after the real ones change nothing."""
    (c, decay, beta, ring, out, step), args = scan_case(64, TINY)
    args = ("ScanArgs", {**args[1], "rows": 35})
    plain = launch(form, ([c[:35].copy(), decay[:35].copy(), beta[:35].copy(), ring, out[:35].copy(), step], args), 128)
    c[35:], decay[35:], beta[35:] = 0x7FC0, np.nan, np.nan
    run(*(name.format(128) for name in FORMS[form]), {0: c, 1: decay, 2: beta, 3: ring, 4: out, 5: step}, args, 6, (4, 4, 1), (128, 1, 1))
    np.testing.assert_array_equal(ring[0].view(np.uint32), plain[3][0].view(np.uint32))
    np.testing.assert_array_equal(out[:35], plain[4])
    assert (out[35:] == 0xFFFF).all()


@both_forms
def test_chunks_of_a_prompt_equal_one_pass(form):
    """P5: cut at a multiple of the kernel's own chunk, not one bit differs."""
    (c, decay, beta, ring, out, step), args = scan_case(80, TINY, slot=0)
    whole = launch(form, ([c, decay, beta, ring, out, step], args), 128)
    rows, slot, outs = 0, 0, []
    for n in (32, 48):
        part = slice(rows, rows + n)
        case = [c[part].copy(), decay[part].copy(), beta[part].copy(), ring, out[part].copy(), step_state(slot=slot)]
        got = launch(form, (case, ("ScanArgs", {**args[1], "rows": n})), 128)
        ring, slot, rows = got[3], (slot + 1) % 3, rows + n
        outs.append(got[4])
    np.testing.assert_array_equal(np.concatenate(outs), whole[4])
    np.testing.assert_array_equal(ring[slot], whole[3][1])


@both_forms
def test_stopped_steps_leave_state_alone(form):
    (c, decay, beta, ring, out, step), args = scan_case(20, TINY, done=STOPPED)
    after = ring.copy()
    run(*(name.format(128) for name in FORMS[form]), {0: c, 1: decay, 2: beta, 3: after, 4: out, 5: step}, args, 6, (4, 4, 1), (128, 1, 1))
    np.testing.assert_array_equal(after.view(np.uint32), ring.view(np.uint32))


@pytest.mark.parametrize("form,bound", [("scan", 1e-4), ("chunk", 5e-3), ("blockwise", 1e-4)])
def test_4096_rows(form, bound):
    """Relative RMS of state and output against float64 over 4,096 rows with slow and fast decays."""
    (c, decay, beta, ring, out, step), args = scan_case(4096, (1, 2, 128))
    decay[:] = np.exp(-np.exp(np.random.default_rng(1).uniform(-8, 0, decay.shape)))
    expected = [b.copy() for b in (c, decay, beta, ring, out, step)]
    gdn.gdn_scan(*expected, args[1])
    run(*(name.format(128) for name in FORMS[form]), {0: c, 1: decay, 2: beta, 3: ring, 4: out, 5: step}, args, 6, (4, 2, 1), (128, 1, 1))
    assert relative_rms(ring[0], expected[3][0]) < bound
    assert relative_rms(out, expected[4]) < bound + 2**-9   # both sides rounded to bf16 once
