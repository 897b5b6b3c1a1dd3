/* Mixtures of experts: which experts a row goes through, and what they make of it. See `spd.kernels.experts.moe`. */

#include <math.h>

#include "product.h"

typedef struct {
    const element *x;
    const float *weight;
    float *logits;
    long rows, depth, experts;
} Router;

static void score_experts(const void *work, Share *share, int member)
{
    const Router *o = work;
    for (long i; (i = take(share, member)) >= 0;) {
        const element *row = o->x + i / o->experts * o->depth;
        const float *own = o->weight + i % o->experts * o->depth;
        vec sum = vzero();
        for (long d = 0; d < o->depth; d += SIDE)
            sum = vfma(load(row + d, o->depth - d), loadf(own + d, o->depth - d), sum);
        o->logits[i] = vsum(sum);
    }
}

/* Logits float32 [rows][experts] of x [rows][depth] by weight float32 [experts][depth]. */
void spd_router(const Router *o, long threads)
{
    long items = o->rows * o->experts;
    share_out(score_experts, o, items, 0.2 * (double)(items * o->depth), threads);
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

typedef struct {
    const float *logits, *correction;
    int64_t *ids;
    float *weights;
    char *room;
    long rows, experts, per_token, groups, groups_kept, group_best;
    int sigmoid, normalised;
    float added, scale;
} Choice;

static void choose_experts(const void *work, Share *share, int member)
{
    const Choice *o = work;
    long bytes = (o->experts * 2 + o->groups) * (long)sizeof(float) + o->experts + o->groups;
    long each = o->experts / o->groups;
    bytes = parts(bytes, 64) * 64;
    for (long r; (r = take(share, member)) >= 0;) {
        float *scores = (float *)(o->room + r * bytes), *choice = scores + o->experts, *leaders = choice + o->experts;
        uint8_t *taken = (uint8_t *)(leaders + o->groups), *kept = taken + o->experts;
        const float *own = o->logits + r * o->experts;
        float peak = own[0], total = 0;
        for (long e = 1; e < o->experts; e++)
            if (before(own[e], peak)) peak = own[e];
        for (long e = 0; e < o->experts; e++) {
            scores[e] = o->sigmoid ? 1 / (1 + expf(-own[e])) : expf(own[e] - peak);
            total += scores[e];
        }
        for (long e = 0; e < o->experts; e++) {
            if (!o->sigmoid) scores[e] /= total;
            choice[e] = o->correction ? scores[e] + o->correction[e] : scores[e];
        }
        memset(taken, 0, (size_t)(o->experts + o->groups));
        if (o->groups_kept < o->groups) {
            for (long g = 0; g < o->groups; g++) {
                leaders[g] = 0;
                for (long i = 0; i < o->group_best; i++)
                    leaders[g] += choice[g * each + take_best(choice + g * each, each, taken + g * each)];
            }
            for (long g = 0; g < o->groups_kept; g++) take_best(leaders, o->groups, kept);
            for (long e = 0; e < o->experts; e++)
                if (!kept[e / each]) choice[e] = -INFINITY;
            memset(taken, 0, (size_t)o->experts);
        }
        float sum = 0;
        for (long i = 0; i < o->per_token; i++) {
            long e = take_best(choice, o->experts, taken);
            o->ids[r * o->per_token + i] = e;
            sum += o->weights[r * o->per_token + i] = scores[e];
        }
        for (long i = 0; i < o->per_token; i++) {
            float *weight = o->weights + r * o->per_token + i;
            *weight = (o->normalised ? *weight / (sum + o->added) : *weight) * o->scale;
        }
    }
}

/* Ids int64 and weights float32 [rows][per_token] of the experts of logits [rows][experts]. room: experts * 2 + groups
   floats and experts + groups bytes behind them, of each row. */
void spd_route(const Choice *o, long threads)
{
    share_out(choose_experts, o, o->rows, 20.0 * (double)(o->rows * o->experts), threads);
}

typedef struct {
    const element *x, *residual;
    const int64_t *ids;
    const float *weights, *biases[2];
    Weight packed[2]; /* gate_up and down */
    Activation act;
    int64_t *place, *start, *next, *used;
    element *made, *out;
    float *sums;
    Rows left;
    long rows, depth, inner, opened, experts, per_token; /* opened: columns of gate_up */
    long second; /* 0, then 1 in the product with `down` */
} Experts;

static void place_pairs(const void *work, Share *share, int member)
{
    const Experts *o = work;
    long size = o->second ? o->inner : o->depth, deep = parts(size, DEPTH);
    for (long p; (p = take(share, member)) >= 0;) {
        int64_t e = o->ids[p], at = o->place[p] - o->start[e];
        const element *from = o->second ? o->made + o->place[p] * size : o->x + p / o->per_token * size;
        place_left(&o->packed[o->second], from, 0, 0, size, rows_at(o->left, (o->start[e] / SIDE + e) * deep), at);
    }
}

static void multiply_experts(const void *work, Share *share, int member)
{
    const Experts *o = work;
    long deep = parts(o->second ? o->inner : o->depth, DEPTH);
    long blocks = o->second ? column_blocks(o->depth, TO_FLOAT) : column_blocks(o->opened, o->act.kind);
    tiles_begin(SIDE, SIDE);
    for (long i; (i = take(share, member)) >= 0;) {
        long e = o->used[i / blocks], block = i % blocks, first = o->start[e], count = o->start[e + 1] - first;
        const float *bias = o->biases[o->second];
        if (bias) bias += e * (o->second ? o->depth : o->opened);
        const Ending gated = {bias, 0, o->made + first * o->inner, o->opened, o->inner, o->act};
        const Ending plain = {bias, 0, o->sums + first * o->depth, o->depth, o->depth, {TO_FLOAT, 0, 0}};
        multiply_weight(rows_at(o->left, (first / SIDE + e) * deep), count, &o->packed[o->second], e * blocks + block,
            o->second ? &plain : &gated, block);
    }
    tiles_end();
}

static void add_pairs(const void *work, Share *share, int member)
{
    const Experts *o = work;
    long depth = o->depth;
    for (long r; (r = take(share, member)) >= 0;)
        for (long d = 0; d < depth; d += SIDE) {
            vec sum = vzero();
            for (long i = r * o->per_token; i < (r + 1) * o->per_token; i++)
                sum = vfma(vall(o->weights[i]), loadf(o->sums + o->place[i] * depth + d, depth - d), sum);
            store(o->out + r * depth + d, depth - d, vadd(sum, load(o->residual + r * depth + d, depth - d)));
        }
}

/* residual [rows][depth] + the sum, weighed, of what each row's experts make of x [rows][depth], rounded once: out.

   ids int64, weights float32 [rows][per_token]; packed weights of every expert, one behind the other, gate_up gated if
   the activation is; their biases float32, a row an expert, or null. The room, with pairs = rows * per_token: place
   [pairs], start [experts + 1], next and used [experts]; left
   [(pairs / 16 + experts + 1) * parts(max(depth, inner), 32) * 512]; made [pairs][inner] and sums float32
   [pairs][depth]. Each expert takes its own rows, in order. */
void spd_experts(const Experts *given, long threads)
{
    Experts o = *given;
    if (!o.rows) return;
    long pairs = o.rows * o.per_token, active = 0;
    memset(o.start, 0, (size_t)(o.experts + 1) * sizeof *o.start);
    for (long p = 0; p < pairs; p++) o.start[o.ids[p] + 1]++;
    for (long e = 0; e < o.experts; e++) {
        if (o.start[e + 1]) o.used[active++] = e;
        o.start[e + 1] += o.start[e];
        o.next[e] = o.start[e];
    }
    for (long p = 0; p < pairs; p++) o.place[p] = o.next[o.ids[p]]++;
    for (; o.second < 2; o.second++) {
        long size = o.second ? o.inner : o.depth;
        long blocks = active * (o.second ? column_blocks(o.depth, TO_FLOAT) : column_blocks(o.opened, o.act.kind));
        double tiles = 2.0 * (double)(blocks * parts(size, DEPTH));
        share_out(place_pairs, &o, pairs, 0.2 * (double)(pairs * size), threads);
        share_out(multiply_experts, &o, blocks, tiles * tile_time((pairs + active - 1) / active), threads);
    }
    share_out(add_pairs, &o, o.rows, 0.2 * (double)(pairs * o.depth), threads);
}
