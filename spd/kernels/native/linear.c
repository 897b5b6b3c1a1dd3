/* Products with a packed weight, with what stands before and after them in a layer. */

#include "tiles.h"

enum { WIDTH = 2 * SIDE, ROOM = 256, PANEL = 8, AHEAD = 6 };
enum { TO_BF16, TO_FLOAT, SILU, GELU };

/* Lay a weight [width][depth] out as [blocks of 32 columns][steps][2] right-side tiles, filled up with zeros.

   gated: the first half of the rows are gates, and each block has 16 of them and the 16 rows that go with
   them. packed: `parts(gated ? width / 2 : width, gated ? 16 : 32) * parts(depth, 32) * 1024` elements. */
void spd_pack(const bf16 *weight, bf16 *packed, long width, long depth, int gated, int threads)
{
    long steps = parts(depth, DEPTH), half = width / 2;
    long blocks = gated ? parts(half, SIDE) : parts(width, WIDTH);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long block = 0; block < blocks; block++)
        for (long k = 0; k < steps; k++)
            for (int side = 0; side < 2; side++) {
                bf16 *tile = packed + ((block * steps + k) * 2 + side) * TILE;
                memset(tile, 0, TILE * sizeof(bf16));
                for (int column = 0; column < SIDE; column++) {
                    long row = gated ? block * SIDE + column : block * WIDTH + side * SIDE + column;
                    if (row >= (gated ? half : width)) continue;
                    const bf16 *from = weight + (row + (gated && side ? half : 0)) * depth + k * DEPTH;
                    long count = depth - k * DEPTH < DEPTH ? depth - k * DEPTH : DEPTH;
                    for (long d = 0; d < count; d++) tile[d / 2 * DEPTH + column * 2 + d % 2] = from[d];
                }
            }
}

/* One row x [depth] into its place in left-side tiles, normed by `norm` [depth] where that is given. */
static void place_row(const bf16 *x, const float *norm, float epsilon, long depth, bf16 *tiles)
{
    __m512 scale = _mm512_set1_ps(norm ? norm_scale(x, depth, epsilon) : 1.0f);
    for (long i = 0; i < depth; i += DEPTH, tiles += TILE)
        for (int side = 0; side < DEPTH; side += SIDE) {
            __mmask16 mask = depth - i - side > 0 ? lanes(depth - i - side) : 0;
            if (!norm) {
                _mm256_storeu_si256((__m256i *)(tiles + side), _mm256_maskz_loadu_epi16(mask, x + i + side));
                continue;
            }
            __m512 scales = _mm512_maskz_loadu_ps(mask, norm + i + side);
            store(tiles + side, 0xffff, _mm512_mul_ps(_mm512_mul_ps(load(x + i + side, mask), scale), scales));
        }
}

/* The gate of a sum: x * sigmoid(x), or gelu in its form with tanh, which is x * sigmoid(2 inner(x)). */
static inline __m512 gate(__m512 x, int kind)
{
    __m512 inner = x, one = _mm512_set1_ps(1.0f);
    if (kind == GELU) {
        __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
        inner = _mm512_mul_ps(_mm512_fmadd_ps(cube, _mm512_set1_ps(0.044715f), x), _mm512_set1_ps(1.5957691216f));
    }
    return _mm512_div_ps(x, _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), inner))));
}

typedef struct {
    const float *bias;
    const bf16 *residual;
    void *out;
    long width;
    int kind;
} Ending;

/* What becomes of sums [count][32] of a block of columns: rows `first` on of the result. */
static void finish(const Ending *e, const float *sum, long block, long first, long count)
{
    int gated = e->kind >= SILU;
    long columns = gated ? e->width / 2 : e->width;
    for (long r = first; r < first + count; r++, sum += WIDTH) {
        if (gated) {
            long at = block * SIDE;
            __mmask16 mask = lanes(columns - at);
            __m512 g = _mm512_load_ps(sum), up = _mm512_load_ps(sum + SIDE);
            if (e->bias) {
                g = _mm512_add_ps(g, _mm512_maskz_loadu_ps(mask, e->bias + at));
                up = _mm512_add_ps(up, _mm512_maskz_loadu_ps(mask, e->bias + columns + at));
            }
            store((bf16 *)e->out + r * columns + at, mask, _mm512_mul_ps(gate(g, e->kind), up));
            continue;
        }
        for (int side = 0; side < 2; side++) {
            long at = block * WIDTH + side * SIDE, place = r * columns + at;
            if (at >= columns) break;
            __mmask16 mask = lanes(columns - at);
            __m512 y = _mm512_load_ps(sum + side * SIDE);
            if (e->bias) y = _mm512_add_ps(y, _mm512_maskz_loadu_ps(mask, e->bias + at));
            if (e->residual) y = _mm512_add_ps(y, load(e->residual + place, mask));
            if (e->kind == TO_FLOAT) _mm512_mask_storeu_ps((float *)e->out + place, mask, y);
            else store((bf16 *)e->out + place, mask, y);
        }
    }
}

