// P6: grouped GEMM of the experts on Metal 4 tensor operations; names as in grouped_gemm.metal with grouped_gemm_tensor in front.
// 64-row tiles are for devices whose tuning asks for them.
#include "tile_tensor.h"
#include "grouped_gemm.h"

INSTANTIATE_ROWS("grouped_gemm_tensor", TensorUnit, 16)
INSTANTIATE_ROWS("grouped_gemm_tensor", TensorUnit, 32)
INSTANTIATE_ROWS("grouped_gemm_tensor", TensorUnit, 64)
