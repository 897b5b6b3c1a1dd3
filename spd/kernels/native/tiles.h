/* Products of 16 x 32 by 32 x 16 tiles of bfloat16, summed in float32: by AMX, or by AVX512-BF16.

   A tile of the left side is [16 rows][32]; one of the right side is [16 pairs][16 columns][2], the two of a
   pair being neighbours in depth. An element of a product is summed over its own row and column alone, in
   ascending depth: its bits do not depend on how many rows there are, nor on what stands in the others. */

#ifndef SPD_TILES_H
#define SPD_TILES_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#if !defined(__AVX512BF16__) || !defined(__AVX512BW__) || !defined(__AVX512VL__) || !defined(_OPENMP)
#error "these kernels need AVX512-BF16 and OpenMP"
#endif

typedef uint16_t bf16;

enum { SIDE = 16, DEPTH = 32, TILE = SIDE * DEPTH };

static inline long parts(long count, long size) { return (count + size - 1) / size; }

/* Threads for work of about so many nanoseconds: waiting for each other costs some microseconds, and on a busy machine
   much more, until the system lets all of them run. */
enum { WORTH_SHARING = 40000 };

static inline int threads_for(double nanoseconds, int threads) { return nanoseconds < WORTH_SHARING ? 1 : threads; }

static inline __mmask16 lanes(long count) { return count >= SIDE ? 0xffff : (__mmask16)((1u << count) - 1); }

static inline __m512 load(const bf16 *p, __mmask16 mask)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p)), 16));
}

static inline __m256i rounded(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }

static inline void store(bf16 *p, __mmask16 mask, __m512 x) { _mm256_mask_storeu_epi16(p, mask, rounded(x)); }

/* The 16 pairs (first[i], second[i]). */
static inline __m512i paired(__m256i first, __m256i second)
{
    return _mm512_or_si512(_mm512_cvtepu16_epi32(first), _mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16));
}