/* x [rows][depth] (normed where `norm` is given) times the packed weight, plus bias [width] and residual
   [rows][width] where they are given, rounded once: out [rows][width], bfloat16 or float32 by `kind`; or with
   a gate [rows][width / 2]. scratch: parts(rows, 16) * parts(depth, 32) * 512 elements.

   Few rows go through a block of columns in one pass. More go through panels of it that stay in the first cache,
   while the next panel is fetched; their sums wait in memory, which rounds nothing. */
void spd_linear(const bf16 *x, const float *norm, float epsilon, const bf16 *weight, const float *bias,
    const bf16 *residual, void *out, long rows, long depth, long width, int kind, bf16 *scratch, int threads)
{
    const Ending ending = {bias, residual, out, width, kind};
    long steps = parts(depth, DEPTH), row_blocks = parts(rows, SIDE), room = ROOM / SIDE;
    long blocks = kind >= SILU ? parts(width / 2, SIDE) : parts(width, WIDTH);
    long panel = rows > 2 * WIDTH ? PANEL : rows > WIDTH ? 4 * PANEL : steps;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (long r = 0; r < rows; r++)
            place_row(x + r * depth, norm, epsilon, depth,
                scratch + (r / SIDE * steps * SIDE + r % SIDE) * DEPTH);
        tiles_begin(rows < SIDE ? (int)rows : SIDE, rows > SIDE && rows < WIDTH ? (int)rows - SIDE : SIDE);
        float sums[ROOM * WIDTH] __attribute__((aligned(64)));
        for (long top = 0; top < row_blocks; top += room) {
            long bottom = row_blocks < top + room ? row_blocks : top + room, passes = parts(bottom - top, 2);
#pragma omp for schedule(static) nowait
            for (long block = 0; block < blocks; block++) {
                for (long k = 0; k < steps; k += panel) {
                    const bf16 *tiles = weight + (block * steps + k) * 2 * TILE;
                    long deep = steps - k < panel ? steps - k : panel;
                    const bf16 *next = tiles + (passes == 1 ? AHEAD : 2 * deep) * TILE;
                    long lines = parts(2 * TILE / DEPTH, passes);
                    for (long m = top; m < bottom; m += 2)
                        block_product(scratch + (m * steps + k) * TILE, steps * TILE, m + 1 < bottom ? 2 : 1,
                            (int)(rows - m * SIDE < WIDTH ? rows - m * SIDE : WIDTH), tiles, deep, k == 0,
                            next + (m - top) / 2 * deep * lines * DEPTH, lines, sums + (m - top) * SIDE * WIDTH);
                }
                long first = top * SIDE, last = rows < bottom * SIDE ? rows : bottom * SIDE;
                finish(&ending, sums, block, first, last - first);
            }
        }
        tiles_end();
    }
}

/* The root-mean-square norm of rows x [rows][depth] with scales norm [depth], plus residual where it is given. */
void spd_norm(const bf16 *x, const float *norm, float epsilon, const bf16 *residual, bf16 *out, long rows, long depth,
    int threads)
{
#pragma omp parallel for schedule(static) num_threads(threads) if (rows > 4)
    for (long r = 0; r < rows; r++) {
        const bf16 *own = x + r * depth;
        __m512 scale = _mm512_set1_ps(norm_scale(own, depth, epsilon));
        for (long i = 0; i < depth; i += SIDE) {
            __mmask16 mask = lanes(depth - i);
            __m512 y = _mm512_mul_ps(load(own + i, mask), scale);
            y = _mm512_mul_ps(y, _mm512_maskz_loadu_ps(mask, norm + i));
            if (residual) y = _mm512_add_ps(y, load(residual + r * depth + i, mask));
            store(out + r * depth + i, mask, y);
        }
    }
}
