// Grouped GEMM of the experts on simdgroup matrices (P1, P2, P3), and the control of P6.
// Names: grouped_gemm[_silu]_bf16_{format}_m{rows of a tile}. silu: gate and up projections with the gated activation in the epilogue;
// format w16: the control of P1, weights that dequantise.metal has expanded in a pass of its own.
#include "tile_simdgroup.h"
#include "grouped_gemm.h"

INSTANTIATE_ROWS("grouped_gemm", SimdgroupUnit, 16)
INSTANTIATE_ROWS("grouped_gemm", SimdgroupUnit, 32)
