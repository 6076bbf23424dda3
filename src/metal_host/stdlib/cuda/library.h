// The Metal standard library in CUDA C++, for the CUDA device; traits, limits, vectors and integers are the CPU's files.
#pragma once
#include "config.h"
struct half;
#include "../lily/traits.h"
#include "half.h"
#include "../lily/bfloat.h"
#include "../lily/limits.h"
#include "../lily/vector.h"
#include "math.h"
#include "../lily/integer.h"
#include "simd.h"
#include "atomic.h"
#include "matrix.h"
#include "../lily/tensor.h"
#include "tensor_ops.h"
#include "entry.h"
