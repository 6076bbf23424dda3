"""metal/activation.metal against tests/reference/{moe,linear}.py."""

import numpy as np
import pytest

from tests.kernels.comparing import assert_close
from tests.kernels.harness import bf16, poison, run
from tests.reference import linear, moe


@pytest.mark.parametrize("rows, width", [(1, 64), (33, 512), (9, 520), (65, 128)])
def test_silu_mul(rows, width):
    rng = np.random.default_rng(width)
    x = poison((rows, 2 * width + 8), np.uint16)
    x[:, : 2 * width] = bf16(rng.normal(0, 4, (rows, 2 * width)))
    x[0, 0], x[0, 1] = bf16(np.array([-100.0, 100.0]))      # both ends of the exponential
    out = poison((rows, width + 8), np.uint16)
    args = {"rows": rows, "width": width, "ldx": 2 * width + 8, "ldy": width + 8}
    run("activation", "silu_mul", {0: x, 1: out}, ("SiluMulArgs", args), 2, (-(-width // 512), rows, 1), (64, 1, 1))
    assert (out[:, width:] == 0xFFFF).all()
    assert_close(np.ascontiguousarray(out[:, :width]), moe.silu_mul(x, width), 1e-6)


@pytest.mark.parametrize("rows, heads, head_dim", [(1, 8, 256), (33, 16, 256), (3, 3, 64)])
def test_output_gate(rows, heads, head_dim):
    rng = np.random.default_rng(heads)
    width, ldp = heads * head_dim, 2 * heads * head_dim + 512     # keys and values follow in the same rows
    o, proj = bf16(rng.normal(0, 1, (rows, width))), bf16(rng.normal(0, 3, (rows, ldp)))
    expected = linear.output_gate(o, proj, heads, head_dim)
    run("activation", "output_gate", {0: o, 1: proj}, ("OutputGateArgs", {"rows": rows, "heads": heads, "head_dim": head_dim, "ldp": ldp}), 2, (-(-width // 512), rows, 1), (64, 1, 1))
    assert_close(o, expected, 1e-6)
