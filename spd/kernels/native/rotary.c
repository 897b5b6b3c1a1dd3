/* What lies between a layer's first product and attention: rotation and the cache write. */

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
        for (long h = 0; h < turned; h++) {
            element key[LARGEST_HEAD], *out = h < heads ? o->out + (r * heads + h) * size : key;
            rotate(own + h * size, o->norm ? o->norm + h * size : 0, o->epsilon, c, s, size, out);
            if (h < heads) continue;
            long first = (o->places[r] / page * o->kv_heads + h - heads) * page * size, at = o->places[r] % page;
            const element *value = own + (o->kv_heads + h) * size;
            if (in_tiles(size)) {
                place_key(o->keys + first + at / DEPTH * DEPTH * size, at % DEPTH, key, size);
                place_value(o->values + first, page * DEPTH, at, value, size);
            } else {
                memcpy(o->keys + first + at * size, key, (size_t)size * sizeof(element));
                memcpy(o->values + first + at * size, value, (size_t)size * sizeof(element));
            }
        }
    }
}

/* See `spd.kernels.rotary_store`; norm float32 [heads + kv_heads][size] or null; query is qkv, out [rows][heads][size].

   A page holds its positions head by head, [kv_heads][page][size], each as `in_tiles` says: what attention reads
   together lies together. */
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
