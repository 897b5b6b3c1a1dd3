/* What rows of attention have seen so far, and how that of several parts of a context is added up. */

#ifndef SPD_ATTENTION_SUMS_H
#define SPD_ATTENTION_SUMS_H

#include "tiles.h"

enum { BLOCKS = LARGEST_HEAD / DEPTH };

/* What up to 16 rows have seen: each one's highest score, in powers of two, the sum of its weights, and of its weighted
   values in blocks of 32 elements. */
typedef struct {
    float peak[SIDE], total[SIDE], mixed[BLOCKS][SIDE][DEPTH];
} Sums;

/* 2^(before - peak), 0 where nothing was seen before. */
static inline vec share_of(vec before, vec peak)
{
    vec nothing = vall(-__builtin_inff());
    return vselect(vdiffers(before, nothing), power_of_two(vsub(before, peak)), vzero());
}

static inline void clear(Sums *sums, long blocks, int rows)
{
    storef(sums->peak, SIDE, vall(-__builtin_inff()));
    storef(sums->total, SIDE, vzero());
    for (long i = 0; i < blocks; i++)
        memset(sums->mixed[i], 0, (size_t)rows * sizeof *sums->mixed[i]);
}

/* Add what rows saw in a section to what they saw before it. */
static inline void combine(Sums *all, const Sums *section, long blocks, int rows)
{
    float kept[SIDE], part[SIDE];
    vec before = loadf(all->peak, SIDE), own = loadf(section->peak, SIDE), peak = vmax(own, before);
    storef(kept, SIDE, share_of(before, peak));
    storef(part, SIDE, share_of(own, peak));
    storef(all->peak, SIDE, peak);
    vec sum = vmul(loadf(section->total, SIDE), loadf(part, SIDE));
    storef(all->total, SIDE, vfma(loadf(all->total, SIDE), loadf(kept, SIDE), sum));
    for (long i = 0; i < blocks; i++)
        for (int r = 0; r < rows; r++)
            for (int side = 0; side < DEPTH; side += SIDE) {
                float *to = all->mixed[i][r] + side;
                vec added = vmul(loadf(section->mixed[i][r] + side, SIDE), vall(part[r]));
                storef(to, SIDE, vfma(loadf(to, SIDE), vall(kept[r]), added));
            }
}

#endif
