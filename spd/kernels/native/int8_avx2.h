/* Products of rounded rows with codes by AVX2, eight columns at a time: their sums and those of a few rows fit the
   registers, totals wait in the first cache. See add_group in int8.c, of which these are the parts. */

/* int8_rows takes any number of rows, up to 16. */
#define ANY_ROWS
enum { OCT = 8 };

/* Rows whose sums fit the registers, with eight columns of one side, or of both sides of INT4. */
static inline int rows_at_once(const int kind) { return kind == INT8 || kind == IQ4 ? 8 : 4; }

/* Sums of products of depths 4 `from` to 4 `to` of rows from `a` on, with eight columns of `sides` sides. */
INLINE void sum_columns(__m256i (*sums)[2], const Step *a, const int count, const uint8_t *codes, const int kind,
    const int side, const int sides, const int from, const int to)
{
    const int at_once = lanes_at_once(kind), is_signed = kind == INT8 || kind == IQ4;
    const __m256i one = _mm256_set1_epi16(1);
#pragma GCC unroll 8
    for (int first = from; first < to; first += at_once) {
        __m256i parts[8][2];
#pragma GCC unroll 8
        for (int z = first; z < (first + at_once < to ? first + at_once : to); z++) {
            __m256i bytes[2];
#pragma GCC unroll 2
            for (int s = 0; s < sides; s++) bytes[s] = bytes_of(codes, kind, z, z % lanes_together(kind), side + s).q[0];
#pragma GCC unroll 8
            for (int r = 0; r < count; r++) {
                const __m256i four = all_four(a[r].numbers + 4 * z);
#pragma GCC unroll 2
                for (int s = 0; s < sides; s++) {
                    __m256i part = z == first ? _mm256_setzero_si256() : parts[r][s];
                    parts[r][s] = eight_dot(part, bytes[s], four, is_signed);
                    __asm__("" : "+x"(parts[r][s])); /* at once: registers do not suffice where the compiler waits */
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < count; r++)
#pragma GCC unroll 2
            for (int s = 0; s < sides; s++) {
                __m256i whole = _mm256_madd_epi16(parts[r][s], one);
                sums[r][s] = first == from ? whole : _mm256_add_epi32(sums[r][s], whole);
            }
    }
}

/* Add a group's products in one step, scaled, to totals [rows][32] of eight columns of `sides` sides. The columns' first
   place among 16 is `column`. */
INLINE void add_columns(float *totals, const Step *a, const int count, const Weight *w, const Span *span, long g,
    const int kind, const uint8_t *codes, const int side, const int sides, long column, const int half, const int halved)
{
    __asm__ volatile("" : : : "memory"); /* registers do not suffice for what was read before */
    __m256i sums[8][2];
    sum_columns(sums, a, count, codes + 4 * column, kind, side, sides, 4 * half, halved ? 4 * half + 4 : 8);
#pragma GCC unroll 2
    for (int s = 0; s < sides; s++) {
        const long place = (side + s) * SIDE + column;
        const __m256 scale = _mm256_load_ps(span->scales[g] + place);
#pragma GCC unroll 8
        for (int r = 0; r < count; r++) {
            float *to = totals + r * WIDTH + place;
            __m256i less = _mm256_set1_epi32(a[r].less[half]);
            if (w->zeros) less = _mm256_mullo_epi32(less, _mm256_load_si256((const __m256i *)(span->zeros[g] + place)));
            __m256 sum = _mm256_cvtepi32_ps(_mm256_add_epi32(sums[r][s], less));
            sum = _mm256_mul_ps(sum, _mm256_mul_ps(scale, _mm256_set1_ps(a[r].scale)));
            sum = _mm256_add_ps(_mm256_load_ps(to), sum);
            if (w->minima) {
                __m256 minimum = _mm256_load_ps(span->minima[g] + place);
                sum = _mm256_sub_ps(sum, _mm256_mul_ps(_mm256_set1_ps(a[r].sum), minimum));
            }
            _mm256_store_ps(to, sum);
        }
    }
}

/* Add the products of `count` rows in a step, of which the group `g` of the span is the first, to their totals. */
INLINE void add_rows(float *totals, const Step *a, const int count, const Weight *w, const Span *span, long g,
    long groups, const int kind, const uint8_t *codes, const int halved)
{
    const int sides = kind == INT4 ? 2 : 1;
    for (long column = 0; column < SIDE; column += OCT) {
        __asm__("" : "+r"(column)); /* not unrolled */
#pragma GCC unroll 2
        for (int side = 0; side < 2; side += sides) {
            add_columns(totals, a, count, w, span, g, kind, codes, side, sides, column, 0, halved);
            if (halved && g + 1 < groups)
                add_columns(totals, a, count, w, span, g + 1, kind, codes, side, sides, column, 1, halved);
        }
    }
}

/* Of up to 16 rows with codes of one block: c [count][32]. */
INLINE void int8_rows(const Step *a, int count, const Weight *w, const int kind, const int halved,
    const uint8_t *codes, long at, float *c)
{
    const long size = step_bytes(kind);
    float totals[SIDE * WIDTH] __attribute__((aligned(64)));
    Span span;
    memset(totals, 0, (size_t)(count * WIDTH) * sizeof(float));
    for (long first = 0, k = 0; first < w->groups; first += SPAN) {
        long groups = w->groups - first < SPAN ? w->groups - first : SPAN;
        long last = parts((first + groups) * w->group, DEPTH), g = 0, depth = 0;
        if (last > w->steps) last = w->steps;
        read_span(w, at + first, first, groups, &span);
        for (; k < last; k++, codes += size, a += SIDE) {
            for (long line = 0; line < size; line += LANES) __builtin_prefetch(codes + line + 4096, 0, 3);
            for (int r = 0, left; (left = count - r) > 0;) {
#define COUNT(n) \
    if (left >= n && is_together(n, rows_at_once(kind), halved)) { \
        add_rows(totals + r * WIDTH, a + r, n, w, &span, g, groups, kind, codes, halved); \
        r += n; \
        continue; \
    }
                COUNT(8) COUNT(4) COUNT(2) COUNT(1)
#undef COUNT
            }
            depth += DEPTH;
            if (depth >= w->group) g += 1 + halved, depth = 0;
        }
    }
    memcpy(c, totals, (size_t)(count * WIDTH) * sizeof(float));
}
