/* Codes as bytes, for products of rounded rows, and for numbers where processors convert bytes best. */

#ifndef SPD_BYTES_H
#define SPD_BYTES_H

#include "weight.h"

/* Lanes whose codes' upper bits lie in one lane. */
static inline int lanes_together(int kind) { return kind == INT5 ? 4 : kind == INT6 ? 2 : 1; }

/* The byte that stands for 0. Where a weight has zero points: what is added to them. */
static inline int32_t zero_byte(const Weight *w)
{
    const int32_t bias = SIGNED_BYTES ? 128 : 0;
    if (w->kind == MX4 || w->kind == E2M1) return 12;
    if (w->kind == IQ4) return 128 - bias;
    if (w->zeros) return w->kind == INT8 ? -bias : 0;
    return (int32_t)middle_of(w) - (w->kind == INT8 ? bias : 0);
}

/* Codes of 16 columns at four depths, lane z of one side, as bytes: numbers, those of E2M1 twice, that are `zero_byte` less.
   part: z modulo `lanes_together`. */
INLINE ints bytes_of(const uint8_t *step, const int kind, int z, const int part, const int side)
{
    static const int8_t iq4[SIDE] = {OF_IQ4};
    static const int8_t mx4[SIDE] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    if (kind == INT8) {
        ints x = loadi(step + (2 * z + side) * LANES);
        return SIGNED_BYTES ? flipped(x, (int32_t)0x80808080) : x;
    }
    ints x = masked(right(loadi(step + z * LANES), 4 * (unsigned)side), 0x0f0f0f0f);
    if (kind == MX4 || kind == E2M1) return bytes_of_table(mx4, x);
    if (kind == IQ4) return SIGNED_BYTES ? bytes_of_table(iq4, x) : flipped(bytes_of_table(iq4, x), (int32_t)0x80808080);
    if (kind == INT4) return x;
    const int bits = kind == INT5 ? 1 : 2, place = bits * (2 * part + side);
    ints upper = loadi(step + (8 + z / lanes_together(kind)) * LANES);
    upper = place < 4 ? left_by(upper, 4 - (unsigned)place) : right(upper, (unsigned)place - 4);
    return either(x, masked(upper, bits == 1 ? 0x10101010 : 0x30303030));
}

#endif
