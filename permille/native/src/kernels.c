/* All kernels, for the one target that build.py names: -DTARGET=avx2 -DPATH_AVX2, ... */
#include "permille.h"

#include "vector.h"

#include "weights.inc"
#include "products.inc"
#include "int8.inc"
#include "directions.inc"
#include "replay.inc"
#include "groups.inc"
#include "layers.inc"
