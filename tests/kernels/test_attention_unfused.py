"""D4's control: the query and key chain as four kernels, each against its reference and all against attn_prepare."""

import numpy as np
import pytest

from tests.kernels.compare import check
from tests.kernels.harness import f32, poison
from tests.kernels.test_attention import OTHERS, REAL, TINY, ceil_div, prepare_case
from tests.reference import attention
from tests.reference.numbers import STOPPED, step_state

FAMILY = "attention_unfused"


def chain(buffers, args):
    """q and the caches after the four launches."""
    proj, q_norm, k_norm, low, high, q, k_cache, v_cache, step = buffers
    rows, heads, kv_heads, dim = (args[n] for n in ("rows", "q_heads", "kv_heads", "head_dim"))
    packed, grid = ("AttnPrepareArgs", args), (ceil_div(rows * (heads + kv_heads), 16),)
    k = poison((rows, kv_heads * dim), np.uint16)
    _, q, k = check(FAMILY, "attn_split", attention.attn_split, [proj, q, k], packed, grid, 64)
    q, k, _, _ = check(FAMILY, "attn_qk_norm", attention.attn_qk_norm, [q, k, q_norm, k_norm], packed, grid, 64)
    pairs = rows * (heads + kv_heads) * args["rotary_dim"] // 2
    q, k, *_ = check(FAMILY, "attn_rope", attention.attn_rope, [q, k, low, high, step], packed, (ceil_div(pairs, 64),), 64, atol=2**-9)
    written = check(FAMILY, "attn_cache_write", attention.attn_cache_write, [k, proj, k_cache, v_cache, step], packed, (ceil_div(rows * 2 * kv_heads, 16),), 64)
    return q, written[2], written[3]


@pytest.mark.parametrize("rows,position", [(1, 0), (1, 200), (5, 61), (33, 1)])
@pytest.mark.parametrize("dims", [TINY, REAL, *OTHERS])
def test_chain(dims, rows, position):
    buffers, args = prepare_case(rows, dims, position)
    got = chain(buffers, args)
    expected = [b.copy() for b in buffers]
    attention.attn_prepare(*expected, args)
    for a, e in zip(got, expected[5:8]):
        np.testing.assert_allclose(f32(a), f32(e), rtol=2**-6, atol=2**-6)   # three roundings instead of one


def test_stopped_steps_leave_the_cache_alone():
    buffers, args = prepare_case(1, TINY, 9)
    buffers[8] = step_state(position=9, done=STOPPED)
    _, k_cache, v_cache = chain(buffers, args)
    np.testing.assert_array_equal(k_cache, buffers[6])
    np.testing.assert_array_equal(v_cache, buffers[7])
