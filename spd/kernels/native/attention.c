/* Attention over pages. */

#include "attention_sums.h"
#include "cache_codes.h"
#include "page_layout.h"

#include <stddef.h>

#define LOG2E 1.44269504f

typedef struct {
    const element *query, *keys, *values;
    const int64_t *table, *positions, *last;
    element *out;
    const float *sinks;
    char *partial;
    const uint16_t *key_scales, *value_scales;
    long room, slots, width, heads, kv_heads, size, value_size, page, table_width, first_key, sliding;
    float scale, softcap;
} Attention;

/* LONGEST: steps of a head that are summed together. WEIGHED, WIDENED: how long a row of a chunk is weighed, and a step's
   codes are widened, in times of that step's products. */
enum { LONGEST = 8, WEIGHED = 3, WIDENED = SPD_PAIRS ? 3 : 1 };
enum { SMALL_SECTION = 2 * KEYS, SMALL_UNTIL = 4096, LARGE_SECTION = 8 * KEYS };

/* Rows that share a KV head's keys, at most 16; copies of 32 keys and of KEYS values that do not lie in tiles. */
typedef struct {
    Left query[SIDE * (LARGEST_HEAD + DEPTH)] __attribute__((aligned(64)));
    Left weights[SIDE * KEYS] __attribute__((aligned(64)));
    float scores[STEPS][SIDE][DEPTH] __attribute__((aligned(64)));
    float part[BLOCKS][SIDE][DEPTH] __attribute__((aligned(64)));
    float by_value[KEYS] __attribute__((aligned(64))); /* scales of a chunk's values in eight bits */
    element keys[DEPTH * (LARGEST_HEAD + DEPTH)] __attribute__((aligned(64)));
    element values[KEYS * LARGEST_HEAD] __attribute__((aligned(64)));
    Sums *section, own, all;
    Ahead ahead; /* what the next chunk lies in */
    long by_step, by_row; /* bytes of each place that are asked for in a step of a product, and while a row is weighed */
    float kept[SIDE]; /* what earlier sums of a section count for now */
    uint8_t wild[KEYS]; /* keys whose values are not finite */
    int32_t last[SIDE], low[SIDE];
} Block;

/* Keys `at` to `end` of one head of a slot's pages: a part of what one block of rows reads. None if they are equal. */
typedef struct {
    const int64_t *table;
    long head, at, end;
} Chunk;

/* Where a chunk's values lie: each step of 32 keys, `run` of them behind each other, and how far the next block of 32
   elements is. */
typedef struct {
    const element *steps[STEPS];
    long run, apart;
} Values;

static inline long value_blocks(const Attention *a) { return parts(a->value_size, DEPTH); }

/* A latent is a key, and its first elements are the value. */
static inline int is_latent(const Attention *a) { return a->keys == a->values; }
static inline int tiled(const Attention *a) { return in_tiles(a->size) && !is_latent(a); }

/* Whether keys and values are codes. A latent's two parts have a scale each, and begin at whole steps of the product. */
static inline int in_codes(const Attention *a) { return a->key_scales != 0; }
static inline long first_part(const Attention *a) { return in_codes(a) && is_latent(a) ? a->value_size : a->size; }
static inline long first_steps(const Attention *a) { return parts(first_part(a), DEPTH); }
static inline long key_steps(const Attention *a) { return first_steps(a) + parts(a->size - first_part(a), DEPTH); }

static inline long page_of(const Attention *a, const Chunk *c, long key)
{
    return (c->table[key / a->page] * a->kv_heads + c->head) * a->page * a->size;
}

/* Keys `at` to `at + 31` of a chunk as tiles. */
static const element *take_keys(const Attention *a, Block *b, const Chunk *c, long at)
{
    if (tiled(a)) return a->keys + page_of(a, c, at) + at % a->page * a->size;
    for (long k = 0; k < DEPTH && at + k < c->end; k++)
        place_key(b->keys, k, a->keys + page_of(a, c, at + k) + (at + k) % a->page * a->size, a->size);
    return b->keys;
}

static Values tiled_values(const Attention *a, const Chunk *c)
{
    Values v = {.run = a->page < KEYS ? a->page / DEPTH : STEPS, .apart = a->page * DEPTH};
    for (long k = c->at, s = 0; k < c->end; k += DEPTH, s++)
        v.steps[s] = a->values + page_of(a, c, k) + k % a->page * DEPTH;
    return v;
}

