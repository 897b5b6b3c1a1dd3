/* Sixteen float32 lanes as four registers of NEON, on 64-bit ARM. */

typedef struct {
    float32x4_t q[4];
} vec;
typedef struct {
    uint32x4_t q[4];
} ints;
typedef ints mask;
typedef struct {
    uint16x4_t q[4];
} half_vec;

#define OF_TWO(name, op) EACH(vec, name, four_##op(x.q[i], y.q[i]), vec x, vec y)
#define OF_THREE(name, op) EACH(vec, name, four_##op(x.q[i], y.q[i], z.q[i]), vec x, vec y, vec z)

/* Of the larger and the smaller the second one where either is NaN, as on other processors. */
#define four_add_ps vaddq_f32
#define four_sub_ps vsubq_f32
#define four_mul_ps vmulq_f32
#define four_div_ps vdivq_f32
#define four_min_ps(x, y) vbslq_f32(vcltq_f32(x, y), x, y)
#define four_max_ps(x, y) vbslq_f32(vcgtq_f32(x, y), x, y)
#define four_fmadd_ps(x, y, z) vfmaq_f32(z, x, y)
#define four_fnmadd_ps(x, y, z) vfmsq_f32(z, x, y)

static const int32_t ORDER[4] = {0, 1, 2, 3};
static inline uint32x4_t four_between(int32_t first, int32_t low, int32_t last)
{
    int32x4_t own = vaddq_s32(vld1q_s32(ORDER), vdupq_n_s32(first));
    return vandq_u32(vcgeq_s32(own, vdupq_n_s32(low)), vcleq_s32(own, vdupq_n_s32(last)));
}
EACH(mask, between, four_between(first + 4 * i, low, last), int32_t first, int32_t low, int32_t last)
static inline uint32x4_t four_bits(uint32_t bits)
{
    return vtstq_u32(vdupq_n_u32(bits), vreinterpretq_u32_s32(vshlq_s32(vdupq_n_s32(1), vld1q_s32(ORDER))));
}
EACH(mask, mask_of, four_bits((uint32_t)(bits >> 4 * i)), uint64_t bits)

EACH(vec, vall, vdupq_n_f32(x), float x)
EACH(vec, load_all, vld1q_f32(p + 4 * i), const float *p)
EACH(half_vec, load_halves, vld1_u16(p + 4 * i), const bf16 *p)
EACH_TO(store_all, vst1q_f32(p + 4 * i, x.q[i]), float *p, vec x)
EACH_TO(save_halves, vst1_u16(p + 4 * i, x.q[i]), bf16 *p, half_vec x)
EACH(vec, widened, vreinterpretq_f32_u32(vshll_n_u16(x.q[i], 16)), half_vec x)

/* To bfloat16, ties to even; NaN stays. */
static inline uint16x4_t four_rounded(float32x4_t x)
{
    uint32x4_t bits = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    uint32x4_t near = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), near, vorrq_u32(bits, vdupq_n_u32(0x400000))), 16);
}
EACH(half_vec, rounded, four_rounded(x.q[i]), vec x)

/* Sixteen codes as numbers, and 32 of them as bfloat16, which holds them exactly. */
static inline vec of_codes(const int8_t *p)
{
    int16x8_t low = vmovl_s8(vld1_s8(p)), high = vmovl_s8(vld1_s8(p + 8));
    return (vec){{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))),
        vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)))}};
}
static inline void widen_codes(bf16 *to, const int8_t *from)
{
    for (int i = 0; i < 2; i++) {
        vec x = of_codes(from + i * SIDE);
        for (int j = 0; j < 4; j++)
            vst1_u16(to + i * SIDE + j * 4, vshrn_n_u32(vreinterpretq_u32_f32(x.q[j]), 16));
    }
}

#define FOLD(name, op) \
    static inline float name(vec x) \
    { \
        float32x4_t four = op(op(x.q[3], x.q[1]), op(x.q[2], x.q[0])), two = op(four, vextq_f32(four, four, 2)); \
        return vgetq_lane_f32(op(two, vextq_f32(two, two, 1)), 0); \
    }
FOLD(vsum, four_add_ps)
FOLD(vtop, four_max_ps)
static inline float vfirst(vec x) { return vgetq_lane_f32(x.q[0], 0); }

EACH(vec, vselect, vbslq_f32(m.q[i], yes.q[i], no.q[i]), mask m, vec yes, vec no)
EACH(mask, vmore, vcgtq_f32(x.q[i], y.q[i]), vec x, vec y)
EACH(mask, vdiffers, vmvnq_u32(vceqq_f32(x.q[i], y.q[i])), vec x, vec y)
static inline int any_nan(vec x)
{
    mask m = vdiffers(x, x);
    return vmaxvq_u32(vorrq_u32(vorrq_u32(m.q[0], m.q[1]), vorrq_u32(m.q[2], m.q[3]))) != 0;
}

