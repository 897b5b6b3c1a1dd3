/* Products of 16 x 32 by 32 x 16 tiles of elements, summed in float32: by AMX or AVX512-BF16, or else by FMA.

   A tile of the right side, as weights are kept, is [16 pairs][16 columns][2] of bfloat16, the two of a pair being
   neighbours in depth, or [32][16] of float32. An element of a product is summed over its own row and column alone, in ascending depth: its bits do not
   depend on how many rows there are, nor on what stands in the others. */

#ifndef SPD_TILES_H
#define SPD_TILES_H

#include "pool.h"
#include "vector.h"

enum { DEPTH = 32, TILE = SIDE * DEPTH, LINE = 64 / sizeof(element) };
/* Keys that attention reads at a time. */
enum { KEYS = 128, STEPS = KEYS / DEPTH };

/* Memory that is asked for while products are summed: `end` bytes from each of a few places on, since a processor that
   follows several pages at once does not wait at the beginning of each. `due` of them should be asked for by now, `at`
   were. */
enum { PLACES = 4, LINE_BYTES = 64 };
typedef struct {
    const char *from[PLACES];
    long at, due, end;
} Ahead;

/* Ask for so many bytes more of each place, unless all were. */
INLINE void ask(Ahead *x, long bytes)
{
    x->due = x->due + bytes < x->end ? x->due + bytes : x->end;
    for (; x->at < x->due; x->at += LINE_BYTES)
        for (int i = 0; i < PLACES; i++) __builtin_prefetch(x->from[i] + x->at, 0, 2);
}

static inline long parts(long count, long size) { return (count + size - 1) / size; }

/* Where in a right-side tile the element of a column at depth d lies. */
static inline int tile_place(int d, int column)
{
    return sizeof(element) == sizeof(float) ? d * SIDE + column : d / 2 * DEPTH + column * 2 + d % 2;
}

/* The same of a tile of codes, [32][16]. */
static inline int code_place(int d, int column) { return d * SIDE + column; }

#if SPD_PAIRS && defined(__AMX_BF16__) && defined(__AMX_TILE__) && !defined(SPD_NO_AMX)
#define SPD_AMX 1
#include "tiles_amx.h"
#else
#define SPD_AMX 0
static inline void tiles_begin(int first, int second) { (void)first, (void)second; }
static inline void tiles_end(void) {}
#endif

#if SPD_PAIRS
#include "tiles_pairs.h"
#else
#include "tiles_float.h"
#endif
#endif