static Values copied_values(const Block *b)
{
    Values v = {.run = STEPS, .apart = KEYS * DEPTH};
    for (long s = 0; s < STEPS; s++) v.steps[s] = b->values + s * 2 * TILE;
    return v;
}

static Values take_values(const Attention *a, Block *b, const Chunk *c)
{
    if (tiled(a)) return tiled_values(a, c);
    for (long k = 0; k < parts(c->end - c->at, DEPTH) * DEPTH; k++) {
        static const element nothing[LARGEST_HEAD];
        long key = c->at + k;
        const element *from = a->values + (key < c->end ? page_of(a, c, key) + key % a->page * a->size : 0);
        place_value(b->values, KEYS * DEPTH, k, key < c->end ? from : nothing, a->value_size);
    }
    return copied_values(b);
}

static inline int is_finite(element x)
{
    return sizeof x == sizeof(float) ? x - x == 0 : ((uint32_t)x & 0x7f80) != 0x7f80;
}

/* Copy a chunk's values, with zeros for those that are not finite; `wild` says of which keys. */
static Values clean_values(const Attention *a, Block *b, const Chunk *c, const Values *v)
{
    memset(b->wild, 0, sizeof b->wild);
    for (long block = 0; block < value_blocks(a); block++)
        for (long k = 0; k < parts(c->end - c->at, DEPTH) * DEPTH; k++)
            for (int d = 0; d < DEPTH; d++) {
                long at = block * v->apart + d / SIDE * TILE + tile_place((int)(k % DEPTH), d % SIDE);
                element x = v->steps[k / DEPTH][at];
                if (block * DEPTH + d >= a->value_size) x = 0;
                if (!is_finite(x)) x = 0, b->wild[k] = 1;
                b->values[(block * STEPS + k / DEPTH) * 2 * TILE + at - block * v->apart] = x;
            }
    return copied_values(b);
}

/* Rows that see a value that is not finite come to NaN. */
static void spoil(const Attention *a, Block *b, const Chunk *c, int rows)
{
    for (int r = 0; r < rows; r++)
        for (long k = c->at; k < c->end; k++)
            if (b->wild[k - c->at] && k >= b->low[r] && k <= b->last[r])
                for (long d = 0; d < a->value_size; d++) b->section->mixed[d / DEPTH][r][d % DEPTH] = __builtin_nanf("");
}

/* Note where a chunk lies, for `rows` rows that work on another meanwhile, and how evenly it is asked for: memory should
   never be idle. A place is a page of its keys or values, or a part of one where it has fewer than two of each. */
static void look_ahead(const Attention *a, Block *b, const Chunk *c, int rows)
{
    const void *const pools[] = {a->keys, a->values};
    const uint16_t *const scales[] = {a->key_scales, a->value_scales};
    const long half = KEYS / 2, kinds = is_latent(a) ? 1 : 2, scale_bytes = 2 * (3 - kinds);
    const long spans = c->at < c->end ? c->at + half < c->end ? 2 * kinds : kinds : 0;
    const long keys = (a->page < half ? a->page : half) * spans / PLACES;
    const long bytes = a->size * (in_codes(a) ? 1 : (long)sizeof(element));
    b->ahead = (Ahead){.end = keys * bytes};
    for (long place = 0; place < PLACES && spans; place++) {
        const long span = place * spans / PLACES, key = c->at + span / kinds * half;
        const long entry = page_of(a, c, key) / a->size + key % a->page + place % (PLACES / spans) * keys;
        b->ahead.from[place] = (const char *)pools[span % kinds] + entry * bytes;
        for (long at = 0; in_codes(a) && at < keys * scale_bytes; at += LINE_BYTES)
            __builtin_prefetch((const char *)scales[span % kinds] + entry * scale_bytes + at, 0, 2);
    }
    const long step = (SPD_AMX ? 1 : rows) + (in_codes(a) ? WIDENED : 0);
    const long work = STEPS * (key_steps(a) + value_blocks(a)) * step + WEIGHED * rows;
    b->by_step = parts(b->ahead.end * step, work);
    b->by_row = parts(b->ahead.end * WEIGHED, work);
}

static inline const int8_t *codes_of(const void *pool) { return (const int8_t *)pool; }

