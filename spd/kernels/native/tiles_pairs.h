/* Left sides where the processor multiplies pairs of bfloat16. */

#if !SPD_AMX
#include "tiles_avx512.h"
#endif

/* A left side: [parts(rows, 16)][steps] tiles of [16 rows][32]. */
typedef bf16 Left;
enum { LEFT_STEP = TILE };

static inline long left_row(long row, long steps) { return (row / SIDE * steps * SIDE + row % SIDE) * DEPTH; }
static inline void left_copy(Left *to, const bf16 *from, long count) { store_halves(to, SIDE, halves(from, count)); }
static inline void left_store(Left *to, vec x) { store(to, SIDE, x); }
/* Weights of attention. */
static inline void left_weights(Left *to, vec x) { store(to, SIDE, x); }
static inline vec left_load(const Left *from) { return load(from, SIDE); }

/* Few rows go through a block in one pass, more through parts of it of so many steps. */
static inline long panel_of(long rows, long steps) { return rows > (SPD_AMX ? 64 : 32) ? 8 : rows > 32 ? 32 : steps; }
