"""metal/gdn_step.metal against tests/reference/fused.py, and against the composition of gdn.metal's kernels."""

import numpy as np
import pytest

from tests.kernels.compare import assert_close, check
from tests.kernels.harness import bf16, f32, poison, run
from tests.reference import fused
from tests.reference.numbers import STOPPED, step_state

TINY, SMALL, REAL = (2, 4, 128), (2, 6, 64), (16, 32, 128)   # key heads, value heads, head dim


def step_case(dims, taps=4, slot=1, done=0, separate_gates=False, seed=0):
    key_heads, value_heads, dim = dims
    rng = np.random.default_rng(seed)
    width = 2 * key_heads * dim + value_heads * dim
    gates_at = width + value_heads * dim                       # proj: q k v | z | b | a
    proj = bf16(rng.normal(0, 1, gates_at + 2 * value_heads))
    gates = bf16(rng.normal(0, 3, 2 * value_heads + 3)) if separate_gates else proj.copy()
    b_offset = 3 if separate_gates else gates_at
    conv_stride, state_stride = (taps - 1) * width + 64, value_heads * dim * dim
    conv_ring, state_ring = poison((3, conv_stride), np.uint16), poison((3, state_stride), np.float32)
    conv_ring[slot], state_ring[slot] = bf16(rng.normal(0, 1, conv_stride)), rng.normal(0, 0.3, state_stride)
    A_log, dt_bias = rng.uniform(-3, 2, value_heads).astype(np.float32), rng.normal(0, 2, value_heads).astype(np.float32)
    args = {"k_heads": key_heads, "v_heads": value_heads, "dk": dim, "dv": dim, "taps": taps, "b_offset": b_offset,
            "a_offset": b_offset + value_heads, "conv_stride": conv_stride, "state_stride": state_stride}
    return [proj, rng.normal(0, 0.5, (width, taps)).astype(np.float32), conv_ring, A_log, dt_bias, state_ring,
            poison(value_heads * dim, np.uint16), step_state(slot=slot, done=done), gates], args


def step(case, blocks, threads):
    buffers, args = case
    got = check("gdn_step", f"gdn_step_d{args['dk']}", fused.gdn_step, buffers, ("GdnStepArgs", args),
                (blocks, args["v_heads"]), threads, args_index=8, atol=2**-9)
    composed = [b.copy() for b in buffers]
    fused.gdn_step(*composed, args, between=fused.through_bf16)
    assert_close(got[6], composed[6], rtol=2**-6, atol=2**-6)
    return got


@pytest.mark.parametrize("dims", [TINY, SMALL])
@pytest.mark.parametrize("blocks,threads", [(1, 32), (1, 64), (2, 32), (4, 32), (2, 128)])
def test_step(dims, blocks, threads):
    step(step_case(dims), blocks, threads)


@pytest.mark.parametrize("taps", [2, 4, 8])
@pytest.mark.parametrize("slot", [0, 2])
def test_step_window(taps, slot):
    step(step_case(TINY, taps, slot, separate_gates=True), 2, 64)


@pytest.mark.parametrize("blocks,threads", [(4, 64), (1, 32), (8, 32)])
def test_step_real_dims(blocks, threads):
    got = step(case := step_case(REAL), blocks, threads)
    expected = [b.copy() for b in case[0]]
    fused.gdn_step(*expected, case[1])
    error = np.abs(got[5][2] - expected[5][2]).max() / np.abs(expected[5][2]).max()
    assert error < 2e-6   # the state is float32


def test_window_is_exact():
    """Every channel's window moves on bit for bit, whoever owns it."""
    buffers, args = step_case(TINY, slot=2)
    got = step((buffers, args), 4, 32)
    width = 2 * 2 * 128 + 4 * 128
    np.testing.assert_array_equal(got[2][0][: 2 * width], buffers[2][2][width : 3 * width])
    np.testing.assert_array_equal(got[2][0][2 * width : 3 * width], buffers[0][:width])


def test_stopped_steps_leave_state_alone():
    buffers, args = step_case(TINY, done=STOPPED)
    got = step((buffers, args), 2, 32)
    np.testing.assert_array_equal(got[2], buffers[2])
    np.testing.assert_array_equal(got[5].view(np.uint32), buffers[5].view(np.uint32))


