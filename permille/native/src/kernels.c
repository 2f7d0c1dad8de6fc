/* All kernels for one target, which build.py names, for example by -DTARGET=avx2 -DPATH_AVX2. */
#include "permille.h"

#include "vector.h"

#include "weights.inc"
#include "products.inc"
#include "int8.inc"
#include "directions.inc"
#include "replay.inc"
#include "groups.inc"
#include "layers.inc"
