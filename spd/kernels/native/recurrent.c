/* Layers that keep a state: short convolutions and the gated delta rule. A row's arithmetic is the same whatever
   rows its pass has, and no sum is split among threads. */

#include "tiles.h"

/* Runs of rows, and the pass's rows: see `Segments`; table is [5][count]. */
typedef struct {
    const int64_t *table, *applied;
    long count, rows;
} Runs;

typedef struct {
    long slot, first, count, start, keep, applied;
} Run;

static Run run_of(const Runs *r, long number)
{
    const int64_t *of = r->table + number;
    return (Run){of[0], of[r->count], of[2 * r->count], of[3 * r->count], of[4 * r->count], r->applied[of[0]]};
}

static inline long place(long position, long depth) { return ((position % depth) + depth) % depth; }

INLINE vec silu(vec x) { return vdiv(x, vadd(vall(1.0f), exponential(vsub(vzero(), x)))); }

typedef struct {
    Runs runs;
    const element *x;
    const float *weight, *bias;
    element *ring;
    float *out;
    long stride, channels, taps, depth;
    int opens;
} Convolution;

enum { CHANNELS = 4 * SIDE, MOST_TAPS = 16 };

static void convolve(const void *work, Share *share, int member)
{
    const Convolution *o = work;
    long blocks = parts(o->channels, CHANNELS);
    for (long item; (item = take(share, member)) >= 0;) {
        const Run run = run_of(&o->runs, item / blocks);
        long from = item % blocks * CHANNELS, to = from + CHANNELS < o->channels ? from + CHANNELS : o->channels;
        long rows = run.count, start = run.start;
        const element *x = o->x + run.first * o->stride;
        element *ring = o->ring + run.slot * o->depth * o->channels;
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
                storef(o->out + (run.first + r) * o->channels + c, left, o->opens ? silu(total) : total);
                if (r >= rows - o->depth)
                    store(ring + place(start + r, o->depth) * o->channels + c, left, seen[o->taps - 1]);
            }
        }
    }
}

/* See `spd.kernels.recurrent.short_conv`; weight is [taps][channels]. */
void spd_short_conv(const Convolution *o, long threads)
{
    long items = o->runs.count * parts(o->channels, CHANNELS);
    share_out(convolve, o, items, 0.5 * (double)(o->runs.rows * o->channels), threads);
}

typedef struct {
    Runs runs;
    const float *mixed, *rate, *bias;
    const element *raw_gates;
    float *state, *keys, *values, *gates, *room, *out;
    long gate_stride, heads, key_heads, width, size, depth;
    int corrects;
} Delta;

/* x [width], where states are corrected over its length, times scale, to out. */
static void unit(const float *x, long width, int corrects, float scale, float *out)
{
    vec squares = vzero();
    for (long i = 0; i < width; i += SIDE) {
        vec v = loadf(x + i, width - i);
        squares = vfma(v, v, squares);
    }
    vec by = vall(corrects ? scale / __builtin_sqrtf(vsum(squares) + 1e-6f) : 1.0f);
    for (long i = 0; i < width; i += SIDE) storef(out + i, width - i, vmul(loadf(x + i, width - i), by));
}

enum { COLUMNS = 2 * SIDE }; /* of a state that are worked on at a time: [width][COLUMNS] stays in the nearest cache */

/* What one token does to one head: the state decays by gates[0] and is corrected by gates[1]; out, where given, is
   what the query reads of it. */
typedef struct {
    const float *key, *value, *gates, *query;
    float *out;
} Token;

/* Bring COLUMNS of a state to their decayed values and add up what the token's key finds there; the sums over the
   state's rows are ascending. Zeros stand where `from` does not. */
static void open_columns(const float *from, float *state, Token token, vec *found, long width, long size, long left)
{
    vec decay = vall(token.gates[0]);
    for (int part = 0; part < 2; part++) found[part] = vzero();
    for (long i = 0; i < width; i++)
        for (int part = 0; part < 2; part++) {
            long at = part * SIDE;
            vec s = from && left > at ? vmul(loadf(from + i * size + at, left - at), decay) : vzero();
            storef(state + i * COLUMNS + at, SIDE, s);
            found[part] = vfma(s, vall(token.key[i]), found[part]);
        }
}

