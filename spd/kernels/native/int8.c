/* Products with rounded rows: see int8.h. Bytes are multiplied as each set of instructions does it: see vector.h. */

#include "bytes.h"
#include "int8.h"

/* A block of 32 elements is 0 if none is larger. */
#define SMALLEST 0x1p-100f

/* Groups whose numbers are read at a time. */
enum { SPAN = 32 };

/* A row's elements of a step: of each four the first, third, second and fourth, as codes lie. */
typedef struct {
    int8_t numbers[DEPTH];
    float scale, sum; /* of all elements, scaled */
    int32_t less[2]; /* what integer sums of both halves, or the first of the whole, begin with: see zero_byte */
} Step;

_Static_assert(SIDE * sizeof(Step) <= TILE * sizeof(element), "rows take the room of a left side");

static inline long step_of(long row, long steps) { return row / SIDE * steps * SIDE + row % SIDE; }

static void round_step(vec a, vec b, const Weight *w, Step *step)
{
    vec no = vadd(vsub(a, a), vsub(b, b));
    float most = vtop(vmax(as_vec(masked(as_ints(a), INT32_MAX)), as_vec(masked(as_ints(b), INT32_MAX))));
    int wild = any_nan(no), none = wild || most < SMALLEST;
    vec grown = vall(none ? 0.0f : 127.0f / most);
    vec parts[2] = {vmul(a, grown), vmul(b, grown)};
    float sums[2];
    for (int half = 0; half < 2; half++) {
        if (none) parts[half] = vzero();
        parts[half] = vnearest(parts[half]);
        sums[half] = vsum(parts[half]);
        save_bytes(step->numbers + half * SIDE, nearest_ints(parts[half]));
    }
    for (int z = 0; z < DEPTH / 4; z++) {
        int8_t *four = step->numbers + 4 * z, second = four[1];
        four[1] = four[2], four[2] = second;
    }
    step->scale = wild ? __builtin_nanf("") : none ? 0.0f : most / 127.0f;
    step->sum = (sums[0] + sums[1]) * step->scale;
    int32_t zero = w->zeros ? 1 : zero_byte(w), whole = w->group < DEPTH ? 0 : (int32_t)sums[1];
    step->less[0] = -zero * ((int32_t)sums[0] + whole);
    step->less[1] = -zero * ((int32_t)sums[1] - whole);
}

void place_int8(const element *x, const float *norm, float epsilon, long depth, const Weight *w, void *rows, long row)
{
    vec scale = vall(norm ? norm_scale(x, depth, epsilon) : 1.0f);
    Step *step = (Step *)rows + step_of(row, w->steps);
    for (long at = 0; at < depth; at += DEPTH, step += SIDE) {
        vec parts[2];
        for (int half = 0; half < 2; half++) {
            long first = at + half * SIDE, count = depth - first;
            parts[half] = load(x + first, count);
            if (norm) parts[half] = as_kept(vmul(vmul(parts[half], scale), loadf(norm + first, count)));
        }
        round_step(parts[0], parts[1], w, step);
    }
}

/* Lanes of which partial sums hold the products: see dot. */
INLINE int lanes_at_once(const int kind)
{
    if (EXACT_PARTS) return 8;
    return kind == INT4 ? 8 : kind == INT5 || kind == MX4 ? 4 : kind == INT6 ? 2 : 1;
}

/* Add products of depths 4 `from` to 4 `to` of rows from `a` on, with one side of a block, to their sums. */
INLINE void add_products(ints *sums, const Step *a, const int count, const uint8_t *codes, const int kind,
    const int side, const int from, const int to)
{
    const int at_once = lanes_at_once(kind), is_signed = SIGNED_BYTES && (kind == INT8 || kind == IQ4);
#pragma GCC unroll 8
    for (int first = from; first < to; first += at_once) {
        ints parts[8];
#pragma GCC unroll 8
        for (int r = 0; r < count; r++) parts[r] = begun(sums[r]);
#pragma GCC unroll 8
        for (int z = first; z < (first + at_once < to ? first + at_once : to); z++) {
            ints bytes = bytes_of(codes, kind, z, z % lanes_together(kind), side);
#pragma GCC unroll 8
            for (int r = 0; r < count; r++) parts[r] = dot(parts[r], bytes, a[r].numbers + 4 * z, is_signed);
        }
#pragma GCC unroll 8
        for (int r = 0; r < count; r++) sums[r] = ended(sums[r], parts[r]);
    }
}

/* A few groups' numbers of both sides, in float32 and whole ones: minima or zeros where a weight has them. */
typedef struct {
    float scales[SPAN][WIDTH] __attribute__((aligned(64)));
    float minima[SPAN][WIDTH] __attribute__((aligned(64)));
    int32_t zeros[SPAN][WIDTH] __attribute__((aligned(64)));
} Span;

/* Read `count` groups, of which the first is the block's `first`; at: where that is among all blocks'. */
static __attribute__((noinline)) void read_span(const Weight *w, long at, long first, long count, Span *s)
{
    const vec unit = vall(w->kind == E2M1 ? 0.5f : 1.0f);
    Factors factors = {0};
    for (long g = 0; g < count; g++) {
        if (begins_super(w, first + g)) load_factors(w, at + g, &factors);
        for (int side = 0; side < 2; side++) {
            storef(s->scales[g] + side * SIDE, SIDE, vmul(scales_of(w, &factors, at + g, side), unit));
            if (w->minima) storef(s->minima[g] + side * SIDE, SIDE, minima_of(w, &factors, at + g, side));
            if (!w->zeros) continue;
            vec zeros = of_bytes(w->zeros + (at + g) * WIDTH + side * SIDE);
            storei(s->zeros[g] + side * SIDE, plus(nearest_ints(zeros), zero_byte(w)));
        }
    }
}