/* e^x to about one unit in the last place, 1 of 0; NaN stays. Source: the coefficients of Cephes' expf. */
static inline __m512 exponential(__m512 x)
{
    x = _mm512_max_ps(_mm512_set1_ps(-87.0f), x);
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_add_ps(_mm512_fmadd_ps(_mm512_mul_ps(p, r), r, r), _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

/* What rows x [size] are divided by, but for the scales: 1 / sqrt(mean of squares + epsilon). */
static inline float norm_scale(const bf16 *x, long size, float epsilon)
{
    __m512 squares = _mm512_setzero_ps();
    for (long i = 0; i < size; i += SIDE) {
        __m512 v = load(x + i, lanes(size - i));
        squares = _mm512_fmadd_ps(v, v, squares);
    }
    return 1.0f / __builtin_sqrtf(_mm512_reduce_add_ps(squares) / (float)size + epsilon);
}

/* The root-mean-square norm of x [size] with scales norm [size], plus residual where it is given, to y. */
static inline void norm_row(
    const bf16 *x, const float *norm, float epsilon, const bf16 *residual, long size, bf16 *y)
{
    __m512 scale = _mm512_set1_ps(norm_scale(x, size, epsilon));
    for (long i = 0; i < size; i += SIDE) {
        __mmask16 mask = lanes(size - i);
        __m512 v = _mm512_mul_ps(_mm512_mul_ps(load(x + i, mask), scale), _mm512_maskz_loadu_ps(mask, norm + i));
        if (residual) v = _mm512_add_ps(v, load(residual + i, mask));
        store(y + i, mask, v);
    }
}

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && !defined(SPD_NO_AMX)
#define SPD_AMX 1

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} TileConfig;

/* GCC does not know that these instructions read memory: whatever was written before must be there. */
#define WRITTEN() __asm__ volatile("" ::: "memory")

/* Tiles 0, 1, 4 have `first` rows, 2, 3, 5 have `second`: results and left sides; 6 and 7 are right sides. */
static inline void tiles_begin(int first, int second)
{
    TileConfig config = {.palette = 1};
    const int rows[8] = {first, first, second, second, first, second, SIDE, SIDE};
    for (int i = 0; i < 8; i++) {
        config.bytes[i] = 64;
        config.rows[i] = (uint8_t)rows[i];
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
}

static inline void tiles_end(void) { _tile_release(); }

/* c [16][16] of `steps` tiles: a's rows `stride` elements apart, its steps DEPTH or TILE elements. */
static inline void tile_product(
    const bf16 *a, long stride, long a_step, int rows, const bf16 *b, long b_step, long steps, float *c)
{
    (void)rows;
    WRITTEN();
    _tile_zero(0);
    for (long k = 0; k < steps; k++) {
        _tile_loadd(4, a + k * a_step, stride * (long)sizeof(bf16));
        _tile_loadd(6, b + k * b_step, 64);
        _tile_dpbf16ps(0, 4, 6);
    }
    _tile_stored(0, c, 64);
}

/* Add to c [blocks * 16][32], or write there where `fresh`, one or two blocks of 16 rows a [steps] tiles, `apart`
   elements from each other, times b [steps][2] tiles. Meanwhile `lines` of 32 elements a step are asked for, from
   `next` on. */
static inline void block_product(const bf16 *a, long apart, int blocks, int rows, const bf16 *b, long steps,
    int fresh, const bf16 *next, long lines, float *c)
{
    const int near = lines == 2 * SIDE;
    (void)rows;
    WRITTEN();
    if (fresh) {
        _tile_zero(0);
        _tile_zero(1);
        if (blocks == 2) {
            _tile_zero(2);
            _tile_zero(3);
        }
    } else {
        _tile_loadd(0, c, 128);
        _tile_loadd(1, c + SIDE, 128);
        if (blocks == 2) {
            _tile_loadd(2, c + SIDE * 32, 128);
            _tile_loadd(3, c + SIDE * 32 + SIDE, 128);
        }
    }
    for (long k = 0; k < steps; k++, b += 2 * TILE) {
        if (near)
            for (long i = 0; i < 2 * SIDE; i++, next += DEPTH) _mm_prefetch((const char *)next, _MM_HINT_T0);
        else
            for (long i = 0; i < lines; i++, next += DEPTH) _mm_prefetch((const char *)next, _MM_HINT_T1);
        _tile_loadd(4, a + k * TILE, 64);
        _tile_loadd(6, b, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + TILE, 64);
        _tile_dpbf16ps(1, 4, 7);
        if (blocks == 2) {
            _tile_loadd(5, a + apart + k * TILE, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, c, 128);
    _tile_stored(1, c + SIDE, 128);
    if (blocks == 2) {
        _tile_stored(2, c + SIDE * 32, 128);
        _tile_stored(3, c + SIDE * 32 + SIDE, 128);
    }
}

#else
#define SPD_AMX 0

static inline void tiles_begin(int first, int second) { (void)first, (void)second; }
static inline void tiles_end(void) {}

static inline __m512 pair_product(__m512 sum, const bf16 *a, const bf16 *b)
{
    int32_t pair;
    memcpy(&pair, a, sizeof pair);
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)_mm512_loadu_si512(b));
}

static inline void tile_product(
    const bf16 *a, long stride, long a_step, int rows, const bf16 *b, long b_step, long steps, float *c)
{
    for (int first = 0; first < rows; first += 8) {
        int count = rows - first < 8 ? rows - first : 8;
        __m512 sums[8];
        for (int r = 0; r < 8; r++) sums[r] = _mm512_setzero_ps();
        for (long k = 0; k < steps; k++)
            for (int j = 0; j < SIDE; j++)
                for (int r = 0; r < count; r++)
                    sums[r] = pair_product(
                        sums[r], a + (first + r) * stride + k * a_step + 2 * j, b + k * b_step + j * DEPTH);
        for (int r = 0; r < count; r++) _mm512_storeu_ps(c + (first + r) * SIDE, sums[r]);
    }
}

/* Of `count` rows from a on: c [count][32]. */
static inline __attribute__((always_inline)) void rows_product(
    const bf16 *a, const int count, const bf16 *b, long steps, int fresh, float *c)
{
    __m512 sums[8][2];
    for (int r = 0; r < count; r++)
        for (int half = 0; half < 2; half++)
            sums[r][half] = fresh ? _mm512_setzero_ps() : _mm512_loadu_ps(c + r * 32 + half * SIDE);
    for (long k = 0; k < steps; k++, b += 2 * TILE)
        for (int j = 0; j < SIDE; j++)
            for (int r = 0; r < count; r++)
                for (int half = 0; half < 2; half++)
                    sums[r][half] = pair_product(
                        sums[r][half], a + k * TILE + r * DEPTH + 2 * j, b + half * TILE + j * DEPTH);
    for (int r = 0; r < count; r++)
        for (int half = 0; half < 2; half++) _mm512_storeu_ps(c + r * 32 + half * SIDE, sums[r][half]);
}

static inline void block_product(const bf16 *a, long apart, int blocks, int rows, const bf16 *b, long steps,
    int fresh, const bf16 *next, long lines, float *c)
{
    (void)next, (void)lines; /* its reads are regular enough for the processor to see */
    for (int block = 0; block < blocks; block++)
        for (int first = 0; first < SIDE && block * SIDE + first < rows;) {
            int left = rows - block * SIDE - first;
            if (left > SIDE - first) left = SIDE - first;
            const bf16 *from = a + block * apart + first * DEPTH;
            float *to = c + (block * SIDE + first) * 32;
            if (left >= 8) rows_product(from, 8, b, steps, fresh, to), first += 8;
            else if (left >= 4) rows_product(from, 4, b, steps, fresh, to), first += 4;
            else if (left >= 2) rows_product(from, 2, b, steps, fresh, to), first += 2;
            else rows_product(from, 1, b, steps, fresh, to), first += 1;
        }
}

#endif
#endif
