/* Products of tiles by AVX512-BF16. */

/* Nanoseconds that a tile takes. */
static inline double tile_time(long rows) { return 25.0 + 5.0 * (double)rows; }

static inline __m512 pair_product(__m512 sum, const bf16 *a, const bf16 *b)
{
    int32_t pair;
    memcpy(&pair, a, sizeof pair);
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)_mm512_loadu_si512(b));
}

/* Of `count` rows from a on: c [count][32]. Meanwhile `bytes` of each place are asked for in a step: the processor by
   itself does not fetch far enough ahead. Few rows that are the first to read a block wait for memory:
   they read it in its order, one half of a step behind the other. Others use what they have read of a row for both
   halves, whose sums then do not wait for each other. */
INLINE void rows_product(
    const bf16 *a, const int count, const bf16 *b, long steps, int fresh, Ahead *ahead, long bytes, float *c)
{
    Ahead next = *ahead;
    const int in_order = count <= 2 && bytes > 0;
    __m512 sums[8][2];
    for (int r = 0; r < count; r++)
        for (int half = 0; half < 2; half++)
            sums[r][half] = fresh ? _mm512_setzero_ps() : _mm512_loadu_ps(c + r * 32 + half * SIDE);
    for (long k = 0; k < steps; k++, b += 2 * TILE) {
        const bf16 *own = a + k * TILE;
        if (in_order) {
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                ask(&next, bytes / 2);
#pragma GCC unroll 16
                for (int j = 0; j < SIDE; j++)
                    for (int r = 0; r < count; r++)
                        sums[r][half] = pair_product(sums[r][half], own + r * DEPTH + 2 * j, b + half * TILE + j * DEPTH);
                __asm__ volatile("" : : : "memory"); /* registers do not suffice for the rows' pairs */
            }
        } else {
            for (int j = 0; j < SIDE; j++) {
                if (j % 4 == 0) ask(&next, bytes / 4);
                for (int r = 0; r < count; r++)
                    for (int half = 0; half < 2; half++)
                        sums[r][half] = pair_product(sums[r][half], own + r * DEPTH + 2 * j, b + half * TILE + j * DEPTH);
            }
        }
    }
    *ahead = next;
    for (int r = 0; r < count; r++)
        for (int half = 0; half < 2; half++) _mm512_storeu_ps(c + r * 32 + half * SIDE, sums[r][half]);
}

static inline void block_product(const bf16 *a, long apart, int blocks, int rows, const bf16 *b, long steps,
    int fresh, Ahead *ahead, long bytes, float *c)
{
    bytes = parts(bytes, parts(rows, 8));
    for (int block = 0; block < blocks; block++)
        for (int first = 0; first < SIDE && block * SIDE + first < rows;) {
            int left = rows - block * SIDE - first;
            if (left > SIDE - first) left = SIDE - first;
            const bf16 *from = a + block * apart + first * DEPTH;
            float *to = c + (block * SIDE + first) * 32;
            if (left >= 8) rows_product(from, 8, b, steps, fresh, ahead, bytes, to), first += 8;
            else if (left >= 4) rows_product(from, 4, b, steps, fresh, ahead, bytes, to), first += 4;
            else if (left >= 2) rows_product(from, 2, b, steps, fresh, ahead, bytes, to), first += 2;
            else rows_product(from, 1, b, steps, fresh, ahead, bytes, to), first += 1;
        }
}
