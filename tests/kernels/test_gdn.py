"""Gated DeltaNet kernels against numpy: tiny dims, head dim 64 and the 35B's, carried state, padding and chunking."""

import numpy as np
import pytest

from tests.kernels.compare import check
from tests.kernels.harness import bf16, f32, poison, run
from tests.reference import gdn
from tests.reference.numbers import STOPPED, step_state

TINY, SMALL, REAL = (2, 4, 128), (2, 6, 64), (16, 32, 128)   # key heads, value heads, head dim


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def conv_case(rows, channels, taps, ldp, slot=1, done=0, seed=0):
    rng = np.random.default_rng(seed)
    stride = (taps - 1) * channels + 64
    proj = bf16(rng.normal(0, 1, (rows, ldp)))
    w = rng.normal(0, 0.5, (channels, taps)).astype(np.float32)
    ring = poison((3, stride), np.uint16)
    ring[slot] = bf16(rng.normal(0, 1, stride))
    args = ("ConvArgs", {"rows": rows, "channels": channels, "taps": taps, "ldp": ldp, "ring_stride": stride})
    return proj, w, ring, args, step_state(slot=slot, done=done)


def conv(proj, w, ring, args, step, threads=32):
    rows, channels = args[1]["rows"], args[1]["channels"]
    buffers = [proj, w, ring, poison((rows, channels), np.uint16), step]
    return check("gdn", "gdn_conv_silu", gdn.gdn_conv_silu, buffers, args, (ceil_div(channels, 8 * threads), ceil_div(rows, 32)), threads)


@pytest.mark.parametrize("taps", [2, 4, 8])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 31, 33, 65])
def test_conv(rows, taps):
    conv(*conv_case(rows, 1024, taps, 1544))


@pytest.mark.parametrize("rows,threads", [(1, 64), (37, 128)])
def test_conv_real_dims(rows, threads):
    conv(*conv_case(rows, 8192, 4, 12352, slot=2), threads=threads)


def test_case_35_conv_window_is_exact_and_ignores_padding():
    """Case 35: rows past `rows` are in the buffer (a padded tile) and must leave no trace; the window is copied bit for bit."""
    proj, w, ring, args, step = conv_case(64, 1024, 4, 1544)
    real = ("ConvArgs", {**args[1], "rows": 37})
    plain = conv(proj[:37].copy(), w, ring, real, step)
    out = poison((64, 1024), np.uint16)
    padded, ring_after = proj.copy(), ring.copy()
    padded[37:] = 0x7FC0
    run("gdn", "gdn_conv_silu", {0: padded, 1: w, 2: ring_after, 3: out, 4: step}, real, 5, (4, 2, 1), (32, 1, 1))
    np.testing.assert_array_equal(ring_after, plain[2])
    np.testing.assert_array_equal(out[:37], plain[3])
    assert (out[37:] == 0xFFFF).all()


@pytest.mark.parametrize("chunks", [[1] * 9, [3, 4, 2], [8, 1], [2, 7]])
def test_conv_chunked_equals_single(chunks):
    proj, w, ring, args, step = conv_case(9, 512, 4, 512)
    whole = conv(proj, w, ring, args, step)
    rows, outs, slot = 0, [], 1
    for n in chunks:
        part = ("ConvArgs", {**args[1], "rows": n})
        got = conv(proj[rows : rows + n].copy(), w, ring, part, step_state(slot=slot))
        ring, slot, rows = got[2], (slot + 1) % 3, rows + n
        outs.append(got[3])
    np.testing.assert_array_equal(np.concatenate(outs), whole[3])
    np.testing.assert_array_equal(ring[slot][: 3 * 512], whole[2][2][: 3 * 512])


def test_stopped_steps_leave_state_alone():
    proj, w, ring, args, step = conv_case(1, 512, 4, 512, done=STOPPED)
    np.testing.assert_array_equal(conv(proj, w, ring, args, step)[2], ring)
    case = scan_case(1, TINY, done=STOPPED)
    np.testing.assert_array_equal(scan(case)[3].view(np.uint32), case[0][3].view(np.uint32))


@pytest.mark.parametrize("heads,dim,ldc", [(2, 128, 1024), (16, 128, 8192), (3, 64, 904)])
@pytest.mark.parametrize("rows", [1, 5])
def test_qk_norm(rows, heads, dim, ldc):
    rng = np.random.default_rng(1)
    c = bf16(rng.normal(0, 1, (rows, ldc)))
    args = ("QkNormArgs", {"rows": rows, "heads": heads, "head_dim": dim, "ldc": ldc})
    check("gdn", "gdn_qk_norm", gdn.gdn_qk_norm, [c], args, (ceil_div(rows * 2 * heads, 16),), 64)


@pytest.mark.parametrize("rows,heads,ld", [(1, 4, 1544), (7, 4, 1544), (33, 32, 12352), (3, 5, 9)])
def test_gates(rows, heads, ld):
    rng = np.random.default_rng(2)
    b, a = (bf16(rng.normal(0, 6, (rows, ld))) for _ in range(2))
    A_log, dt_bias = rng.uniform(-3, 2.8, heads).astype(np.float32), rng.normal(0, 3, heads).astype(np.float32)
    args = ("GatesArgs", {"rows": rows, "heads": heads, "ldb": ld, "lda": ld})
    outs = [poison((rows, heads), np.float32) for _ in range(2)]
    check("gdn", "gdn_gates", gdn.gdn_gates, [b, a, A_log, dt_bias, *outs], args, (ceil_div(rows * heads, 32),), 32, rtol=2e-6, atol=1e-7)