/* Correct COLUMNS by what was found, read them, and decay them for the next token in the same pass. */
INLINE void pass_columns(
    float *state, Token token, const Token *next, int reads, vec *found, long width, long left)
{
    vec read[2], correction[2], decay = vall(next ? next->gates[0] : 1.0f), correct = vall(token.gates[1]);
    for (int part = 0; part < 2; part++) {
        long at = part * SIDE;
        vec value = left > at ? loadf(token.value + at, left - at) : vzero();
        correction[part] = vmul(vsub(value, found[part]), correct);
        read[part] = found[part] = vzero();
    }
    for (long i = 0; i < width; i++)
        for (int part = 0; part < 2; part++) {
            float *own = state + i * COLUMNS + part * SIDE;
            vec s = vfma(vall(token.key[i]), correction[part], loadf(own, SIDE));
            if (reads) read[part] = vfma(s, vall(token.query[i]), read[part]);
            if (next) {
                s = vmul(s, decay);
                found[part] = vfma(s, vall(next->key[i]), found[part]);
            }
            storef(own, SIDE, s);
        }
    for (int part = 0; part < 2; part++)
        if (reads && left > part * SIDE) storef(token.out + part * SIDE, left - part * SIDE, read[part]);
}

static void close_columns(const float *state, float *to, long width, long size, long left)
{
    for (long i = 0; i < width; i++)
        for (int part = 0; part < 2; part++)
            if (left > part * SIDE)
                storef(to + i * size + part * SIDE, left - part * SIDE, loadf(state + i * COLUMNS + part * SIDE, SIDE));
}

/* The decay and the correction of one row and head. */
static void gates_of(const Delta *o, long row, long head, float *out)
{
    const element *raw = o->raw_gates + row * o->gate_stride + head;
    float x = (float)vfirst(load(raw + (o->corrects ? o->heads : 0), 1)) + o->bias[head];
    float correct = vfirst(load(raw, 1));
    float softplus = x > 20.0f ? x : __builtin_log1pf(__builtin_expf(x)); /* log(1 + e^x) */
    out[0] = vfirst(exponential(vall(-__builtin_expf(o->rate[head]) * softplus)));
    out[1] = o->corrects ? 1.0f / (1.0f + __builtin_expf(-correct)) : softplus;
}

/* One head of one run. */
typedef struct {
    const Delta *o;
    Run run;
    long head, key_head, end;
    float *keys, *queries, *gates; /* of the run's rows */
} Head;

static Token token_of(const Head *h, long position, long column)
{
    const Delta *o = h->o;
    if (position < h->run.start) {
        long at = h->run.slot * o->depth + place(position, o->depth);
        return (Token){.key = o->keys + (at * o->key_heads + h->key_head) * o->width,
            .value = o->values + (at * o->heads + h->head) * o->size + column,
            .gates = o->gates + (at * o->heads + h->head) * 2};
    }
    long r = position - h->run.start, row = h->run.first + r;
    const float *value = o->mixed + row * (2 * o->key_heads * o->width + o->heads * o->size);
    return (Token){.key = h->keys + r * o->width, .query = h->queries + r * o->width, .gates = h->gates + r * 2,
        .value = value + 2 * o->key_heads * o->width + h->head * o->size + column,
        .out = o->out + (row * o->heads + h->head) * o->size + column};
}

/* All tokens from `applied` on, for COLUMNS of the state; what it is at `keep` is kept. */
static void correct_columns(const Head *h, float *kept, float *state, long column)
{
    const Delta *o = h->o;
    long left = o->size - column, keep = h->run.keep, applied = h->run.applied;
    const float *from = applied ? kept + column : 0;
    vec found[2];
    Token token = token_of(h, applied, column);
    open_columns(from, state, token, found, o->width, o->size, left);
    for (long position = applied; position < h->end; position++) {
        int goes_on = position + 1 < h->end && position + 1 != keep, reads = position >= h->run.start;
        Token next = position + 1 < h->end ? token_of(h, position + 1, column) : token;
        if (!o->corrects) found[0] = found[1] = vzero();
        if (reads && goes_on) pass_columns(state, token, &next, 1, found, o->width, left);
        else if (reads) pass_columns(state, token, 0, 1, found, o->width, left);
        else if (goes_on) pass_columns(state, token, &next, 0, found, o->width, left);
        else pass_columns(state, token, 0, 0, found, o->width, left);
        if (position + 1 == keep) {
            close_columns(state, kept + column, o->width, o->size, left);
            if (position + 1 < h->end)
                open_columns(kept + column, state, next, found, o->width, o->size, left);
        }
        token = next;
    }
}

