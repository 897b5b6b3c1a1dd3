/* Layers that keep a state: short convolutions and the gated delta rule. A row's arithmetic is the same whatever
   rows its pass has, and no sum is split among threads. */

#include "tiles.h"

/* Runs of rows: see `Segments`. */
typedef struct {
    const int64_t *slots, *first, *count, *start, *keep, *applied;
} Runs;

/* table is [5][size]. */
static Runs runs_of(const int64_t *table, const int64_t *applied, long size)
{
    return (Runs){table, table + size, table + 2 * size, table + 3 * size, table + 4 * size, applied};
}

static inline long place(long position, long depth) { return ((position % depth) + depth) % depth; }

static inline vec silu(vec x)
{
    return vdiv(x, vadd(vall(1.0f), exponential(vsub(vzero(), x))));
}

typedef struct {
    Runs runs;
    const element *x;
    const float *weight, *bias;
    element *ring;
    float *out;
    long stride, channels, taps, depth, blocks;
} Convolution;

enum { CHANNELS = 4 * SIDE, MOST_TAPS = 16 };

static void convolve(const void *work, Share *share, int member)
{
    const Convolution *o = work;
    for (long item; (item = take(share, member)) >= 0;) {
        long run = item / o->blocks, from = item % o->blocks * CHANNELS, rows = o->runs.count[run];
        long start = o->runs.start[run], to = from + CHANNELS < o->channels ? from + CHANNELS : o->channels;
        const element *x = o->x + o->runs.first[run] * o->stride;
        element *ring = o->ring + o->runs.slots[run] * o->depth * o->channels;
        for (long c = from; c < to; c += SIDE) {
            long left = to - c;
            vec seen[MOST_TAPS] = {0}; /* the inputs of the latest positions, the last one behind */
            for (long t = rows ? 1 : o->taps; t < o->taps; t++) {
                long position = start - o->taps + t;
                if (position >= 0) seen[t] = load(ring + place(position, o->depth) * o->channels + c, left);
            }
            for (long r = 0; r < rows; r++) {
                vec total = o->bias ? loadf(o->bias + c, left) : vzero();
                for (long t = 1; t < o->taps; t++) seen[t - 1] = seen[t];
                seen[o->taps - 1] = load(x + r * o->stride + c, left);
                for (long t = 0; t < o->taps; t++)
                    total = vfma(seen[t], loadf(o->weight + t * o->channels + c, left), total);
                storef(o->out + (o->runs.first[run] + r) * o->channels + c, left, silu(total));
                if (r >= rows - o->depth)
                    store(ring + place(start + r, o->depth) * o->channels + c, left, seen[o->taps - 1]);
            }
        }
    }
}

/* See `spd.kernels.recurrent.short_conv`; weight is [taps][channels]. */
void spd_short_conv(const element *x, const float *weight, const float *bias, element *ring, float *out,
    const int64_t *table, const int64_t *applied, long size, long stride, long channels, long taps, long depth,
    long rows, int threads)
{
    long blocks = parts(channels, CHANNELS);
    const Convolution o = {.runs = runs_of(table, applied, size), .x = x, .weight = weight, .bias = bias, .ring = ring, .out = out, .stride = stride, .channels = channels,
        .taps = taps, .depth = depth, .blocks = blocks};
    share_out(convolve, &o, size * blocks, threads_for(0.5 * (double)(rows * channels), threads));
}

typedef struct {
    Runs runs;
    const float *mixed, *rate, *bias;
    const element *raw_gates;
    float *state, *keys, *values, *gates, *room, *out;
    long gate_stride, heads, key_heads, width, size, depth;
} Delta;

/* x [width] over its length, times scale, to out. */
static void unit(const float *x, long width, float scale, float *out)
{
    vec squares = vzero();
    for (long i = 0; i < width; i += SIDE) {
        vec v = loadf(x + i, width - i);
        squares = vfma(v, v, squares);
    }
    vec by = vall(scale / __builtin_sqrtf(vsum(squares) + 1e-6f));
    for (long i = 0; i < width; i += SIDE) storef(out + i, width - i, vmul(loadf(x + i, width - i), by));
}

/* One token of one head: the state [width][size] decays and is corrected; out [size], where given, is what the
   query reads of it. Sums over the state's rows are ascending. */
static void step(float *state, const float *key, const float *value, const float *gates, const float *query,
    float *out, long width, long size)
{
    vec decay = vall(gates[0]), correct = vall(gates[1]);
    for (long c = 0; c < size; c += SIDE) {
        long left = size - c;
        vec found = vzero(), read = vzero();
        for (long i = 0; i < width; i++) {
            vec s = vmul(loadf(state + i * size + c, left), decay);
            storef(state + i * size + c, left, s);
            found = vfma(s, vall(key[i]), found);
        }
        vec correction = vmul(vsub(loadf(value + c, left), found), correct);
        for (long i = 0; i < width; i++) {
            vec s = vfma(vall(key[i]), correction, loadf(state + i * size + c, left));
            storef(state + i * size + c, left, s);
            if (out) read = vfma(s, vall(query[i]), read);
        }
        if (out) storef(out + c, left, read);
    }
}