/* c [rows][32], or what is added to it but for `fresh`: rows of a left side by `steps` tiles of elements or codes. */
INLINE void multiply(Block *b, const Left *left, long apart, int rows, const void *right, const int coded, long steps,
    int fresh, float *c)
{
    if (coded) cached_product(left, apart, rows, right, steps, fresh, &b->ahead, b->by_step, c);
    else block_product(left, apart, 1, rows, right, steps, fresh, &b->ahead, b->by_step, c);
}

/* scores [rows][32] of 32 keys in tiles by steps `begin` to `end` of `steps`, of more than 256 elements in parts, which
   are added up. coded: keys are codes. */
INLINE void score_keys(Block *b, const void *keys, const int coded, long begin, long end, long steps, int rows, float *scores)
{
    float part[SIDE * DEPTH] __attribute__((aligned(64)));
    for (long s = begin, count; s < end; s += count) {
        const void *right = coded ? (const void *)(codes_of(keys) + s * 2 * TILE) : (const element *)keys + s * 2 * TILE;
        count = end - s < LONGEST ? end - s : LONGEST;
        multiply(b, b->query + s * LEFT_STEP, steps * TILE, rows, right, coded, count, 1, s > begin ? part : scores);
        for (int i = 0; s > begin && i < rows * DEPTH; i += SIDE)
            storef(scores + i, SIDE, vadd(loadf(scores + i, SIDE), loadf(part + i, SIDE)));
    }
}

/* Keys `at` to `at + 31` of a chunk in eight bits that do not lie in tiles, as tiles of elements, without scales. */
static const element *widen_keys(const Attention *a, Block *b, const Chunk *c, long at)
{
    long size = a->size, first = first_part(a);
    const int8_t *codes = codes_of(a->keys) + page_of(a, c, at) + at % a->page * size;
    for (long k = 0; k < DEPTH && at + k < c->end; k++) {
        element key[LARGEST_HEAD];
        widen_row(key, codes + k * size, size);
        place_key(b->keys, k, key, first);
        place_key(b->keys + first_steps(a) * 2 * TILE, k, key + first, size - first);
    }
    return b->keys;
}

/* The scales of 32 keys or values of a chunk from key `at` on: one for each, or the first or second of its two parts. */
static void take_scales(const Attention *a, const uint16_t *scales, const Chunk *c, long at, int part, float *to)
{
    long first = page_of(a, c, at) / a->size + at % a->page;
    for (int i = 0; i < DEPTH; i += SIDE)
        if (!is_latent(a)) storef(to + i, SIDE, of_halves(scales + first + i, SIDE));
        else for (int k = i; k < i + SIDE; k++) to[k] = of_half(scales[2 * (first + k) + part]);
}

/* scores [rows][32] of 32 keys in eight bits: products of codes, times their scales. */
static void score_codes(const Attention *a, Block *b, const Chunk *c, long at, int rows, float *scores)
{
    float by[DEPTH], rest[SIDE * DEPTH] __attribute__((aligned(64)));
    long first = first_steps(a), steps = key_steps(a);
    const element *wide = 0;
    if (tiled(a)) score_keys(b, codes_of(a->keys) + page_of(a, c, at) + at % a->page * a->size, 1, 0, steps, steps, rows, scores);
    else {
        wide = widen_keys(a, b, c, at);
        score_keys(b, wide, 0, 0, first, steps, rows, scores);
    }
    take_scales(a, a->key_scales, c, at, 0, by);
    for (int i = 0; i < rows * DEPTH; i += SIDE)
        storef(scores + i, SIDE, vmul(loadf(scores + i, SIDE), loadf(by + i % DEPTH, SIDE)));
    if (first == steps) return;
    score_keys(b, wide, 0, first, steps, steps, rows, rest);
    take_scales(a, a->key_scales, c, at, 1, by);
    for (int i = 0; i < rows * DEPTH; i += SIDE)
        storef(scores + i, SIDE, vfma(loadf(rest + i, SIDE), loadf(by + i % DEPTH, SIDE), loadf(scores + i, SIDE)));
}

/* scores of a chunk's keys as they come from the product. */
static void score(const Attention *a, Block *b, const Chunk *c, int rows)
{
    for (long at = c->at; at < c->end; at += DEPTH) {
        float *scores = b->scores[(at - c->at) / DEPTH][0];
        if (in_codes(a)) {
            score_codes(a, b, c, at, rows, scores);
            take_scales(a, a->value_scales, c, at, 0, b->by_value + at - c->at);
        } else score_keys(b, take_keys(a, b, c, at), 0, 0, key_steps(a), key_steps(a), rows, scores);
    }
}

