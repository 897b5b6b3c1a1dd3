/* What lies between a layer's first product and its second: rotation, the cache write, attention over pages. */

#include "tiles.h"

/* One head x [size], normed by `norm` where that is given, rotated by cos and sin [size], to out. */
static void rotate(
    const element *x, const float *norm, float epsilon, const element *cos, const element *sin, long size, element *out)
{
    long half = size / 2;
    vec scale = vall(norm ? norm_scale(x, size, epsilon) : 1.0f);
    for (long i = 0; i < half; i += SIDE) {
        long left = half - i;
        vec a = load(x + i, left), b = load(x + half + i, left);
        if (norm) {
            a = vmul(vmul(a, scale), loadf(norm + i, left));
            b = vmul(vmul(b, scale), loadf(norm + half + i, left));
        }
        store(out + i, left, vfma(b, load(sin + i, left), vmul(a, load(cos + i, left))));
        vec still = vmul(b, load(cos + half + i, left));
        store(out + half + i, left, vfma(a, load(sin + half + i, left), still));
    }
}

typedef struct {
    const element *query, *cos, *sin;
    const int64_t *positions, *places;
    const float *norm;
    element *keys, *values, *out;
    long rows, heads, kv_heads, size, page;
    float epsilon;
} Rotation;

static void rotate_rows(const void *work, Share *share, int member)
{
    const Rotation *o = work;
    long size = o->size, page = o->page, heads = o->heads, turned = heads + o->kv_heads, every = turned + o->kv_heads;
    for (long r; (r = take(share, member)) >= 0;) {
        const element *own = o->query + r * every * size;
        const element *c = o->cos + o->positions[r] * size, *s = o->sin + o->positions[r] * size;
        long first = (o->places[r] / page * o->kv_heads * page + o->places[r] % page) * size;
        for (long h = 0; h < turned; h++) {
            element *out = h < heads ? o->out + (r * heads + h) * size : o->keys + first + (h - heads) * page * size;
            rotate(own + h * size, o->norm ? o->norm + h * size : 0, o->epsilon, c, s, size, out);
        }
        for (long h = 0; h < o->kv_heads; h++)
            memcpy(o->values + first + h * page * size, own + (turned + h) * size, (size_t)size * sizeof(element));
    }
}

/* See `spd.kernels.rotary_store`; norm float32 [heads + kv_heads][size] or null; query is qkv, out [rows][heads][size].

   A page holds its positions head by head, [kv_heads][page][size]: what attention reads together lies together. */
void spd_rotary_store(const Rotation *o, long threads)
{
    share_out(rotate_rows, o, o->rows, 0.5 * (double)(o->rows * (o->heads + 2 * o->kv_heads) * o->size), threads);
}

typedef struct {
    const element *query, *latent, *cos, *sin;
    const int64_t *positions, *places;
    const float *norm;
    element *pages, *out;
    long rows, heads, rank, turned, query_row, query_head, latent_row;
    float epsilon;
} Latents;

static void latent_rows(const void *work, Share *share, int member)
{
    const Latents *o = work;
    long turned = o->turned, rank = o->rank;
    for (long r; (r = take(share, member)) >= 0;) {
        const element *c = o->cos + o->positions[r] * turned, *s = o->sin + o->positions[r] * turned;
        const element *own = o->latent + r * o->latent_row;
        element *kept = o->pages + o->places[r] * (rank + turned);
        norm_row(own, o->norm, o->epsilon, 0, rank, kept);
        rotate(own + rank, 0, 0, c, s, turned, kept + rank);
        for (long h = 0; h < o->heads; h++) {
            const element *from = o->query + r * o->query_row + h * o->query_head;
            rotate(from, 0, 0, c, s, turned, o->out + (r * o->heads + h) * turned);
        }
    }
}

/* See `spd.kernels.mla_attention`: latent [rows][rank + turned] normed and rotated into pages, query [rows][heads]
   [turned] rotated to out; rows and heads of them lie the given numbers of elements apart. */