/* Keep what the recurrence consumed of the run's rows, of the last `depth` where they are more. */
static void keep_operands(const Head *h)
{
    const Delta *o = h->o;
    for (long position = h->end - o->depth > h->run.start ? h->end - o->depth : h->run.start; position < h->end; position++) {
        Token used = token_of(h, position, 0);
        long at = h->run.slot * o->depth + place(position, o->depth), own = at * o->heads + h->head;
        memcpy(o->values + own * o->size, used.value, (size_t)o->size * sizeof(float));
        memcpy(o->gates + own * 2, used.gates, 2 * sizeof(float));
        if (h->head % (o->heads / o->key_heads) == 0)
            memcpy(o->keys + (at * o->key_heads + h->key_head) * o->width, used.key, (size_t)o->width * sizeof(float));
    }
}

static void correct_heads(const void *work, Share *share, int member)
{
    const Delta *o = work;
    long width = o->width, columns = 2 * o->key_heads * width + o->heads * o->size;
    float *state = o->room + member * (COLUMNS * width + o->runs.rows * (2 * width + 2)), *keys = state + COLUMNS * width;
    for (long item; (item = take(share, member)) >= 0;) {
        const Run run = run_of(&o->runs, item / o->heads);
        long head = item % o->heads, key_head = head / (o->heads / o->key_heads);
        if (!run.count) continue;
        float *queries = keys + run.count * width, *gates = queries + run.count * width;
        const Head h = {o, run, head, key_head, run.start + run.count, keys, queries, gates};
        for (long r = 0; r < run.count; r++) {
            long row = run.first + r;
            const float *own = o->mixed + row * columns, *key = own + o->key_heads * width;
            unit(own + key_head * width, width, o->corrects, 1.0f / __builtin_sqrtf((float)width), queries + r * width);
            unit(key + key_head * width, width, o->corrects, 1.0f, keys + r * width);
            gates_of(o, row, head, gates + r * 2);
        }
        float *kept = o->state + (run.slot * o->heads + head) * width * o->size;
        for (long column = 0; column < o->size; column += COLUMNS) correct_columns(&h, kept, state, column);
        keep_operands(&h);
    }
}

/* See `spd.kernels.recurrent.delta_rule`; room is threads * (32 * width + rows * (2 * width + 2)) floats. */
void spd_delta_rule(const Delta *o, long threads)
{
    double nanoseconds = 0.2 * (double)(o->runs.rows * o->heads * o->width * o->size);
    share_out(correct_heads, o, o->runs.count * o->heads, nanoseconds, threads);
}

typedef struct {
    const float *x, *weight;
    const element *gate;
    element *out;
    long rows, stride, heads, size, own;
    float epsilon;
    int first;
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
                if (o->first) v = vmul(v, silu(load(gate + i, o->size - i)));
                squares = vfma(v, v, squares);
            }
            vec by = vall(1.0f / __builtin_sqrtf(vsum(squares) / (float)o->size + o->epsilon));
            for (long i = 0; i < o->size; i += SIDE) {
                long left = o->size - i;
                vec normed = vmul(vmul(loadf(x + i, left), by), loadf(o->weight + h * o->own + i, left));
                store(o->out + (r * o->heads + h) * o->size + i, left, vmul(normed, silu(load(gate + i, left))));
            }
        }
}

/* See `spd.kernels.recurrent.delta_rule.gated_norm`. */
void spd_gated_norm(const GatedNorm *o, long threads)
{
    share_out(norm_rows, o, o->rows, (double)(o->rows * o->heads * o->size), threads);
}
