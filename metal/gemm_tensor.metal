// P6: projections of the prefill phase on Metal 4 tensor operations; names as in gemm.metal with gemm_tensor in front.
// 64-row tiles are for devices whose tuning asks for them.
#include "tile_tensor.h"
#include "gemm.h"

INSTANTIATE_ROWS("gemm_tensor", TensorUnit, 32)
INSTANTIATE_ROWS("gemm_tensor", TensorUnit, 64)
