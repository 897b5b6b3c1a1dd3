/* What lies between a layer's first product and attention: rotation and the cache write. */

#include "cache_codes.h"
#include "page_layout.h"

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
    void *keys, *values;
    uint16_t *key_scales, *value_scales;
    element *out;
    long rows, heads, kv_heads, size, page;
    float epsilon;
} Rotation;

/* One key and value of a head into their page: `first` elements of a pool lie before that head's, `at` positions. */
static void keep_elements(const Rotation *o, long first, long at, const element *key, const element *value)
{
    long size = o->size, page = o->page;
    element *keys = (element *)o->keys + first, *values = (element *)o->values + first;
    if (in_tiles(size)) {
        place_key(keys + at / DEPTH * DEPTH * size, at % DEPTH, key, size);
        place_value(values, page * DEPTH, at, value, size);
    } else {
        memcpy(keys + at * size, key, (size_t)size * sizeof *keys);
        memcpy(values + at * size, value, (size_t)size * sizeof *values);
    }
}

/* The same in eight bits. */
static void keep_codes(const Rotation *o, long first, long at, const element *key, const element *value)
{
    long size = o->size, page = o->page;
    int8_t *keys = (int8_t *)o->keys + first, *values = (int8_t *)o->values + first;
    int8_t key_codes[LARGEST_HEAD + SIDE], value_codes[LARGEST_HEAD + SIDE];
    uint16_t of_key = row_scale(key, size), of_value = row_scale(value, size);
    guard_scales(&of_key, &of_value);
    round_row(key, size, of_key, key_codes);
    round_row(value, size, of_value, value_codes);
    o->key_scales[first / size + at] = of_key;
    o->value_scales[first / size + at] = of_value;
    if (in_tiles(size)) {
        place_key_codes(keys + at / DEPTH * DEPTH * size, at % DEPTH, key_codes, size);
        place_value_codes(values, page * DEPTH, at, value_codes, size);
    } else {
        memcpy(keys + at * size, key_codes, (size_t)size);
        memcpy(values + at * size, value_codes, (size_t)size);
    }
}

static void rotate_rows(const void *work, Share *share, int member)
{
    const Rotation *o = work;
    long size = o->size, page = o->page, heads = o->heads, turned = heads + o->kv_heads, every = turned + o->kv_heads;
    for (long r; (r = take(share, member)) >= 0;) {
        const element *own = o->query + r * every * size;
        const element *c = o->cos + o->positions[r] * size, *s = o->sin + o->positions[r] * size;
        for (long h = 0; h < turned; h++) {
            element key[LARGEST_HEAD], *out = h < heads ? o->out + (r * heads + h) * size : key;
            rotate(own + h * size, o->norm ? o->norm + h * size : 0, o->epsilon, c, s, size, out);
            if (h < heads) continue;
            long first = (o->places[r] / page * o->kv_heads + h - heads) * page * size, at = o->places[r] % page;
            const element *value = own + (o->kv_heads + h) * size;
            if (o->key_scales) keep_codes(o, first, at, key, value);
            else keep_elements(o, first, at, key, value);
        }
    }
}

/* See `spd.kernels.rotary_store`; norm float32 [heads + kv_heads][size] or null; query is qkv, out [rows][heads][size].

   A page holds its positions head by head, [kv_heads][page][size], each as `in_tiles` says: what attention reads
   together lies together. With scales, [pages][kv_heads][page], keys and values are codes. */
void spd_rotary_store(const Rotation *o, long threads)
{
    share_out(rotate_rows, o, o->rows, 0.5 * (double)(o->rows * (o->heads + 2 * o->kv_heads) * o->size), threads);
}

typedef struct {
    const element *query, *latent, *cos, *sin;
    const int64_t *positions, *places;
    const float *norm;
    void *pages;
    uint16_t *scales;
    element *out;
    long rows, heads, rank, turned, query_row, query_head, latent_row;
    float epsilon;
} Latents;

/* A latent and its rotated key into their place in eight bits. */
static void keep_latent_codes(const Latents *o, long place, const element *entry)
{
    long rank = o->rank, turned = o->turned;
    int8_t codes[LARGEST_HEAD + 2 * SIDE];
    uint16_t *scales = o->scales + 2 * place;
    scales[0] = row_scale(entry, rank), scales[1] = row_scale(entry + rank, turned);
    guard_scales(scales + 1, scales);
    round_row(entry, rank, scales[0], codes);
    round_row(entry + rank, turned, scales[1], codes + rank);
    memcpy((int8_t *)o->pages + place * (rank + turned), codes, (size_t)(rank + turned));
}

static void latent_rows(const void *work, Share *share, int member)
{
    const Latents *o = work;
    long turned = o->turned, rank = o->rank;
    for (long r; (r = take(share, member)) >= 0;) {
        const element *c = o->cos + o->positions[r] * turned, *s = o->sin + o->positions[r] * turned;
        const element *own = o->latent + r * o->latent_row;
        element entry[LARGEST_HEAD];
        element *kept = o->scales ? entry : (element *)o->pages + o->places[r] * (rank + turned);
        norm_row(own, o->norm, o->epsilon, 0, rank, kept);
        rotate(own + rank, 0, 0, c, s, turned, kept + rank);
        if (o->scales) keep_latent_codes(o, o->places[r], entry);
        for (long h = 0; h < o->heads; h++) {
            const element *from = o->query + r * o->query_row + h * o->query_head;
            rotate(from, 0, 0, c, s, turned, o->out + (r * o->heads + h) * turned);
        }
    }
}

/* See `spd.kernels.mla_attention`: latent [rows][rank + turned] normed and rotated into pages, query [rows][heads]
   [turned] rotated to out; with scales [..][page][2] pages are codes; rows and heads of them lie the given numbers of elements apart. */
void spd_latent_store(const Latents *o, long threads)
{
    long values = o->rank + o->turned + o->heads * o->turned;
    share_out(latent_rows, o, o->rows, 0.5 * (double)(o->rows * values), threads);
}
