/* Products of weights in codes with rows that are rounded to eight bits.

   Each 32 elements of a row become whole numbers from -127 to 127, times a scale: the largest magnitude / 127. Their
   products with codes are summed as integers, exactly, over the 32 or, where groups of a weight have 16 columns, over
   16; sums are scaled and added in float32, in ascending order. No order of additions within a sum, and so no number of
   rows and no set of instructions, changes a bit. A minimum is multiplied by the sum of the rounded numbers. */

#ifndef SPD_INT8_H
#define SPD_INT8_H

#include "weight.h"

/* Rows x [depth] rounded, normed by `norm` [depth] before where it is given: row `row` of rows for int8_product. Rows
   take the room of a left side. */
void place_int8(const element *x, const float *norm, float epsilon, long depth, const Weight *w, void *rows, long row);

/* Rows `top` on, `count` of them, times the codes of one block: c [count][32]. at: the block's first group. */
void int8_product(const void *rows, long top, long count, const Weight *w, const uint8_t *codes, long at, float *c);

#endif
