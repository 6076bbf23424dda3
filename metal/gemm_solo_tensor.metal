// P6: projections of the prefill phase in tiles of a single simdgroup, for devices whose tuning asks for them (Tuning.tile_threads);
// names as in gemm.metal with gemm_solo_tensor in front.
#include "tile_tensor.h"
#include "gemm.h"

INSTANTIATE_ROWS("gemm_solo_tensor", SoloTensorUnit, 32)
INSTANTIATE_ROWS("gemm_solo_tensor", SoloTensorUnit, 64)
