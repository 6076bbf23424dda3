// P6: grouped GEMM of the experts in tiles of a single simdgroup, for devices whose tuning asks for them (Tuning.tile_threads); names
// as in grouped_gemm.metal with grouped_gemm_solo_tensor in front.
#include "tile_tensor.h"
#include "grouped_gemm.h"

INSTANTIATE_ROWS("grouped_gemm_solo_tensor", SoloTensorUnit, 16)
INSTANTIATE_ROWS("grouped_gemm_solo_tensor", SoloTensorUnit, 32)
INSTANTIATE_ROWS("grouped_gemm_solo_tensor", SoloTensorUnit, 64)