EACH(vec, vnearest, vrndnq_f32(x.q[i]), vec x)
EACH(vec, vbelow_infinity, four_min_ps(vdupq_n_f32(100.0f), x.q[i]), vec x)
static inline float32x4_t four_scaled(float32x4_t x, float32x4_t power)
{
    int32x4_t n = vcvtnq_s32_f32(power), part = vshrq_n_s32(n, 1), bias = vdupq_n_s32(127);
    x = vmulq_f32(x, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(part, bias), 23)));
    return vmulq_f32(x, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vsubq_s32(n, part), bias), 23)));
}
EACH(vec, vscaled, four_scaled(x.q[i], power.q[i]), vec x, vec power)

EACH(ints, loadi, vld1q_u32((const uint32_t *)p + 4 * i), const void *p)
EACH_TO(storei, vst1q_u32((uint32_t *)p + 4 * i, x.q[i]), void *p, ints x)
EACH(ints, left_by, vshlq_u32(x.q[i], vdupq_n_s32((int32_t)n)), ints x, unsigned n)
EACH(ints, right, vshlq_u32(x.q[i], vdupq_n_s32(-(int32_t)n)), ints x, unsigned n)
EACH(ints, masked, vandq_u32(x.q[i], vdupq_n_u32((uint32_t)bits)), ints x, int32_t bits)
EACH(ints, either, vorrq_u32(x.q[i], y.q[i]), ints x, ints y)
EACH(ints, plus, vaddq_u32(x.q[i], vdupq_n_u32((uint32_t)n)), ints x, int32_t n)
EACH(vec, of_ints, vcvtq_f32_s32(vreinterpretq_s32_u32(x.q[i])), ints x)
EACH(vec, as_vec, vreinterpretq_f32_u32(x.q[i]), ints x)
EACH(ints, as_ints, vreinterpretq_u32_f32(x.q[i]), vec x)
static inline vec of_bytes(const uint8_t *p)
{
    uint16x8_t low = vmovl_u8(vld1_u8(p)), high = vmovl_u8(vld1_u8(p + 8));
    return of_ints((ints){{vmovl_u16(vget_low_u16(low)), vmovl_u16(vget_high_u16(low)), vmovl_u16(vget_low_u16(high)),
        vmovl_u16(vget_high_u16(high))}});
}
static inline float32x4_t four_of_table(uint8x16x4_t table, uint32x4_t x)
{
    x = vmlaq_n_u32(vdupq_n_u32(0x03020100), vandq_u32(x, vdupq_n_u32(15)), 0x04040404);
    return vreinterpretq_f32_u8(vqtbl4q_u8(table, vreinterpretq_u8_u32(x)));
}
EACH(vec, of_table, four_of_table(vld1q_u8_x4((const uint8_t *)table), x.q[i]), const float *table, ints x)

/* Sums of products of bytes: see vector.h. */
EACH(ints, alli, vreinterpretq_u32_s32(vdupq_n_s32(x)), int32_t x)
EACH(ints, times, vmulq_u32(x.q[i], y.q[i]), ints x, ints y)
EACH(ints, flipped, veorq_u32(x.q[i], vdupq_n_u32((uint32_t)bits)), ints x, int32_t bits)
EACH(ints, nearest_ints, vreinterpretq_u32_s32(vcvtnq_s32_f32(x.q[i])), vec x)
static inline void save_bytes(int8_t *p, ints x)
{
    uint16x8_t low = vcombine_u16(vmovn_u32(x.q[0]), vmovn_u32(x.q[1]));
    uint16x8_t high = vcombine_u16(vmovn_u32(x.q[2]), vmovn_u32(x.q[3]));
    vst1q_u8((uint8_t *)p, vcombine_u8(vmovn_u16(low), vmovn_u16(high)));
}
static inline uint32x4_t four_looked_up(int8x16_t table, uint32x4_t x)
{
    return vreinterpretq_u32_s8(vqtbl1q_s8(table, vreinterpretq_u8_u32(x)));
}
EACH(ints, bytes_of_table, four_looked_up(vld1q_s8(table), x.q[i]), const int8_t *table, ints x)
enum { MOST_INT8_ROWS = 4, SIGNED_BYTES = 1, EXACT_PARTS = 1 };
INLINE ints begun(ints sum) { return sum; }
INLINE ints ended(ints sum, ints part) { return (void)sum, part; }
INLINE uint32x4_t four_dot(uint32x4_t part, uint32x4_t bytes, const int8_t *four)
{
    int32_t x;
    memcpy(&x, four, sizeof x);
    int8x16_t own = vreinterpretq_s8_s32(vdupq_n_s32(x)), other = vreinterpretq_s8_u32(bytes);
    int32x4_t sum = vreinterpretq_s32_u32(part);
#ifdef __ARM_FEATURE_DOTPROD
    return vreinterpretq_u32_s32(vdotq_s32(sum, other, own));
#else
    int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(other), vget_low_s8(own)));
    int32x4_t high = vpaddlq_s16(vmull_high_s8(other, own));
    return vreinterpretq_u32_s32(vaddq_s32(sum, vpaddq_s32(low, high)));
#endif
}
EACH(ints, dot, ((void)is_signed, four_dot(part.q[i], bytes.q[i], four)), ints part, ints bytes, const int8_t *four, const int is_signed)
