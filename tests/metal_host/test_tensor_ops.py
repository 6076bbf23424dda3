"""matmul2d of the software Metal's library against numpy: tile shapes, scopes, padded rows, and where it is refused."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

from lily import _native
from lily.errors import DeviceError
from tests.kernels.harness import bf16, device, f32, poison

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="ziglang is not installed: Metal source cannot be compiled here")

SOURCE = """#include <metal_stdlib>
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace metal;
using namespace mpp::tensor_ops;
// steps products of [M, 64] and [N, 64], added up on top of 1
template <int M, int N, int SIMDGROUPS, int PAD>
kernel void product(device const bfloat* a [[buffer(0)]], device const bfloat* b [[buffer(1)]], device float* c [[buffer(2)]], constant uint& steps [[buffer(3)]],
                    uint thread_id [[thread_index_in_threadgroup]]) {
  threadgroup bfloat left_memory[M * (64 + PAD)];
  threadgroup bfloat right_memory[N * (64 + PAD)];
  threadgroup float result[M * N];
  using Extents = dextents<int, 2>;
  auto left = tensor<threadgroup bfloat, Extents, tensor_inline>(left_memory, Extents(64, M), array<int, 2>{1, 64 + PAD});
  auto right = tensor<threadgroup bfloat, Extents, tensor_inline>(right_memory, Extents(64, N), array<int, 2>{1, 64 + PAD});
  auto target = tensor<threadgroup float, Extents, tensor_inline>(result, Extents(N, M));
  constexpr auto descriptor = matmul2d_descriptor(M, N, 64, false, true, false, matmul2d_descriptor::mode::multiply_accumulate);
  matmul2d<descriptor, execution_simdgroups<SIMDGROUPS>> operation;
  auto sum = operation.template get_destination_cooperative_tensor<decltype(left), decltype(right), float>();
  for (ushort i = 0; i < sum.get_capacity(); i++)
    if (sum.is_valid_element(i)) sum[i] = 1.0f;
  for (uint step = 0; step < steps; step++) {
    for (uint i = thread_id; i < M * 64; i += SIMDGROUPS * 32) left_memory[i / 64 * (64 + PAD) + i % 64] = a[step * M * 64 + i];
    for (uint i = thread_id; i < N * 64; i += SIMDGROUPS * 32) right_memory[i / 64 * (64 + PAD) + i % 64] = b[step * N * 64 + i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    operation.run(left, right, sum);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  sum.store(target);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = thread_id; i < M * N; i += SIMDGROUPS * 32) c[i] = result[i];
}
#define INSTANTIATE(m, n, s, pad) template [[host_name("product_" #m "_" #n "_" #s "_" #pad)]] kernel decltype(product<m, n, s, pad>) product<m, n, s, pad>;
INSTANTIATE(16, 64, 4, 0)
INSTANTIATE(32, 64, 4, 8)
INSTANTIATE(48, 64, 2, 8)
INSTANTIATE(16, 32, 1, 0)
INSTANTIATE(32, 16, 1, 8)
"""


@pytest.fixture(scope="module")
def library() -> Any:
    return device().native.library(SOURCE, "products", "4.0")


@pytest.mark.parametrize("m, n, simdgroups, pad", [(16, 64, 4, 0), (32, 64, 4, 8), (48, 64, 2, 8), (16, 32, 1, 0), (32, 16, 1, 8)])
@pytest.mark.parametrize("steps", [1, 3])
def test_products_add_up(library: Any, m: int, n: int, simdgroups: int, pad: int, steps: int) -> None:
    native, rng = device().native, np.random.default_rng(m + n)
    a, b = bf16(rng.normal(size=(steps, m, 64))), bf16(rng.normal(size=(steps, n, 64)))
    out = poison((m, n), np.float32)
    buffers = [native.buffer(x.nbytes) for x in (a, b, out)]
    for buffer, x in zip(buffers, (a, b, out), strict=True):
        buffer.view()[: x.nbytes] = x.view(np.uint8).reshape(-1)
    name = f"product_{m}_{n}_{simdgroups}_{pad}"
    dispatch: Any = (native.pipeline(library, name), list(zip(range(3), buffers, (0, 0, 0), strict=True)), np.uint32(steps).tobytes(), 3,
                     (1, 1, 1), (32 * simdgroups, 1, 1), False, 0.0, name, [])
    _native.Program(native, [dispatch], True).run()
    got = buffers[2].view()[: out.nbytes].view(np.float32).reshape(m, n)
    expected = 1 + np.einsum("smk,snk->mn", f32(a).astype(np.float64), f32(b).astype(np.float64))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("version", ["3.1", "3.2"])
def test_tensors_need_language_version_4(version: str) -> None:
    with pytest.raises(DeviceError, match="metal_tensor.* needs language version 4.0"):
        device().native.library(SOURCE, "products", version)


@pytest.mark.parametrize("change, message", [
    (("(M, N, 64, false, true", "(M, N, 64, true, true"), "transposed left operand is not offered"),
    (("(M, N, 64, false, true", "(M + 8, N + 8, 64, false, true"), "m or n is a multiple of 16"),
    (("tensor_inline>(result", "tensor_handle>(result"), "tensor_handle"),
])
def test_what_is_not_offered_does_not_compile(change: tuple[str, str], message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        device().native.library(SOURCE.replace(*change), "products", "4.0")
