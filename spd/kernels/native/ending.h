/* What becomes of the sums of a product. */

#ifndef SPD_ENDING_H
#define SPD_ENDING_H

#include "product.h"

/* The smaller one; what is not a number stays so. */
static inline vec at_most(vec x, vec limit) { return vselect(vmore(x, limit), limit, x); }

/* Gates x times sigmoid(x), or gelu in its form with tanh, which is x * sigmoid(2 inner(x)), and what they open. */
static inline vec opened(vec x, vec up, const Activation *act)
{
    const vec limit = vall(act->limit), one = vall(1.0f), zero = vzero();
    const int limited = act->limit < __builtin_inff();
    if (limited) {
        up = vsub(zero, at_most(vsub(zero, at_most(up, limit)), limit));
        if (act->kind == SWIGLU) x = at_most(x, limit), up = vadd(up, one);
    }
    vec inner = vmul(x, vall(act->alpha));
    if (act->kind == GELU) {
        vec cube = vmul(vmul(x, x), x);
        inner = vmul(vfma(cube, vall(0.044715f), x), vall(1.5957691216f));
    }
    x = vdiv(x, vadd(one, exponential(vsub(zero, inner))));
    return vmul(limited && act->kind == SILU ? at_most(x, limit) : x, up);
}

/* What becomes of sums [count][32] of a block of columns: rows `first` on of the result, `stride` apart. */
static void finish(const Ending *e, const float *sum, long block, long first, long count)
{
    int gated = e->act.kind >= SILU;
    long columns = gated ? e->width / 2 : e->width;
    for (long r = first; r < first + count; r++, sum += WIDTH) {
        if (gated) {
            long at = block * SIDE;
            vec g = loadf(sum, SIDE), up = loadf(sum + SIDE, SIDE);
            if (e->bias) {
                g = vadd(g, loadf(e->bias + at, columns - at));
                up = vadd(up, loadf(e->bias + columns + at, columns - at));
            }
            store((element *)e->out + r * e->stride + at, columns - at, opened(g, up, &e->act));
            continue;
        }
        for (int side = 0; side < 2; side++) {
            long at = block * WIDTH + side * SIDE, place = r * e->stride + at;
            if (at >= columns) break;
            vec y = loadf(sum + side * SIDE, SIDE);
            if (e->bias) y = vadd(y, loadf(e->bias + at, columns - at));
            if (e->act.kind == RELU2) y = vsub(vzero(), at_most(vsub(vzero(), y), vzero())), y = vmul(y, y);
            if (e->residual) y = vadd(y, load(e->residual + place, columns - at));
            if (e->act.kind == TO_FLOAT) storef((float *)e->out + place, columns - at, y);
            else store((element *)e->out + place, columns - at, y);
        }
    }
}

#endif
