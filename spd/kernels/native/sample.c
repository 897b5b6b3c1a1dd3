/* The token of a row of logits: temperature, top-k, top-p, min-p, keyed noise. See `spd.kernels.sampling`, whose masses
   and random bits these are; only the logarithm in the noise may differ in its last bit. */

#include <math.h>

#include "tiles.h"

/* float32 numbers: 2**f for f in [0, 1], from the highest power down. */
static const float EXP2[] = {0.00021715024195145816f, 0.00124408770352602f, 0.009678063914179802f,
    0.05548415333032608f, 0.2402295172214508f, 0.6931470036506653f, 1.0f};
enum { RADIX = 11, BINS = 1 << RADIX, BLOCK = 4 * SIDE };

typedef struct {
    const float *logits, *temperature, *top_p, *min_p;
    const int64_t *top_k, *seed, *positions;
    const uint32_t *allowed;
    int64_t *tokens;
    uint8_t *finite;
    char *room;
    long slots, width, vocab, usable, stream, allowed_slot, allowed_row;
    int noise, truncation;
} Sampling;

/* An integer in the order of numbers, the two zeros being one. */
static inline uint32_t ordered(float x)
{
    uint32_t bits;
    x += 0.0f;
    memcpy(&bits, &x, sizeof bits);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

/* exp(x - highest) in units of 2**-32, rounded down, each operation by itself. */
static inline int64_t mass_of(float x, float highest)
{
    float power = (x - highest) * 1.4426950216293335f;
    power = power > -40.0f ? power : -40.0f;
    float whole = floorf(power), part = power - whole, value = EXP2[0];
    for (int i = 1; i < 7; i++) value = value * part + EXP2[i];
    return (int64_t)(value * 4294967296.0f) >> (int64_t)-whole;
}

/* In descending order, the lowest id first of equals: the last of the elements before which less than `limit` is
   weighed, as its key and id. Those up to key `least` and, of that key, id `last` take part; each weighs its mass, or 1
   where there are none. limit is above 0, and at most what all weigh. */
static void cut(const uint32_t *keys, const int64_t *masses, long count, int64_t limit, uint32_t *least, long *last)
{
    int64_t sums[BINS];
    uint32_t prefix = 0, lowest = *least;
    long first = *last;
    int64_t before = 0;
    for (int shift = 32 - RADIX, taken = 0; taken < 32; ) {
        int bits = 32 - taken < RADIX ? 32 - taken : RADIX;
        memset(sums, 0, sizeof sums);
        for (long i = 0; i < count; i++) {
            if (keys[i] < lowest || (keys[i] == lowest && i > first)) continue;
            if (taken && keys[i] >> (32 - taken) != prefix) continue;
            sums[keys[i] >> shift & ((1u << bits) - 1)] += masses ? masses[i] : 1;
        }
        long bin = (1L << bits) - 1;
        while (bin > 0 && before + sums[bin] < limit) before += sums[bin--];
        prefix = prefix << bits | (uint32_t)bin;
        taken += bits;
        shift = 32 - taken < RADIX ? 0 : 32 - taken - RADIX;
    }
    for (long i = 0; i < count; i++) {
        if (keys[i] != prefix || (prefix == lowest && i > first)) continue;
        *last = i;
        before += masses ? masses[i] : 1;
        if (before >= limit) break;
    }
    *least = prefix;
}

/* The natural logarithm of positive normal numbers, to about one unit in the last place. Source: the coefficients of
   Cephes' logf. */
INLINE vec logarithm(vec x)
{
    vec one = vall(1.0f), e = vexponent(x), m = vmantissa(x);
    mask high = vmore(m, vall(1.41421356f));
    m = vselect(high, vmul(m, vall(0.5f)), m);
    e = vselect(high, vadd(e, one), e);
    static const float by[] = {7.0376836292e-2f, -1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f,
        1.4249322787e-1f, -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f};
    vec f = vsub(m, one), z = vmul(f, f), p = vall(by[0]);
    for (int i = 1; i < 9; i++) p = vfma(p, f, vall(by[i]));
    p = vmul(vmul(p, f), z);
    p = vfma(e, vall(-2.12194440e-4f), p);
    p = vfnma(z, vall(0.5f), p);
    return vfma(e, vall(0.693359375f), vadd(f, p));
}

/* Standard Gumbel noise of tokens first to first + 63. */
static void gumbel(uint64_t seed, int64_t position, int64_t stream, long first, float *noise)
{
    uint32_t c0[SIDE], c1[SIDE], c2[SIDE], c3[SIDE], k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int i = 0; i < SIDE; i++) {
        c0[i] = (uint32_t)(first / 4 + i);
        c1[i] = (uint32_t)position;
        c2[i] = (uint32_t)stream;
        c3[i] = 0;
    }
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u)
        for (int i = 0; i < SIDE; i++) {
            uint64_t a = (uint64_t)c0[i] * 0xD2511F53u, b = (uint64_t)c2[i] * 0xCD9E8D57u;
            c0[i] = (uint32_t)(b >> 32) ^ c1[i] ^ k0;
            c1[i] = (uint32_t)b;
            c2[i] = (uint32_t)(a >> 32) ^ c3[i] ^ k1;
            c3[i] = (uint32_t)a;
        }
    uint32_t bits[BLOCK];
    for (int i = 0; i < SIDE; i++) {
        bits[4 * i] = c0[i], bits[4 * i + 1] = c1[i];
        bits[4 * i + 2] = c2[i], bits[4 * i + 3] = c3[i];
    }
    for (int i = 0; i < BLOCK; i += SIDE) {
        vec u = vmul(of_unsigned(bits + i), vall(0x1p-32f));
        u = vmin(vmax(u, vall(0x1p-33f)), vall(1.0f - 0x1p-24f));
        vec inner = vsub(vzero(), logarithm(u));
        storef(noise + i, SIDE, vsub(vzero(), logarithm(inner)));
    }
}

