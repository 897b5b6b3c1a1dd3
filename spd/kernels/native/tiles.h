/* Products of 16 x 32 by 32 x 16 tiles of bfloat16, summed in float32: by AMX, AVX512-BF16, or AVX2 and FMA.

   A tile of the right side, as weights are kept, is [16 pairs][16 columns][2], the two of a pair being neighbours in
   depth. An element of a product is summed over its own row and column alone, in ascending depth: its bits do not
   depend on how many rows there are, nor on what stands in the others. */

#ifndef SPD_TILES_H
#define SPD_TILES_H

#include "pool.h"
#include "vector.h"

enum { DEPTH = 32, TILE = SIDE * DEPTH };
/* Keys that attention reads at a time. */
enum { KEYS = 128, STEPS = KEYS / DEPTH };

static inline long parts(long count, long size) { return (count + size - 1) / size; }

/* Threads for work of about so many nanoseconds: meeting costs each a microsecond or two. */
enum { WORTH_A_THREAD = 2000 };

static inline int threads_for(double nanoseconds, int threads)
{
    double most = nanoseconds / WORTH_A_THREAD;
    return most >= threads ? threads : most < 1 ? 1 : (int)most;
}

#if SPD_PAIRS && defined(__AMX_BF16__) && defined(__AMX_TILE__) && !defined(SPD_NO_AMX)
#define SPD_AMX 1
#include "tiles_amx.h"
#elif SPD_PAIRS
#include "tiles_avx512.h"
#endif

#if SPD_PAIRS
#include "tiles_pairs.h"
#else
#include "tiles_avx2.h"
#endif

#endif
