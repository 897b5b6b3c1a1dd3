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
    float *state, *keys, *updates, *gates, *room, *out;
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

/* BLOCK: positions between two written states, the lanes of a vec. COLUMNS of a state are worked on at a time: a
   folded one, [width][COLUMNS], stays in the nearest cache. ROWS: rows whose products with a state are summed at once,
   as registers suffice. */
enum { BLOCK = SIDE, COLUMNS = 2 * SIDE, ROWS = SPD_WIDE ? 6 : 1 };

/* What one row reads: the decay of the state at the block's begin, the factor of its correction or value, and the
   factors of the block's updates in what its key finds and its query reads. */
typedef struct {
    float decay, amount, found[BLOCK], read[BLOCK];
} Factors;

/* One head of one run. Queries, keys, decays and factors are those of the run's rows. */
typedef struct {
    const Delta *o;
    Run run;
    long head, key_head, end;
    float *queries, *keys, *decays;
    Factors *factors;
} Head;

/* A block of positions, and where its first one is in this head's rings; the others follow. */
typedef struct {
    long begin;
    float *keys, *updates, *gates; /* the decay and the factor of the key, which is 1 */
} Block;

static Block block_of(const Head *h, long begin)
{
    const Delta *o = h->o;
    long row = h->run.slot * o->depth + place(begin, o->depth);
    return (Block){begin, o->keys + (row * o->key_heads + h->key_head) * o->width,
        o->updates + (row * o->heads + h->head) * o->size, o->gates + (row * o->heads + h->head) * 2};
}

/* The key, the update and the decay of the token at place t. Those of the run's rows are not in the rings yet, but for
   the updates, which no other thread reads. */
static inline const float *key_at(const Head *h, Block b, long t)
{
    long r = b.begin + t - h->run.start;
    return r < 0 ? b.keys + t * h->o->key_heads * h->o->width : h->keys + r * h->o->width;
}

static inline float *update_at(const Head *h, Block b, long t) { return b.updates + t * h->o->heads * h->o->size; }

static inline float decay_at(const Head *h, Block b, long t)
{
    long r = b.begin + t - h->run.start;
    return r < 0 ? b.gates[t * h->o->heads * 2] : h->decays[r];
}

/* The decay and the factor of the correction or value of one row and head. */
static void gates_of(const Delta *o, long row, long head, float *decay, float *amount)
{
    const element *raw = o->raw_gates + row * o->gate_stride + head;
    float x = (float)vfirst(load(raw + (o->corrects ? o->heads : 0), 1)) + o->bias[head];
    float correct = vfirst(load(raw, 1));
    float softplus = x > 20.0f ? x : __builtin_log1pf(__builtin_expf(x)); /* log(1 + e^x) */
    *decay = vfirst(exponential(vall(-__builtin_expf(o->rate[head]) * softplus)));
    *amount = o->corrects ? 1.0f / (1.0f + __builtin_expf(-correct)) : softplus;
}

/* The decay since each token of a block, and since before it, as of one of its tokens after another. */
typedef struct {
    vec since;
    float whole;
} Decays;

static inline Decays undecayed(void) { return (Decays){vzero(), 1.0f}; }

static inline Decays decayed(Decays d, const Head *h, Block b, int32_t t)
{
    float decay = decay_at(h, b, t);
    return (Decays){vselect(between(0, t, t), vall(1.0f), vmul(d.since, vall(decay))), d.whole * decay};
}

static inline float product(const float *x, const float *y, long width)
{
    vec sum = vzero();
    for (long i = 0; i < width; i += SIDE) sum = vfma(loadf(x + i, width - i), loadf(y + i, width - i), sum);
    return vsum(sum);
}

