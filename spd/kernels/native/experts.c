/* Mixtures of experts: which experts a row goes through, and what they make of it. See `spd.kernels.moe`. */

#include <math.h>

#include "product.h"

/* Logits float32 [rows][experts] of x [rows][depth] by weight float32 [experts][depth]. */
void spd_router(const bf16 *x, const float *weight, float *logits, long rows, long depth, long experts, int threads)
{
    threads = threads_for(0.2 * (double)(rows * experts * depth), threads);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long i = 0; i < rows * experts; i++) {
        const bf16 *row = x + i / experts * depth;
        const float *own = weight + i % experts * depth;
        __m512 sum = _mm512_setzero_ps();
        for (long d = 0; d < depth; d += SIDE) {
            __mmask16 mask = lanes(depth - d);
            sum = _mm512_fmadd_ps(load(row + d, mask), _mm512_maskz_loadu_ps(mask, own + d), sum);
        }
        logits[i] = _mm512_reduce_add_ps(sum);
    }
}

/* Whether a comes before b in descending order, NaN first. */
static int before(float a, float b) { return isnan(a) ? !isnan(b) : a > b; }

/* The next best of scores [count] that is not taken, the first of equals; it is taken then. */
static long take_best(const float *scores, long count, uint8_t *taken)
{
    long best = -1;
    for (long i = 0; i < count; i++)
        if (!taken[i] && (best < 0 || before(scores[i], scores[best]))) best = i;
    taken[best] = 1;
    return best;
}

/* Ids int64 and weights float32 [rows][per_token] of the experts of logits [rows][experts]. room: experts * 2 + groups
   floats and experts + groups bytes behind them, of each row. */
void spd_route(const float *logits, const float *correction, int64_t *ids, float *weights, char *room, long rows,
    long experts, long per_token, long groups, long groups_kept, long group_best, int sigmoid, int normalised,
    float scale, int threads)
{
    long bytes = (experts * 2 + groups) * (long)sizeof(float) + experts + groups, each = experts / groups;
    bytes = parts(bytes, 64) * 64;
    threads = threads_for(20.0 * (double)(rows * experts), threads);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long r = 0; r < rows; r++) {
        float *scores = (float *)(room + r * bytes), *choice = scores + experts, *leaders = choice + experts;
        uint8_t *taken = (uint8_t *)(leaders + groups), *kept = taken + experts;
        const float *own = logits + r * experts;
        float peak = own[0], total = 0;
        for (long e = 1; e < experts; e++)
            if (before(own[e], peak)) peak = own[e];
        for (long e = 0; e < experts; e++) {
            scores[e] = sigmoid ? 1 / (1 + expf(-own[e])) : expf(own[e] - peak);
            total += scores[e];
        }
        for (long e = 0; e < experts; e++) {
            if (!sigmoid) scores[e] /= total;
            choice[e] = correction ? scores[e] + correction[e] : scores[e];
        }
        memset(taken, 0, (size_t)(experts + groups));
        if (groups_kept < groups) {
            for (long g = 0; g < groups; g++) {
                leaders[g] = 0;
                for (long i = 0; i < group_best; i++)
                    leaders[g] += choice[g * each + take_best(choice + g * each, each, taken + g * each)];
            }
            for (long g = 0; g < groups_kept; g++) take_best(leaders, groups, kept);
            for (long e = 0; e < experts; e++)
                if (!kept[e / each]) choice[e] = -INFINITY;
            memset(taken, 0, (size_t)experts);
        }
        float sum = 0;
        for (long i = 0; i < per_token; i++) {
            long e = take_best(choice, experts, taken);
            ids[r * per_token + i] = e;
            sum += weights[r * per_token + i] = scores[e];
        }
        for (long i = 0; i < per_token; i++) {
            float *weight = weights + r * per_token + i;
            *weight = (normalised ? *weight / (sum + 1e-20f) : *weight) * scale;
        }
    }
}

/* residual [rows][depth] + the sum, weighed, of what each row's experts make of x [rows][depth], rounded once: out.

   ids int64, weights float32 [rows][per_token]; gate_up and down: packed weights of every expert, gated and plain, one
   behind the other. The room: lists [pairs + experts * 3 + 1] int64, pairs = rows * per_token; left
   [(pairs / 16 + experts + 1) * parts(max(depth, inner), 32) * 512]; made bfloat16 [pairs][inner] and sums
   float32 [pairs][depth]. Each expert takes its own rows, in order. */
void spd_experts(const bf16 *x, const int64_t *ids, const float *weights, const bf16 *gate_up, const bf16 *down,
    const bf16 *residual, bf16 *out, long rows, long depth, long inner, long experts, long per_token, int64_t *lists,
    bf16 *left, bf16 *made, float *sums, int threads)
{
    if (!rows) return;
    long pairs = rows * per_token, steps = parts(depth, DEPTH), inner_steps = parts(inner, DEPTH);
    long gates = column_blocks(2 * inner, SILU), columns = column_blocks(depth, TO_FLOAT), active = 0;
    int64_t *place = lists, *start = lists + pairs, *next = start + experts + 1, *used = next + experts;
    memset(start, 0, (size_t)(experts + 1) * sizeof *start);
    for (long p = 0; p < pairs; p++) start[ids[p] + 1]++;
    for (long e = 0; e < experts; e++) {
        if (start[e + 1]) used[active++] = e;
        start[e + 1] += start[e];
        next[e] = start[e];
    }
    for (long p = 0; p < pairs; p++) place[p] = next[ids[p]]++;
    double tiles = 2.0 * (double)(gates * steps + columns * inner_steps);
    threads = threads_for(tiles * (30.0 * (double)active + 0.5 * (double)pairs), threads);
#pragma omp parallel num_threads(threads)
    {
        tiles_begin(SIDE, SIDE);
        for (int second = 0; second < 2; second++) {
            long deep = second ? inner_steps : steps, size = second ? inner : depth, blocks = second ? columns : gates;
            const bf16 *from = second ? made : x, *packed = second ? down : gate_up;
#pragma omp for schedule(static)
            for (long p = 0; p < pairs; p++) {
                int64_t e = ids[p], at = place[p] - start[e];
                bf16 *tiles = left + (start[e] / SIDE + e) * deep * TILE;
                place_row(from + (second ? place[p] : p / per_token) * size, 0, 0, size,
                    tiles + (at / SIDE * deep * SIDE + at % SIDE) * DEPTH);
            }
#pragma omp for schedule(dynamic)
            for (long i = 0; i < active * blocks; i++) {
                long e = used[i / blocks], block = i % blocks, count = start[e + 1] - start[e];
                const Ending gated = {0, 0, made + start[e] * inner, 2 * inner, inner, SILU};
                const Ending plain = {0, 0, sums + start[e] * depth, depth, depth, TO_FLOAT};
                multiply(left + (start[e] / SIDE + e) * deep * TILE, count, packed + (e * blocks + block) * deep * 2 * TILE,
                    deep, second ? &plain : &gated, block);
            }
        }
#pragma omp for schedule(static)
        for (long r = 0; r < rows; r++)
            for (long d = 0; d < depth; d += SIDE) {
                __mmask16 mask = lanes(depth - d);
                __m512 sum = _mm512_setzero_ps();
                for (long i = r * per_token; i < (r + 1) * per_token; i++)
                    sum = _mm512_fmadd_ps(
                        _mm512_set1_ps(weights[i]), _mm512_maskz_loadu_ps(mask, sums + place[i] * depth + d), sum);
                store(out + r * depth + d, mask, _mm512_add_ps(sum, load(residual + r * depth + d, mask)));
            }
        tiles_end();
    }
}