def test_same_as_the_separate_kernels():
    """Several steps in a row beside gdn_conv_silu, gdn_qk_norm, gdn_gates and gdn_scan themselves."""
    buffers, args = step_case(TINY, slot=0)
    proj, w, conv_ring, A_log, dt_bias, state_ring, out, _, gates = buffers
    width, heads = 1024, 4
    conv, state, rng = conv_ring.copy(), state_ring.copy(), np.random.default_rng(9)
    for t in range(5):
        proj = gates = bf16(rng.normal(0, 1, len(proj)))
        at = step_state(slot=t % 3)
        run("gdn_step", "gdn_step_d128", {0: proj, 1: w, 2: conv_ring, 3: A_log, 4: dt_bias, 5: state_ring, 6: out, 7: at, 9: gates},
            ("GdnStepArgs", args), 8, (2, heads, 1), (64, 1, 1))
        c, beta, decay, plain = poison(width, np.uint16), poison(heads, np.float32), poison(heads, np.float32), poison(heads * 128, np.uint16)
        run("gdn", "gdn_conv_silu", {0: proj, 1: w, 2: conv, 3: c, 4: at},
            ("ConvArgs", {"rows": 1, "channels": width, "taps": 4, "ldp": len(proj), "ring_stride": args["conv_stride"]}), 5, (4, 1, 1), (32, 1, 1))
        run("gdn", "gdn_qk_norm", {0: c}, ("QkNormArgs", {"rows": 1, "heads": 2, "head_dim": 128, "ldc": width}), 1, (1, 1, 1), (32, 1, 1))
        b, a = proj[args["b_offset"] :][:heads].copy(), proj[args["a_offset"] :][:heads].copy()
        run("gdn", "gdn_gates", {0: b, 1: a, 2: A_log, 3: dt_bias, 4: beta, 5: decay},
            ("GatesArgs", {"rows": 1, "heads": heads, "ldb": heads, "lda": heads}), 6, (1, 1, 1), (32, 1, 1))
        run("gdn", "gdn_scan_d128", {0: c, 1: decay, 2: beta, 3: state, 4: plain, 5: at},
            ("ScanArgs", {"rows": 1, "k_heads": 2, "v_heads": heads, "dk": 128, "dv": 128, "ldc": width, "ring_stride": args["state_stride"]}), 6, (8, heads, 1), (64, 1, 1))
        np.testing.assert_array_equal(conv_ring[(t + 1) % 3][: 3 * width], conv[(t + 1) % 3][: 3 * width])
        difference = np.abs(f32(out) - f32(plain))
        assert difference.max() < 2e-2 * np.abs(f32(plain)).max()


def scan_norm_case(dims, slot=2, done=0):
    key_heads, value_heads, dim = dims
    rng = np.random.default_rng(3)
    width, stride = key_heads * dim, value_heads * dim * dim
    c = rng.normal(0, 1, 2 * width + value_heads * dim)
    for part, scale in ((0, dim**-0.5), (1, 1.0)):
        x = c[part * width : (part + 1) * width].reshape(key_heads, dim)
        x *= scale / np.sqrt((x * x).sum(-1, keepdims=True))
    decay, beta = (rng.uniform(lo, 1, value_heads).astype(np.float32) for lo in (0.8, 0))
    ring = poison((3, stride), np.float32)
    ring[slot] = rng.normal(0, 0.3, stride)
    args = {"k_heads": key_heads, "v_heads": value_heads, "dk": dim, "dv": dim, "ring_stride": stride, "eps": 1e-6}
    z, weight = bf16(rng.normal(0, 2, value_heads * dim)), rng.normal(1, 0.2, dim).astype(np.float32)
    return [bf16(c), decay, beta, ring, poison(value_heads * dim, np.uint16), step_state(slot=slot, done=done), z, weight], args


@pytest.mark.parametrize("dims,threads,done", [(TINY, 32, 0), (TINY, 256, STOPPED), (SMALL, 64, 0), (REAL, 256, 0)])
def test_scan_norm(dims, threads, done):
    buffers, args = scan_norm_case(dims, done=done)
    got = check("gdn_step", f"gdn_scan_norm_d{args['dk']}", fused.gdn_scan_norm, buffers, ("ScanNormArgs", args), (args["v_heads"],), threads,
                args_index=6, atol=2**-9)
    composed = [b.copy() for b in buffers]
    fused.gdn_scan_norm(*composed, args, between=fused.through_bf16)
    assert_close(got[4], composed[4], rtol=2**-6, atol=2**-6)