/* The decay and the correction of one row and head. */
static void gates_of(const Delta *o, long row, long head, float *out)
{
    float pair[SIDE] = {0}; /* softplus(x) = log(1 + e^x), and x where that is the same */
    float x = (float)vfirst(load(o->raw_gates + row * o->gate_stride + o->heads + head, 1)) + o->bias[head];
    float correct = vfirst(load(o->raw_gates + row * o->gate_stride + head, 1));
    float softplus = x > 20.0f ? x : __builtin_log1pf(__builtin_expf(x));
    pair[0] = -__builtin_expf(o->rate[head]) * softplus;
    out[0] = vfirst(exponential(loadf(pair, 1)));
    out[1] = 1.0f / (1.0f + __builtin_expf(-correct));
}

static void correct_head(const Delta *o, long run, long head, float *room)
{
    long width = o->width, size = o->size, heads = o->heads, depth = o->depth, key_heads = o->key_heads;
    long group = heads / key_heads, key_head = head / group, slot = o->runs.slots[run];
    long count = o->runs.count[run], start = o->runs.start[run], keep = o->runs.keep[run];
    long applied = o->runs.applied[slot], columns = 2 * key_heads * width + heads * size;
    size_t bytes = (size_t)(width * size) * sizeof(float);
    float *state = room, *query = room + width * size, *key = query + width;
    float *kept = o->state + (slot * heads + head) * width * size;
    if (!count) return;
    if (applied) memcpy(state, kept, bytes);
    else memset(state, 0, bytes);
    for (long position = applied; position < start + count; position++) {
        long at = slot * depth + place(position, depth);
        const float *used = o->keys + (at * key_heads + key_head) * width;
        float *value = o->values + (at * heads + head) * size, *gates = o->gates + (at * heads + head) * 2, *out = 0;
        if (position == keep) memcpy(kept, state, bytes);
        if (position >= start) {
            long row = o->runs.first[run] + position - start;
            const float *own = o->mixed + row * columns;
            out = o->out + (row * heads + head) * size;
            unit(own + key_head * width, width, 1.0f / __builtin_sqrtf((float)width), query);
            unit(own + (key_heads + key_head) * width, width, 1.0f, key);
            memcpy(value, own + 2 * key_heads * width + head * size, (size_t)size * sizeof(float));
            gates_of(o, row, head, gates);
            if (head % group == 0) memcpy((float *)used, key, (size_t)width * sizeof(float));
            used = key;
        }
        step(state, used, value, gates, query, out, width, size);
    }
    if (keep == start + count) memcpy(kept, state, bytes);
}

static void correct_heads(const void *work, Share *share, int member)
{
    const Delta *o = work;
    float *room = o->room + member * (o->width * o->size + 2 * o->width);
    for (long item; (item = take(share, member)) >= 0;) correct_head(o, item / o->heads, item % o->heads, room);
}

/* See `spd.kernels.recurrent.delta_rule`; room is threads * (width * size + 2 * width) floats. */
void spd_delta_rule(const float *mixed, const element *raw_gates, const float *rate, const float *bias, float *state,
    float *keys, float *values, float *gates, float *room, float *out, const int64_t *table, const int64_t *applied,
    long count, long gate_stride, long heads, long key_heads, long width, long size, long depth, long rows,
    int threads)
{
    const Delta o = {.runs = runs_of(table, applied, count), .mixed = mixed, .rate = rate, .bias = bias, .raw_gates = raw_gates, .state = state, .keys = keys,
        .values = values, .gates = gates, .room = room, .out = out, .gate_stride = gate_stride, .heads = heads,
        .key_heads = key_heads, .width = width, .size = size, .depth = depth};
    double work = 0.2 * (double)(rows * heads * width * size);
    share_out(correct_heads, &o, count * heads, threads_for(work, threads));
}

typedef struct {
    const float *x, *weight;
    const element *gate;
    element *out;
    long stride, heads, size;
    float epsilon;
} GatedNorm;

static void norm_rows(const void *work, Share *share, int member)
{
    const GatedNorm *o = work;
    for (long r; (r = take(share, member)) >= 0;)
        for (long h = 0; h < o->heads; h++) {
            const float *x = o->x + (r * o->heads + h) * o->size;
            const element *gate = o->gate + r * o->stride + h * o->size;
            vec squares = vzero();
            for (long i = 0; i < o->size; i += SIDE) {
                vec v = loadf(x + i, o->size - i);
                squares = vfma(v, v, squares);
            }
            vec by = vall(1.0f / __builtin_sqrtf(vsum(squares) / (float)o->size + o->epsilon));
            for (long i = 0; i < o->size; i += SIDE) {
                long left = o->size - i;
                vec normed = vmul(vmul(loadf(x + i, left), by), loadf(o->weight + i, left));
                store(o->out + (r * o->heads + h) * o->size + i, left, vmul(normed, silu(load(gate + i, left))));
            }
        }
}

/* See `spd.kernels.recurrent.delta_rule.gated_norm`. */
void spd_gated_norm(const float *x, const element *gate, const float *weight, float epsilon, element *out, long rows,
    long stride, long heads, long size, int threads)
{
    const GatedNorm o = {x, weight, gate, out, stride, heads, size, epsilon};
    share_out(norm_rows, &o, rows, threads_for(1.0 * (double)(rows * heads * size), threads));
}