void spd_latent_store(const Latents *o, long threads)
{
    long values = o->rank + o->turned + o->heads * o->turned;
    share_out(latent_rows, o, o->rows, 0.5 * (double)(o->rows * values), threads);
}

typedef struct {
    const element *query, *keys, *values;
    const int64_t *table, *positions, *last;
    element *out;
    const float *sinks;
    long slots, width, heads, kv_heads, size, value_size, page, table_width, first_key, sliding;
    float scale, softcap;
} Attention;

/* Rows that share a KV head's keys, at most 16, and what they have seen so far. */
typedef struct {
    Sides sides;
    float scores[SIDE][KEYS] __attribute__((aligned(64)));
    float mixed[SIDE][LARGEST_HEAD] __attribute__((aligned(64)));
    float peak[SIDE], total[SIDE];
    uint8_t wild[KEYS]; /* keys whose values are not finite */
    int32_t last[SIDE], low[SIDE];
} Block;

/* Keys `at` to `end` of one head of a slot's pages: a part of what one block of rows reads. */
typedef struct {
    const int64_t *table;
    long head, at, end;
} Chunk;

static inline const element *place(const Attention *a, const element *pool, const Chunk *c, long key)
{
    return pool + ((c->table[key / a->page] * a->kv_heads + c->head) * a->page + key % a->page) * a->size;
}

/* Ask for 16 keys or values from `key` on, as far as the chunk goes; they lie in one page. */
static inline void fetch(const Attention *a, const element *pool, const Chunk *c, long key)
{
    if (key >= c->end) return;
    const element *from = place(a, pool, c, key);
    for (long i = 0; i < SIDE * a->size; i += LINE) __builtin_prefetch(from + i, 0, 2);
}

/* scores [rows][keys] of one chunk as they come from the product; the next chunk's keys are asked for. */
static void score(const Attention *a, Block *b, const Chunk *c, const Chunk *next, int rows)
{
    for (long k = 0; k < c->end - c->at; k += SIDE) {
        fetch(a, a->keys, next, next->at + k);
        score_keys(&b->sides, place(a, a->keys, c, c->at + k), a->size, rows, b->scores[0] + k, KEYS);
    }
}

/* One row's scores of the keys from `at` to `end`, scaled, capped, masked, to weights e^(score - peak), zeros
   up to whole steps; the peak and the sum go on. Returns what earlier keys count for now. */
static float weigh(const Attention *a, Block *b, int row, long at, long end)
{
    const vec nothing = vall(-__builtin_inff()), scale = vall(a->scale);
    vec scores[KEYS / SIDE], top = nothing, total = vzero();
    long count = parts(end - at, SIDE), whole = parts(end - at, DEPTH) * 2;
    for (long i = 0; i < count; i++) {
        mask seen = between((int32_t)(at + i * SIDE), b->low[row], b->last[row]);
        vec s = vmul(loadf(b->scores[row] + i * SIDE, SIDE), scale);
        if (a->softcap > 0) { /* c tanh(s / c) = c - 2 c / (1 + e^(2 s / c)) */
            vec cap = vall(a->softcap), two = vall(2.0f);
            vec grown = vadd(exponential(vdiv(vmul(s, two), cap)), vall(1.0f));
            s = vsub(cap, vdiv(vmul(cap, two), grown));
        }
        scores[i] = vselect(seen, s, nothing);
        top = vmax(top, scores[i]);
    }
    float before = b->peak[row], peak = vtop(top);
    if (peak < before) peak = before;
    if (peak == -__builtin_inff()) { /* nothing seen yet */
        for (long i = 0; i < whole; i++) place_weights(&b->sides, row, i, vzero());
        return 0;
    }
    for (long i = 0; i < whole; i++) {
        vec w = vzero();
        if (i < count) {
            w = vselect(vdiffers(scores[i], nothing), exponential(vsub(scores[i], vall(peak))), w);
            total = vadd(total, w);
        }
        place_weights(&b->sides, row, i, w);
    }
    float kept = before == -__builtin_inff() ? 0 : vfirst(exponential(vsub(vall(before), vall(peak))));
    b->peak[row] = peak;
    b->total[row] = b->total[row] * kept + vsum(total);
    return kept;
}