/* Whether a row sees every key of a chunk. */
static inline int whole(const Block *b, int row, const Chunk *c)
{
    return c->at >= b->low[row] && c->at + KEYS - 1 <= b->last[row];
}

static inline vec capped(vec score, float scale, float cap) /* c tanh(s / c) = c - 2 c / (1 + e^(2 s / c)) */
{
    vec grown = vadd(exponential(vdiv(vmul(score, vall(2 * scale)), vall(cap))), vall(1.0f));
    return vsub(vall(cap), vdiv(vall(2 * cap), grown));
}

/* One row's scores of `count` sixteens of a chunk's keys, capped and masked; returns the highest. */
static inline float top_score(const Attention *a, Block *b, int row, const Chunk *c, long count)
{
    const vec nothing = vall(-__builtin_inff());
    vec top = nothing;
    if (!(a->softcap > 0) && whole(b, row, c)) {
        for (long i = 0; i < KEYS / SIDE; i++) top = vmax(top, loadf(b->scores[i / 2][row] + i % 2 * SIDE, SIDE));
        return vtop(top);
    }
    for (long i = 0; i < count; i++) {
        float *score = b->scores[i / 2][row] + i % 2 * SIDE;
        vec s = loadf(score, SIDE);
        if (a->softcap > 0) s = capped(s, a->scale, a->softcap);
        s = vselect(between((int32_t)(c->at + i * SIDE), b->low[row], b->last[row]), s, nothing);
        storef(score, SIDE, s);
        top = vmax(top, s);
    }
    return vtop(top);
}

static inline vec by_scale(const Block *b, long sixteen, vec weights, int scaled)
{
    return scaled ? vmul(weights, loadf(b->by_value + sixteen * SIDE, SIDE)) : weights;
}

/* One row's scores to weights 2^(factor score - peak); returns their sum. Weights of values in eight bits are multiplied
   by the values' scales. */
INLINE float row_weights(Block *b, int row, const Chunk *c, long count, float factor, float peak, const int scaled)
{
    const vec nothing = vall(-__builtin_inff()), by = vall(factor), lower = vall(peak == -__builtin_inff() ? 0 : -peak);
    Left *weights = b->weights + left_row(row, STEPS);
    vec total = vzero();
    if (whole(b, row, c) && peak != -__builtin_inff()) {
        for (long i = 0; i < KEYS / SIDE; i++) {
            vec w = power_of_two(vfma(loadf(b->scores[i / 2][row] + i % 2 * SIDE, SIDE), by, lower));
            left_weights(weights + i / 2 * LEFT_STEP + i % 2 * SIDE, by_scale(b, i, w, scaled));
            total = vadd(total, w);
        }
        return vsum(total);
    }
    for (long i = 0; i < count; i++) {
        vec s = loadf(b->scores[i / 2][row] + i % 2 * SIDE, SIDE);
        vec w = vselect(vdiffers(s, nothing), power_of_two(vfma(s, by, lower)), vzero());
        left_weights(weights + i / 2 * LEFT_STEP + i % 2 * SIDE, by_scale(b, i, w, scaled));
        total = vadd(total, w);
    }
    return vsum(total);
}

/* The rows' scores of a chunk's keys to weights; their peaks and sums go on. */
static void weigh(const Attention *a, Block *b, const Chunk *c, int rows)
{
    float top[SIDE] = {0}, sum[SIDE] = {0}, factor = (a->softcap > 0 ? 1 : a->scale) * LOG2E;
    long count = parts(c->end - c->at, DEPTH) * 2;
    Sums *sums = b->section;
    for (int r = 0; r < rows; r++) top[r] = top_score(a, b, r, c, count) * factor;
    vec before = loadf(sums->peak, SIDE), peak = vmax(loadf(top, SIDE), before), kept = share_of(before, peak);
    storef(sums->peak, SIDE, peak);
    for (int r = 0; r < rows; r++) {
        ask(&b->ahead, b->by_row);
        sum[r] = in_codes(a) ? row_weights(b, r, c, count, factor, sums->peak[r], 1)
                             : row_weights(b, r, c, count, factor, sums->peak[r], 0);
    }
    storef(b->kept, SIDE, kept);
    storef(sums->total, SIDE, vadd(vmul(loadf(sums->total, SIDE), kept), loadf(sum, SIDE)));
}