/* The factors of the run's rows in the block at `begin`. */
static void find_factors(const Head *h, long begin)
{
    const Delta *o = h->o;
    const Block b = block_of(h, begin);
    Decays decays = undecayed();
    for (int32_t t = 0; t < BLOCK && begin + t < h->end; t++) {
        decays = decayed(decays, h, b, t);
        long r = begin + t - h->run.start;
        if (r < 0) continue;
        Factors *own = h->factors + r;
        const float *key = h->keys + r * o->width, *query = h->queries + r * o->width;
        for (long other = 0; other <= t; other++) {
            if (o->corrects && other < t) own->found[other] = product(key, key_at(h, b, other), o->width);
            own->read[other] = product(query, key_at(h, b, other), o->width);
        }
        own->decay = decays.whole;
        storef(own->found, SIDE, vmul(loadf(own->found, t), decays.since));
        storef(own->read, SIDE, vmul(loadf(own->read, t + 1), decays.since));
    }
}

/* Where COLUMNS of a state are: rows of a stride; no address stands for zeros. `ahead` leads from each row to one that is
   read later: the processor does not foresee rows of a few columns. */
typedef struct {
    float *at;
    long stride, ahead;
} Columns;

static inline void fetch_ahead(Columns from, long i)
{
    if (!from.ahead) return;
    const float *row = from.at + i * from.stride + from.ahead;
    for (long line = 0; line < COLUMNS; line += 64 / (long)sizeof(float)) __builtin_prefetch(row + line);
}

/* The state at a block's end, of that at its begin; `to` may be where it comes from. */
static void fold_columns(const Head *h, Block b, Columns from, Columns to, long column, long left)
{
    Decays decays = undecayed();
    for (int32_t t = 0; t < BLOCK; t++) decays = decayed(decays, h, b, t);
    float since[BLOCK];
    storef(since, SIDE, decays.since);
    const float *keys[BLOCK];
    for (long t = 0; t < BLOCK; t++) keys[t] = key_at(h, b, t);
    for (long at = 0; at < COLUMNS && at < left; at += SIDE) {
        vec updates[BLOCK], whole = vall(decays.whole);
        for (long t = 0; t < BLOCK; t++)
            updates[t] = vmul(loadf(update_at(h, b, t) + column + at, left - at), vall(since[t]));
        for (long i = 0; i < h->o->width; i++) {
            if (!at) fetch_ahead(from, i);
            vec s = from.at ? vmul(loadf(from.at + i * from.stride + at, left - at), whole) : vzero();
            for (long t = 0; t < BLOCK; t++) s = vfma(vall(keys[t][i]), updates[t], s);
            storef(to.at + i * to.stride + at, left - at, s);
        }
    }
}

/* The products of COLUMNS of a state with keys and queries of `count` rows from row r on, to found and read
   [count][COLUMNS]. Sums over the state's rows are ascending. Where states are not corrected nothing is found. */
INLINE void multiply_rows(
    const Head *h, long r, const int count, const int corrects, Columns from, long left, float *found, float *read)
{
    long width = h->o->width;
    const float *keys = h->keys + r * width, *queries = h->queries + r * width;
    vec key_sums[ROWS][2], query_sums[ROWS][2];
    for (int n = 0; n < count; n++)
        for (int part = 0; part < 2; part++) key_sums[n][part] = query_sums[n][part] = vzero();
    for (long i = 0; i < width; i++) {
        vec s[2];
        fetch_ahead(from, i);
        for (int part = 0; part < 2; part++)
            s[part] = loadf(from.at + i * from.stride + part * SIDE, left - part * SIDE);
        for (int n = 0; n < count; n++)
            for (int part = 0; part < 2; part++) {
                if (corrects) key_sums[n][part] = vfma(s[part], vall(keys[n * width + i]), key_sums[n][part]);
                query_sums[n][part] = vfma(s[part], vall(queries[n * width + i]), query_sums[n][part]);
            }
    }
    for (int n = 0; n < count; n++)
        for (int part = 0; part < 2; part++) {
            storef(found + n * COLUMNS + part * SIDE, SIDE, key_sums[n][part]);
            storef(read + n * COLUMNS + part * SIDE, SIDE, query_sums[n][part]);
        }
}