/* Whether so many rows are multiplied together, of at most so many. Groups of 16 are rare and take long to compile, so
   there are fewer choices for them. */
INLINE int is_together(const int count, const int most, const int halved)
{
    return count <= most && (!halved || count == 4 || count == 1);
}

#if !SPD_WIDE && !SPD_NEON
#include "int8_avx2.h"
#else
/* Add a group's products in one step, scaled, to totals of one side. g: the group's number in the span. */
INLINE void add_group(vec *totals, const Step *a, const int count, const Weight *w, const Span *span, long g,
    const int kind, const uint8_t *codes, const int side, const int half, const int halved)
{
    __asm__ volatile("" : : : "memory"); /* registers do not suffice for what was read before */
    ints sums[8];
#pragma GCC unroll 8
    for (int r = 0; r < count; r++) sums[r] = alli(a[r].less[half]);
    if (w->zeros) {
        ints zeros = loadi(span->zeros[g] + side * SIDE);
#pragma GCC unroll 8
        for (int r = 0; r < count; r++) sums[r] = times(sums[r], zeros);
    }
    add_products(sums, a, count, codes, kind, side, 4 * half, halved ? 4 * half + 4 : 8);
    vec scale = loadf(span->scales[g] + side * SIDE, SIDE);
#pragma GCC unroll 8
    for (int r = 0; r < count; r++)
        totals[r] = vadd(totals[r], vmul(of_ints(sums[r]), vmul(scale, vall(a[r].scale))));
    if (!w->minima) return;
    vec minimum = loadf(span->minima[g] + side * SIDE, SIDE);
#pragma GCC unroll 8
    for (int r = 0; r < count; r++) totals[r] = vsub(totals[r], vmul(vall(a[r].sum), minimum));
}

/* Of `count` rows with codes of one block: c [count][32]. */
INLINE void int8_rows(const Step *a, const int count, const Weight *w, const int kind, const int halved,
    const uint8_t *codes, long at, float *c)
{
    const long size = step_bytes(kind);
    Span span;
    vec totals[2][8];
#pragma GCC unroll 8
    for (int r = 0; r < count; r++) totals[0][r] = totals[1][r] = vzero();
    for (long first = 0, k = 0; first < w->groups; first += SPAN) {
        long groups = w->groups - first < SPAN ? w->groups - first : SPAN;
        long last = parts((first + groups) * w->group, DEPTH), g = 0, depth = 0;
        if (last > w->steps) last = w->steps;
        read_span(w, at + first, first, groups, &span);
        for (; k < last; k++, codes += size, a += SIDE) {
            for (long line = 0; line < size; line += LANES) __builtin_prefetch(codes + line + 4096, 0, 3);
#pragma GCC unroll 2
            for (int side = 0; side < 2; side++) {
                add_group(totals[side], a, count, w, &span, g, kind, codes, side, 0, halved);
                if (halved && g + 1 < groups)
                    add_group(totals[side], a, count, w, &span, g + 1, kind, codes, side, 1, halved);
            }
            depth += DEPTH;
            if (depth >= w->group) g += 1 + halved, depth = 0;
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < count; r++)
        for (int side = 0; side < 2; side++) storef(c + r * WIDTH + side * SIDE, SIDE, totals[side][r]);
}

#endif

/* INT5 and IQ4 have groups of 32. */
INLINE void rows_of_kind(
    const Step *a, const int count, const Weight *w, const int halved, const uint8_t *codes, long at, float *c)
{
    if (w->kind == INT4) int8_rows(a, count, w, INT4, halved, codes, at, c);
    else if (w->kind == INT5) int8_rows(a, count, w, INT5, 0, codes, at, c);
    else if (w->kind == INT6) int8_rows(a, count, w, INT6, halved, codes, at, c);
    else if (w->kind == INT8) int8_rows(a, count, w, INT8, halved, codes, at, c);
    else if (w->kind == IQ4) int8_rows(a, count, w, IQ4, 0, codes, at, c);
    else int8_rows(a, count, w, MX4, halved, codes, at, c);
}

void int8_product(const void *rows, long top, long count, const Weight *w, const uint8_t *codes, long at, float *c)
{
    for (long r = 0; r < count;) {
        long room = SIDE - (top + r) % SIDE, rest = count - r < room ? count - r : room;
        const Step *a = (const Step *)rows + step_of(top + r, w->steps);
        float *to = c + r * WIDTH;
#ifdef ANY_ROWS
        if (w->group < DEPTH) rows_of_kind(a, (int)rest, w, 1, codes, at, to);
        else rows_of_kind(a, (int)rest, w, 0, codes, at, to);
        r += rest;
#else
#define COUNT(n) \
    if (rest >= n && is_together(n, MOST_INT8_ROWS, w->group < DEPTH)) { \
        if (w->group >= DEPTH) rows_of_kind(a, n, w, 0, codes, at, to); \
        else if (is_together(n, MOST_INT8_ROWS, 1)) rows_of_kind(a, n, w, 1, codes, at, to); \
        r += n; \
        continue; \
    }
        COUNT(8) COUNT(4) COUNT(2) COUNT(1)
#undef COUNT
#endif
    }
}