/* The first of the largest of x [count], or the first that is not a number. */
static long largest(const float *x, long count)
{
    vec peak = vall(-INFINITY);
    int odd = 0;
    for (long i = 0; i < count; i += SIDE) {
        vec v = vselect(lanes(count - i), loadf(x + i, count - i), peak);
        odd |= any_nan(v);
        peak = vmax(peak, v);
    }
    float best = odd ? 0 : vtop(peak);
    for (long i = 0; i < count; i++)
        if (odd ? isnan(x[i]) : x[i] == best) return i;
    return 0;
}

/* Which of x [count] a draw may take: those down to key `least`, and of that key up to id `last`; where min-p counts
   their mass is asked too. top_p is above 0, min_p at most 1. */
static void kept(const Sampling *o, long slot, const float *x, float highest, uint32_t *keys, int64_t *masses,
    uint32_t *least, long *last)
{
    long count = o->usable, top_k = o->top_k[slot];
    for (long i = 0; i < count; i++) keys[i] = ordered(x[i]);
    if (o->top_p[slot] < 1 || o->min_p[slot] > 0)
        for (long i = 0; i < count; i++) masses[i] = mass_of(x[i], highest);
    if (top_k > 0 && top_k < count) cut(keys, 0, count, top_k, least, last);
    if (o->top_p[slot] < 1) {
        int64_t total = 0;
        for (long i = 0; i < count; i++)
            if (keys[i] > *least || (keys[i] == *least && i <= *last)) total += masses[i];
        cut(keys, masses, count, (int64_t)ceil((double)o->top_p[slot] * (double)total), least, last);
    }
}

/* x [count], and -infinity for the tokens whose bit in `allowed` is not set. */
static void hide(const float *x, const uint32_t *allowed, long count, float *shown)
{
    for (long i = 0; i < count; i += SIDE) {
        mask m = mask_of((uint64_t)(allowed[i / 32] >> (i % 32)));
        storef(shown + i, count - i, vselect(m, loadf(x + i, count - i), vall(-INFINITY)));
    }
}

static void draw_rows(const void *work, Share *share, int member)
{
    const Sampling *o = work;
    long each = parts(o->usable * 16, 64) * 64;
    for (long r; (r = take(share, member)) >= 0;) {
        long s = r / o->width;
        const float *x = o->logits + r * o->vocab;
        int64_t *masses = (int64_t *)(o->room + member * each);
        float *scaled = (float *)(masses + o->usable);
        if (o->allowed) {
            hide(x, o->allowed + s * o->allowed_slot + r % o->width * o->allowed_row, o->usable, scaled);
            x = scaled;
        }
        long best = largest(x, o->usable);
        o->tokens[r] = best;
        o->finite[r] = (uint8_t)(isfinite(x[best]) != 0);
        if (!o->noise || !(o->temperature[s] > 0) || !o->finite[r]) continue;
        float temperature = o->temperature[s], min_p = o->min_p[s];
        uint32_t *keys = (uint32_t *)(scaled + o->usable), least = 0;
        long last = o->usable;
        for (long i = 0; i < o->usable; i++) scaled[i] = x[i] / temperature;
        if (!isfinite(scaled[best])) {
            o->tokens[r] = largest(scaled, o->usable), o->finite[r] = 0;
            continue;
        }
        int cutting = o->truncation && (o->top_k[s] > 0 || o->top_p[s] < 1 || min_p > 0);
        if (cutting) kept(o, s, scaled, scaled[best], keys, masses, &least, &last);
        int64_t limit = min_p > 0 ? (int64_t)ceil((double)min_p * 4294967296.0) : 0;
        float top = -INFINITY, noisy[BLOCK];
        for (long first = 0; first < o->usable; first += BLOCK) {
            long count = o->usable - first < BLOCK ? o->usable - first : BLOCK;
            uint64_t open = ~(uint64_t)0 >> (BLOCK - count);
            for (long i = 0; cutting && i < count; i++) {
                uint32_t key = keys[first + i];
                int in = key > least || (key == least && first + i <= last);
                if (!in || (limit && masses[first + i] < limit)) open &= ~((uint64_t)1 << i);
            }
            if (!open) continue;
            gumbel((uint64_t)o->seed[s], o->positions[r], o->stream, first, noisy);
            vec peak = vall(-INFINITY);
            for (int i = 0; i < BLOCK; i += SIDE) {
                vec sum = vadd(loadf(scaled + first + i, count - i), loadf(noisy + i, SIDE));
                sum = vselect(mask_of(open >> i), sum, vall(-INFINITY));
                storef(noisy + i, SIDE, sum);
                peak = vmax(peak, sum);
            }
            if (vtop(peak) <= top) continue;
            top = vtop(peak);
            o->tokens[r] = first + largest(noisy, count);
        }
    }
}

/* Tokens int64 [rows] of logits float32 [rows][vocab], of which the first `usable` count, and whether each one's logit
   is finite. slots * width rows; temperature, top_p, min_p, top_k, seed [slots]; positions [rows]. allowed: null, or
   bits of the tokens that may be drawn, in words, the first of a row after strides of its slot and its number. room:
   for each thread 16 bytes for each usable token, for keys, masses and scaled logits. */
void spd_sample(const Sampling *o, long threads)
{
    long rows = o->slots * o->width;
    share_out(draw_rows, o, rows, (o->noise ? 4.0 : 0.2) * (double)(rows * o->usable), threads);
}