/* The values of one chunk into place.

   Values that are not finite count as 0, since rows that do not see them multiply them by 0; returns whether there
   are any, and `wild` says of which keys. */
static int take_values(const Attention *a, Block *b, const Chunk *c)
{
    long count = c->end - c->at;
    int some = 0;
    memset(b->wild, 0, sizeof b->wild);
    for (long first = 0; first < parts(count, DEPTH) * DEPTH; first += SIDE) {
        const element *from = first < count ? place(a, a->values, c, c->at + first) : 0; /* 16 lie in one page */
        for (long i = 0, k = first; i < SIDE; i += 2, k += 2)
            some |= place_values(&b->sides, k, k < count ? from + i * a->size : 0,
                k + 1 < count ? from + (i + 1) * a->size : 0, a->value_size, b->wild + k);
    }
    return some;
}

/* Rows that see a value that is not finite come to NaN. */
static void spoil(const Attention *a, Block *b, const Chunk *c, int rows)
{
    for (int r = 0; r < rows; r++)
        for (long k = c->at; k < c->end; k++)
            if (b->wild[k - c->at] && k >= b->low[r] && k <= b->last[r])
                for (long d = 0; d < a->value_size; d++) b->mixed[r][d] = __builtin_nanf("");
}

/* The unit of work with a number: up to 16 of a slot's [width][heads / kv_heads] rows that read one KV head. */
typedef struct {
    long slot, head, first, begin, end;
    int rows;
} Unit;

/* A row's entry of positions or of last keys, within the cache. */
static inline long within(const Attention *a, const int64_t *entries, const Unit *u, long row)
{
    long at = entries[u->slot * a->width + row / (a->heads / a->kv_heads)], most = a->table_width * a->page - 1;
    return at < most ? at : most;
}

static inline long position(const Attention *a, const Unit *u, long row) { return within(a, a->positions, u, row); }

static inline long last_key(const Attention *a, const Unit *u, long row)
{
    return within(a, a->last ? a->last : a->positions, u, row);
}

static inline long lowest(const Attention *a, long at)
{
    long low = at < a->first_key ? at : a->first_key;
    return a->sliding && low < at - a->sliding + 1 ? at - a->sliding + 1 : low;
}

static Unit unit_of(const Attention *a, long number)
{
    long rows = a->width * (a->heads / a->kv_heads), blocks = parts(rows, SIDE);
    Unit u = {number / (a->kv_heads * blocks), number / blocks % a->kv_heads, number % blocks * SIDE, INT32_MAX, 0, 0};
    u.rows = (int)(rows - u.first < SIDE ? rows - u.first : SIDE);
    for (int r = 0; r < u.rows; r++) {
        long low = lowest(a, position(a, &u, u.first + r)), last = last_key(a, &u, u.first + r);
        if (low < u.begin) u.begin = low;
        if (last >= u.end) u.end = last + 1;
    }
    return u;
}

static Chunk chunk_of(const Attention *a, const Unit *u, long at)
{
    return (Chunk){a->table + u->slot * a->table_width, u->head, at, u->end < at + KEYS ? u->end : at + KEYS};
}