def scan_case(rows, dims, slot=2, done=0, seed=3, pad=16):
    key_heads, value_heads, dim = dims
    rng = np.random.default_rng(seed)
    width, stride, ldc = key_heads * dim, value_heads * dim * dim, 2 * key_heads * dim + value_heads * dim + pad
    c = rng.normal(0, 1, (rows, ldc))
    for part, scale in ((0, dim**-0.5), (1, 1.0)):
        x = c[:, part * width : (part + 1) * width].reshape(rows, key_heads, dim)
        x *= scale / np.sqrt((x * x).sum(-1, keepdims=True))
    decay, beta = (rng.uniform(lo, 1, (rows, value_heads)).astype(np.float32) for lo in (0.8, 0))
    ring = poison((3, stride), np.float32)
    ring[slot] = rng.normal(0, 0.3, stride)
    args = ("ScanArgs", dict(zip(("rows", "k_heads", "v_heads", "dk", "dv", "ldc", "ring_stride"), (rows, *dims[:2], dim, dim, ldc, stride))))
    return [bf16(c), decay, beta, ring, poison((rows, value_heads * dim), np.uint16), step_state(slot=slot, done=done)], args


def scan(case, threads=64):
    buffers, args = case
    grid = (ceil_div(args[1]["dv"], threads // 4), args[1]["v_heads"])
    return check("gdn", f"gdn_scan_d{args[1]['dk']}", gdn.gdn_scan, buffers, args, grid, threads, atol=2**-9)


@pytest.mark.parametrize("dims,rows,threads", [(TINY, 1, 32), (TINY, 37, 64), (SMALL, 5, 128), (SMALL, 33, 32), (REAL, 1, 64), (REAL, 9, 128)])
def test_scan(dims, rows, threads):
    case = scan_case(rows, dims)
    got = scan(case, threads)
    expected = [b.copy() for b in case[0]]
    gdn.gdn_scan(*expected, case[1][1])
    error = np.abs(got[3][0] - expected[3][0]).max() / np.abs(expected[3][0]).max()
    assert error < 2e-6   # the state is float32


@pytest.mark.parametrize("chunks", [[1] * 12, [5, 7], [11, 1]])
def test_scan_chunked_equals_single(chunks):
    (c, decay, beta, ring, out, step), args = scan_case(12, TINY, slot=0)
    whole = scan(([c, decay, beta, ring, out, step], args))
    rows, slot, outs = 0, 0, []
    for n in chunks:
        part = slice(rows, rows + n)
        case = [c[part].copy(), decay[part].copy(), beta[part].copy(), ring, out[part].copy(), step_state(slot=slot)]
        got = scan((case, ("ScanArgs", {**args[1], "rows": n})))
        ring, slot, rows = got[3], (slot + 1) % 3, rows + n
        outs.append(got[4])
    np.testing.assert_array_equal(np.concatenate(outs), whole[4])
    np.testing.assert_array_equal(ring[slot], whole[3][1])   # carried in float32: not one bit differs


def test_case_35_scan_ignores_padding():
    """NaN rows after the real ones change nothing."""
    (c, decay, beta, ring, out, step), args = scan_case(32, TINY)
    args = ("ScanArgs", {**args[1], "rows": 19})
    plain = scan(([c[:19].copy(), decay[:19].copy(), beta[:19].copy(), ring, out[:19].copy(), step], args))
    c[19:], decay[19:], beta[19:] = 0x7FC0, np.nan, np.nan
    run("gdn", "gdn_scan_d128", {0: c, 1: decay, 2: beta, 3: ring, 4: out, 5: step}, args, 6, (8, 4, 1), (64, 1, 1))
    np.testing.assert_array_equal(ring[0].view(np.uint32), plain[3][0].view(np.uint32))
    np.testing.assert_array_equal(out[:19], plain[4])
    assert (out[19:] == 0xFFFF).all()


def test_case_31_scan_of_2000_single_rows_stays_bounded():
    """Single-row passes, as decode makes them, stay on the float64 reference (a bf16 state would not)."""
    rows = 2000
    (c, decay, beta, ring, out, _), args = scan_case(rows, (1, 1, 64), slot=0)
    expected, one = ring[0].astype(np.float64).reshape(64, 64), ("ScanArgs", {**args[1], "rows": 1})
    decay[:] = 0.999
    x = f32(c).astype(np.float64)
    for t in range(rows):
        got = out[t : t + 1].copy()
        run("gdn", "gdn_scan_d64", {0: c[t : t + 1].copy(), 1: decay[t : t + 1], 2: beta[t : t + 1], 3: ring, 4: got, 5: step_state(slot=t % 3)}, one, 6, (4, 1, 1), (64, 1, 1))
        q, k, v = x[t, :64], x[t, 64:128], x[t, 128:192]
        expected *= np.float64(decay[t, 0])
        expected += np.outer(np.float64(beta[t, 0]) * (v - expected @ k), k)
    error = np.abs(ring[rows % 3].reshape(64, 64) - expected).max() / np.abs(expected).max()
    assert error < 1e-5


@pytest.mark.parametrize("rows,heads,dv,ldz", [(1, 4, 128, 1544), (5, 4, 128, 1544), (3, 32, 128, 12352), (7, 3, 64, 200)])
def test_gated_norm(rows, heads, dv, ldz):
    rng = np.random.default_rng(4)
    o, z = bf16(rng.normal(0, 0.1, (rows, heads * dv))), bf16(rng.normal(0, 2, (rows, ldz)))
    w = rng.normal(1, 0.2, dv).astype(np.float32)
    args = ("GatedNormArgs", {"rows": rows, "heads": heads, "dv": dv, "ldz": ldz, "eps": 1e-6})
    check("gdn", "gdn_gated_norm", gdn.gdn_gated_norm, [o, z, w, poison((rows, heads * dv), np.uint16)], args, (ceil_div(rows * heads, 16),), 64)