/* The rows' weights of a chunk's keys times their values, to b->part, in the order in which values lie. Returns whether
   all sums are finite. */
static int mix(const Attention *a, Block *b, const Values *v, long steps, int rows)
{
    long blocks = value_blocks(a);
    for (long s = 0; s < steps; s += v->run)
        for (long block = 0; block < blocks; block++)
            multiply(b, b->weights + s * LEFT_STEP, STEPS * TILE, rows, v->steps[s] + block * v->apart, 0,
                steps - s < v->run ? steps - s : v->run, s == 0, b->part[block][0]);
    vec rest = vzero(); /* x - x is 0 where x is finite, else NaN, which stays */
    for (long block = 0; block < blocks; block++)
        for (int i = 0; i < rows * DEPTH; i += SIDE) {
            vec x = loadf(b->part[block][0] + i, SIDE);
            rest = vadd(rest, vsub(x, x));
        }
    return !any_nan(rest);
}

/* The rows' weights of a chunk's keys times its values in eight bits, to b->part. */
static void mix_codes(const Attention *a, Block *b, const Chunk *c, long steps, int rows)
{
    long run = a->page < KEYS ? a->page / DEPTH : STEPS, page = a->page, size = a->size;
    for (long k = 0; !tiled(a) && k < steps * DEPTH; k++) {
        element value[LARGEST_HEAD] = {0};
        long key = c->at + k;
        if (key < c->end) widen_row(value, codes_of(a->values) + page_of(a, c, key) + key % page * size, a->value_size);
        place_value(b->values, KEYS * DEPTH, k, value, a->value_size);
    }
    for (long block = 0; block < value_blocks(a) && !tiled(a); block++)
        multiply(b, b->weights, STEPS * TILE, rows, b->values + block * KEYS * DEPTH, 0, steps, 1, b->part[block][0]);
    for (long s = 0; s < steps && tiled(a); s += run) {
        long at = c->at + s * DEPTH, count = steps - s < run ? steps - s : run;
        const int8_t *codes = codes_of(a->values) + page_of(a, c, at) + at % page * DEPTH;
        for (long block = 0; block < value_blocks(a); block++, codes += page * DEPTH)
            multiply(b, b->weights + s * LEFT_STEP, STEPS * TILE, rows, codes, 1, count, s == 0, b->part[block][0]);
    }
}

/* The values of one chunk into the section's sums.

   Values that are not finite count as 0, since rows that do not see them multiply them by 0. */
static void mix_chunk(const Attention *a, Block *b, const Chunk *c, int rows)
{
    long steps = parts(c->end - c->at, DEPTH);
    int finite = 1;
    if (in_codes(a)) mix_codes(a, b, c, steps, rows); /* numbers of codes are finite */
    else {
        const Values own = take_values(a, b, c);
        finite = mix(a, b, &own, steps, rows);
        if (!finite) {
            const Values clean = clean_values(a, b, c, &own);
            mix(a, b, &clean, steps, rows);
        }
    }
    for (long block = 0; block < value_blocks(a); block++)
        for (int i = 0; i < rows * DEPTH; i += SIDE) {
            float *to = b->section->mixed[block][0] + i;
            storef(to, SIDE, vfma(loadf(to, SIDE), vall(b->kept[i / DEPTH]), loadf(b->part[block][0] + i, SIDE)));
        }
    if (!finite) spoil(a, b, c, rows);
}

/* Positions are cut into sections, and what a row saw in each is summed up by itself. */
static inline long section_of(long at)
{
    return at < SMALL_UNTIL ? at / SMALL_SECTION : (at - SMALL_UNTIL) / LARGE_SECTION + SMALL_UNTIL / SMALL_SECTION;
}

static inline long section_begin(long section)
{
    long large = section - SMALL_UNTIL / SMALL_SECTION;
    return large < 0 ? section * SMALL_SECTION : SMALL_UNTIL + large * LARGE_SECTION;
}