static void attend_unit(const Attention *a, Block *b, const Unit *u, const Unit *after)
{
    long groups = a->heads / a->kv_heads;
    int rows = u->rows;
    clear_queries(&b->sides, a->size);
    for (int r = 0; r < rows; r++) {
        long row = u->slot * a->width + (u->first + r) / groups;
        const element *from = a->query + (row * a->heads + u->head * groups + (u->first + r) % groups) * a->size;
        b->last[r] = (int32_t)last_key(a, u, u->first + r);
        b->low[r] = (int32_t)lowest(a, position(a, u, u->first + r));
        place_query(&b->sides, r, from, a->size);
        memset(b->mixed[r], 0, (size_t)(parts(a->value_size, SIDE) * SIDE) * sizeof(float));
        b->peak[r] = a->sinks ? a->sinks[u->head * groups + (u->first + r) % groups] : -__builtin_inff();
        b->total[r] = a->sinks ? 1 : 0;
    }
    for (long at = u->begin / KEYS * KEYS; at < u->end; at += KEYS) {
        const Chunk c = chunk_of(a, u, at);
        const Chunk next = at + KEYS < u->end ? chunk_of(a, u, at + KEYS) : chunk_of(a, after, after->begin / KEYS * KEYS);
        float kept[SIDE], part[SIDE * DEPTH] __attribute__((aligned(64)));
        score(a, b, &c, &next, rows);
        for (int r = 0; r < rows; r++) kept[r] = weigh(a, b, r, at, c.end);
        int wild = take_values(a, b, &c);
        for (long d = 0, k = 0; d < a->value_size; d += DEPTH) {
            for (; k * a->value_size < KEYS * (d + DEPTH); k += SIDE) fetch(a, a->values, &next, next.at + k);
            int odd = mix_values(&b->sides, d, a->value_size, rows, c.end - at, part);
            if (odd && !wild && (wild = clean_values(&b->sides, a->value_size, c.end - at, b->wild)))
                mix_values(&b->sides, d, a->value_size, rows, c.end - at, part);
            for (int r = 0; r < rows; r++)
                for (long side = 0; side < DEPTH && d + side < a->value_size; side += SIDE) {
                    vec old = vmul(loadf(b->mixed[r] + d + side, SIDE), vall(kept[r]));
                    storef(b->mixed[r] + d + side, SIDE, vadd(old, loadf(part + r * DEPTH + side, SIDE)));
                }
        }
        if (wild) spoil(a, b, &c, rows);
    }
    for (int r = 0; r < rows; r++) {
        long row = u->slot * a->width + (u->first + r) / groups;
        element *out = a->out + (row * a->heads + u->head * groups + (u->first + r) % groups) * a->value_size;
        for (long d = 0; d < a->value_size; d += SIDE)
            store(out + d, a->value_size - d, vdiv(loadf(b->mixed[r] + d, SIDE), vall(b->total[r])));
    }
}

static long units_of(const Attention *a)
{
    return a->slots * a->kv_heads * parts(a->width * (a->heads / a->kv_heads), SIDE);
}

static void attend_units(const void *work, Share *share, int member)
{
    const Attention *a = work;
    long units = units_of(a);
    Block block;
    tiles_begin(SIDE, SIDE);
    for (long number; (number = take(share, member)) >= 0;) {
        const Unit unit = unit_of(a, number), after = unit_of(a, number + 1 < units ? number + 1 : 0);
        attend_unit(a, &block, &unit, &after);
    }
    tiles_end();
}

/* See `spd.kernels.paged_attention`: query [slots][width][heads][size], out the same of value_size,
   pools [..][kv_heads][page][size], table [slots][table_width], positions [slots][width]; last, of the
   same shape: the last key of each row, or null for its own position; sinks float32 [heads] or null. Keys are read in
   chunks that begin at multiples of KEYS positions, summed in ascending order: a row's bits do not depend on the
   others. sliding, softcap: 0 for none. Of a value the first value_size elements count. size <= 576; pages are whole
   sixteens. */
void spd_attend(const Attention *a, long threads)
{
    long units = units_of(a);
    double seen = 0;
    for (long i = a->width - 1; i < a->slots * a->width; i += a->width) seen += (double)(a->positions[i] + 1);
    share_out(attend_units, a, units, seen * 0.3 * (double)a->size * (double)units / (double)a->slots, threads);
}
