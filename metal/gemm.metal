// Projections of the prefill phase on simdgroup matrices (P1), and the control of P6.
// Names: gemm_{type of y}_{format of the weights}_m{rows of a tile}.
#include "tile_simdgroup.h"
#include "gemm.h"

INSTANTIATE_ROWS("gemm", SimdgroupUnit, 32)