/* Up to 16 of a slot's [width][heads / kv_heads] rows that read one KV head, and the positions that they see. */
typedef struct {
    long number, slot, head, first, begin, end;
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

static inline long blocks_of(const Attention *a) { return parts(a->width * (a->heads / a->kv_heads), SIDE); }
static inline long units_of(const Attention *a) { return a->slots * a->kv_heads * blocks_of(a); }

static Unit unit_of(const Attention *a, long number)
{
    long rows = a->width * (a->heads / a->kv_heads), blocks = blocks_of(a);
    Unit u = {number, number / (a->kv_heads * blocks), number / blocks % a->kv_heads, number % blocks * SIDE, INT32_MAX, 0, 0};
    u.rows = (int)(rows - u.first < SIDE ? rows - u.first : SIDE);
    for (int r = 0; r < u.rows; r++) {
        long low = lowest(a, position(a, &u, u.first + r)), last = last_key(a, &u, u.first + r);
        if (low < u.begin) u.begin = low;
        if (last >= u.end) u.end = last + 1;
    }
    u.begin = u.begin / KEYS * KEYS;
    return u;
}

static Chunk chunk_of(const Attention *a, const Unit *u, long at)
{
    return (Chunk){a->table + u->slot * a->table_width, u->head, at, u->end < at + KEYS ? u->end : at + KEYS};
}

static void take_rows(const Attention *a, Block *b, const Unit *u)
{
    long groups = a->heads / a->kv_heads, steps = key_steps(a), first = first_part(a);
    for (int r = 0; r < u->rows; r++) {
        long row = u->first + r;
        const element *from = a->query + ((u->slot * a->width + row / groups) * a->heads + u->head * groups + row % groups) * a->size;
        Left *to = b->query + left_row(r, steps);
        b->last[r] = (int32_t)last_key(a, u, row), b->low[r] = (int32_t)lowest(a, position(a, u, row));
        for (long d = 0; d < first_steps(a) * DEPTH; d += SIDE)
            left_copy(to + d / DEPTH * LEFT_STEP + d % DEPTH, from + d, first - d);
        to += first_steps(a) * LEFT_STEP;
        for (long d = 0; d < (steps - first_steps(a)) * DEPTH; d += SIDE)
            left_copy(to + d / DEPTH * LEFT_STEP + d % DEPTH, from + first + d, a->size - first - d);
    }
}

/* What a unit's rows see in positions `begin` to `end` of one section. `after` is the chunk that the thread reads
   next. */
static void attend_section(
    const Attention *a, Block *b, const Unit *u, long begin, long end, Sums *sums, const Chunk *after)
{
    b->section = sums;
    clear(sums, value_blocks(a), u->rows);
    for (long at = begin; at < end; at += KEYS) {
        const Chunk c = chunk_of(a, u, at), next = at + KEYS < end ? chunk_of(a, u, at + KEYS) : *after;
        look_ahead(a, b, &next, u->rows);
        score(a, b, &c, u->rows);
        weigh(a, b, &c, u->rows);
        mix_chunk(a, b, &c, u->rows);
        ask(&b->ahead, b->ahead.end);
    }
}

static void begin_sums(const Attention *a, Sums *all, const Unit *u)
{
    long groups = a->heads / a->kv_heads;
    clear(all, value_blocks(a), u->rows);
    for (int r = 0; a->sinks && r < u->rows; r++) {
        all->peak[r] = a->sinks[u->head * groups + (u->first + r) % groups] * LOG2E;
        all->total[r] = 1;
    }
}

static void end_sums(const Attention *a, const Sums *all, const Unit *u)
{
    long groups = a->heads / a->kv_heads;
    for (int r = 0; r < u->rows; r++) {
        long row = u->first + r, head = (u->slot * a->width + row / groups) * a->heads + u->head * groups + row % groups;
        for (long d = 0; d < a->value_size; d += SIDE)
            store(a->out + head * a->value_size + d, a->value_size - d,
                vdiv(loadf(all->mixed[d / DEPTH][r] + d % DEPTH, SIDE), vall(all->total[r])));
    }
}

/* One unit after another, each with all of its sections. */
static void attend_units(const void *work, Share *share, int member)
{
    const Attention *a = work;
    Block b;
    int rows = 0;
    for (long number; (number = take(share, member)) >= 0;) {
        const Unit u = unit_of(a, number), then = unit_of(a, number + 1 < units_of(a) ? number + 1 : 0);
        const Chunk first = chunk_of(a, &then, then.begin);
        if (u.rows != rows) tiles_begin(rows = u.rows, SIDE);
        take_rows(a, &b, &u);
        begin_sums(a, &b.all, &u);
        for (long at = u.begin, end; at < u.end; at = end) {
            end = section_begin(section_of(at) + 1);
            const Chunk next = end < u.end ? chunk_of(a, &u, end) : first;
            attend_section(a, &b, &u, at, end < u.end ? end : u.end, &b.own, &next);
            combine(&b.all, &b.own, value_blocks(a), u.rows);
        }
        end_sums(a, &b.all, &u);
    }
    tiles_end();
}

/* Sections that any row sees, of a window whose units are cut into them: see spd_attend. */
typedef struct {
    const Attention *attention;
    long first, count;
} Sections;

/* One section of a unit: positions `begin` to `end`. */
typedef struct {
    Unit unit;
    long begin, end;
    Sums *sums;
} Part;

static inline long sums_bytes(const Attention *a)
{
    return (long)(offsetof(Sums, mixed) + (size_t)value_blocks(a) * sizeof *((Sums *)0)->mixed);
}

static Part part_of(const Sections *s, const Unit *unit, long section)
{
    const Attention *a = s->attention;
    long begin = section_begin(section), end = section_begin(section + 1);
    Part p = {*unit, begin > unit->begin ? begin : unit->begin, end < unit->end ? end : unit->end, 0};
    p.sums = (Sums *)(a->partial + (unit->number * s->count + section - s->first) * sums_bytes(a));
    return p;
}

/* The part with a number: those of a section's rows that read one head follow each other, and find its keys in caches. */
static Part numbered_part(const Sections *s, long number)
{
    long blocks = blocks_of(s->attention), head = number / blocks / s->count;
    const Unit unit = unit_of(s->attention, head * blocks + number % blocks);
    return part_of(s, &unit, s->first + number / blocks % s->count);
}

static void attend_parts(const void *work, Share *share, int member)
{
    const Sections *s = work;
    const Attention *a = s->attention;
    Block b;
    int rows = 0;
    for (long number; (number = take(share, member)) >= 0;) {
        const Part p = numbered_part(s, number);
        if (p.begin >= p.end) continue;
        const Part then = numbered_part(s, number + 1 < units_of(a) * s->count ? number + 1 : 0);
        Chunk first = chunk_of(a, &then.unit, then.begin);
        if (then.begin >= then.end) first.end = first.at;
        if (p.unit.rows != rows) tiles_begin(rows = p.unit.rows, SIDE);
        take_rows(a, &b, &p.unit);
        attend_section(a, &b, &p.unit, p.begin, p.end, p.sums, &first);
    }
    tiles_end();
}

static void combine_parts(const void *work, Share *share, int member)
{
    const Sections *s = work;
    const Attention *a = s->attention;
    Sums all;
    for (long number; (number = take(share, member)) >= 0;) {
        const Unit u = unit_of(a, number);
        begin_sums(a, &all, &u);
        for (long section = section_of(u.begin); section_begin(section) < u.end; section++)
            combine(&all, part_of(s, &u, section).sums, value_blocks(a), u.rows);
        end_sums(a, &all, &u);
    }
}

/* See `spd.kernels.paged_attention`: query [slots][width][heads][size], out the same of value_size,
   pools as spd_rotary_store writes them, or one of latents [..][page][size] for both, table [slots][table_width],
   positions [slots][width]; last, of the same shape: the last key of each row, or null for its own position; sinks
   float32 [heads] or null. Keys are read in chunks that begin at multiples of KEYS positions, summed in ascending order
   within sections, and these in ascending order: a row's bits do not depend on the others. If the sums of all sections
   fit into `room` bytes at `partial`, threads share the sections, too. sliding, softcap: 0 for none. Of a value the
   first value_size elements count. size <= 576; pages are whole 32s, and divide KEYS. */
void spd_attend(const Attention *a, long threads)
{
    long units = units_of(a), begin = INT32_MAX, end = 0;
    double seen = 0;
    for (long number = 0; number < units; number++) {
        const Unit u = unit_of(a, number);
        if (u.begin < begin) begin = u.begin;
        if (u.end > end) end = u.end;
        seen += (double)(u.end - u.begin);
    }
    const Sections s = {a, section_of(begin), section_of(end - 1) - section_of(begin) + 1};
    double nanoseconds = seen * 0.3 * (double)a->size;
    if (s.count > 1 && units * s.count * sums_bytes(a) <= a->room) {
        share_out(attend_parts, &s, units * s.count, nanoseconds, threads);
        share_out(combine_parts, &s, units, 0.1 * (double)(units * s.count * a->value_size), threads);
    } else share_out(attend_units, a, units, nanoseconds, threads);
}
