/* A product with packed weights, a block of columns at a time: what other C files know of it. */

#ifndef SPD_PRODUCT_H
#define SPD_PRODUCT_H

#include "weight.h"

enum { TO_ELEMENT, TO_FLOAT, RELU2, SILU, GELU, SWIGLU }; /* from SILU on the first half of the columns are gates */

/* Blocks of a weight's columns: of 32, or of 16 gates and what goes with them. */
static inline long column_blocks(long width, int kind)
{
    return kind >= SILU ? parts(width / 2, SIDE) : parts(width, WIDTH);
}

/* kind: TO_FLOAT, or what becomes of the sums; see `spd.kernels.linear.activation`. limit: infinite for none. */
typedef struct {
    int kind;
    float limit, alpha;
} Activation;

/* Plus bias [width] and residual [rows][width] where they are given, rounded once to elements, or left as float32. */
typedef struct {
    const float *bias;
    const element *residual;
    void *out;
    long width, stride; /* of out, from a row to the next */
    Activation act;
} Ending;

/* A left side, and the sum of each row's elements of every step: [rows][steps]. */
typedef struct {
    Left *left;
    float *sums;
} Rows;

/* Rows from tile `tiles` of a left side on. */
static inline Rows rows_at(Rows rows, long tiles) { return (Rows){rows.left + tiles * TILE, rows.sums + tiles * SIDE}; }

/* One row x [depth] into its place in what is multiplied by a weight, normed by `norm` [depth] where that is given. */
void place_left(
    const Weight *w, const element *x, const float *norm, float epsilon, long depth, Rows rows, long row);

/* Rows of a left side times block `index` of a weight, whatever it is kept in; `block` is its number among the
   columns'. */
void multiply_weight(Rows left, long rows, const Weight *w, long index, const Ending *ending, long block);

#endif