/* The same for up to ROWS rows, by a program for each number. */
INLINE void multiply_some(
    const Head *h, long r, long count, const int corrects, Columns from, long left, float *found, float *read)
{
    switch (count) {
    case 1: multiply_rows(h, r, 1, corrects, from, left, found, read); break;
#if SPD_WIDE
    case 2: multiply_rows(h, r, 2, corrects, from, left, found, read); break;
    case 3: multiply_rows(h, r, 3, corrects, from, left, found, read); break;
    case 4: multiply_rows(h, r, 4, corrects, from, left, found, read); break;
    case 5: multiply_rows(h, r, 5, corrects, from, left, found, read); break;
    default: multiply_rows(h, r, ROWS, corrects, from, left, found, read);
#endif
    }
}

/* Columns of the update of the run's row at place t, and of what its query reads; found and read are the products with
   the state at the block's begin, or nothing. */
static void run_row(const Head *h, Block b, long t, const float *found, const float *read, long column, long left)
{
    const Delta *o = h->o;
    long r = b.begin + t - h->run.start, row = h->run.first + r;
    const Factors *by = h->factors + r;
    const float *value = o->mixed + row * (2 * o->key_heads * o->width + o->heads * o->size);
    value += 2 * o->key_heads * o->width + h->head * o->size + column;
    float *out = o->out + (row * o->heads + h->head) * o->size + column;
    for (long at = 0; at < COLUMNS && at < left; at += SIDE) {
        vec added = loadf(value + at, left - at), sum = vzero(), decay = vall(by->decay);
        if (o->corrects) {
            if (found) sum = vmul(loadf(found + at, SIDE), decay);
            for (long other = 0; other < t; other++)
                sum = vfma(loadf(update_at(h, b, other) + column + at, left - at), vall(by->found[other]), sum);
            added = vsub(added, sum);
        }
        storef(update_at(h, b, t) + column + at, left - at, vmul(added, vall(by->amount)));
        sum = read ? vmul(loadf(read + at, SIDE), decay) : vzero();
        for (long other = 0; other <= t; other++)
            sum = vfma(loadf(update_at(h, b, other) + column + at, left - at), vall(by->read[other]), sum);
        storef(out + at, left - at, sum);
    }
}

/* All rows, for COLUMNS of the state, block by block. The state as of `keep` is written to `kept`; those after it stay
   in `folded`. */
static void run_columns(const Head *h, float *kept, float *folded, long column)
{
    const Delta *o = h->o;
    long left = o->size - column, start = h->run.start, keep = h->run.keep;
    float found[BLOCK * COLUMNS], read[BLOCK * COLUMNS];
    long ahead = column + COLUMNS < o->size ? COLUMNS : o->width * o->size - column; /* to the next head */
    Columns written = {kept + column, o->size, 0}, from = {0, 0, 0};
    if (h->run.applied) from = (Columns){kept + column, o->size, ahead};
    for (long begin = h->run.applied; begin < h->end; begin += BLOCK) {
        const Block b = block_of(h, begin);
        long border = begin + BLOCK, first = begin > start ? begin : start, last = border < h->end ? border : h->end;
        for (long some, r = first; from.at && r < last; r += some) {
            some = last - r < ROWS ? last - r : ROWS;
            float *own_found = found + (r - first) * COLUMNS, *own_read = read + (r - first) * COLUMNS;
            if (o->corrects) multiply_some(h, r - start, some, 1, from, left, own_found, own_read);
            else multiply_some(h, r - start, some, 0, from, left, own_found, own_read);
        }
        for (long position = first; position < last; position++) {
            long at = (position - first) * COLUMNS;
            run_row(h, b, position - begin, from.at ? found + at : 0, from.at ? read + at : 0, column, left);
        }
        if (border < h->end || border == keep) {
            Columns to = border <= keep ? written : (Columns){folded, COLUMNS, 0};
            fold_columns(h, b, from, to, column, left);
            from = to;
        }
    }
}

/* True if a run's last rows may take the places of keys that it reads. */
static inline int overtakes(const Delta *o, Run run) { return run.start + run.count - run.applied > o->depth; }

/* Write a head's decays and its key head's keys of the rows from `keep` on to the rings. */
static void keep_operands(const Head *h)
{
    const Delta *o = h->o;
    int keeps_keys = h->head % (o->heads / o->key_heads) == 0 && !overtakes(o, h->run);
    for (long p = h->run.keep > h->run.start ? h->run.keep : h->run.start; p < h->end; p++) {
        const float *key = h->keys + (p - h->run.start) * o->width;
        const Block b = block_of(h, p);
        b.gates[0] = h->decays[p - h->run.start];
        b.gates[1] = 1.0f;
        if (keeps_keys) memcpy(b.keys, key, (size_t)o->width * sizeof(float));
    }
}

/* The queries of a row, or its keys, each over its length. */
static inline void unit_of(const Delta *o, long row, long key_head, int is_key, float *out)
{
    const float *own = o->mixed + row * (2 * o->key_heads * o->width + o->heads * o->size);
    float scale = is_key ? 1.0f : 1.0f / __builtin_sqrtf((float)o->width);
    unit(own + (is_key * o->key_heads + key_head) * o->width, o->width, o->corrects, scale, out);
}

/* Floats of a row in a thread's room. */
static inline long row_room(const Delta *o) { return 2 * o->width + 1 + (long)(sizeof(Factors) / sizeof(float)); }

static void run_heads(const void *work, Share *share, int member)
{
    const Delta *o = work;
    float *folded = o->room + member * (COLUMNS * o->width + o->runs.rows * row_room(o));
    for (long item; (item = take(share, member)) >= 0;) {
        const Run run = run_of(&o->runs, item / o->heads);
        long head = item % o->heads, key_head = head / (o->heads / o->key_heads);
        if (!run.count) continue;
        float *queries = folded + COLUMNS * o->width, *keys = queries + run.count * o->width;
        float *decays = keys + run.count * o->width;
        Factors *factors = (Factors *)(decays + run.count);
        const Head h = {o, run, head, key_head, run.start + run.count, queries, keys, decays, factors};
        for (long r = 0; r < run.count; r++) {
            unit_of(o, run.first + r, key_head, 0, queries + r * o->width);
            unit_of(o, run.first + r, key_head, 1, keys + r * o->width);
            gates_of(o, run.first + r, head, decays + r, &factors[r].amount);
        }
        for (long begin = run.start / BLOCK * BLOCK; begin < h.end; begin += BLOCK) find_factors(&h, begin);
        float *kept = o->state + (run.slot * o->heads + head) * o->width * o->size;
        for (long column = 0; column < o->size; column += COLUMNS) run_columns(&h, kept, folded, column);
        keep_operands(&h);
    }
}

/* See `spd.kernels.recurrent.delta_rule`; room is threads * (32 * width + rows * (2 * width + 35)) floats. */
void spd_delta_rule(const Delta *o, long threads)
{
    double nanoseconds = 0.2 * (double)(o->runs.rows * o->heads * o->width * o->size);
    share_out(run_heads, o, o->runs.count * o->heads, nanoseconds, threads);
    for (long n = 0; n < o->runs.count; n++) {
        const Run run = run_of(&o->runs, n);
        if (!overtakes(o, run)) continue;
        for (long r = run.keep > run.start ? run.keep - run.start : 0; r < run.count; r++)
            for (long k = 0; k < o->key_heads; k++) {
                long at = run.slot * o->depth + place(run.start + r, o->depth);
                unit_of(o, run.first + r, k, 1, o->keys + (at * o->key_heads + k) * o->width);
            }
    }
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
