/* Sums of rows in float32, for aiote_native.kernels.moe: with AVX2 and F16C where the processor has them, otherwise in
 * plain C.
 *
 * Both give the same bits: each product is rounded before it is added (no fused multiply-add: build with
 * -ffp-contract=off), the rows are added in order, and every NaN is written as one pattern. Rounding to bfloat16 and
 * float16 is to the nearest, ties to even; the conversions in plain C follow https://gist.github.com/rygorous/2156668
 * (public domain).
 */
#pragma once
#include <stdint.h>
#include <string.h>

enum { MOE_BFLOAT16, MOE_FLOAT16, MOE_FLOAT32 };

static inline float moe_float(uint32_t bits) { float value; memcpy(&value, &bits, 4); return value; }
static inline uint32_t moe_bits(float value) { uint32_t bits; memcpy(&bits, &value, 4); return bits; }

static inline float moe_load(const uint8_t *row, int64_t i, int dtype)
{
    uint16_t half;
    float value;
    uint32_t bits, exponent;
    if (dtype == MOE_FLOAT32) {
        memcpy(&value, row + 4 * i, 4);
        return value;
    }
    memcpy(&half, row + 2 * i, 2);
    if (dtype == MOE_BFLOAT16)
        return moe_float((uint32_t)half << 16);
    bits = (uint32_t)(half & 0x7FFF) << 13;
    exponent = bits & 0x0F800000;
    bits += 112u << 23;
    if (exponent == 0x0F800000)
        bits += 112u << 23;
    else if (exponent == 0)
        bits = moe_bits(moe_float(bits + (1u << 23)) - moe_float(113u << 23));
    return moe_float(bits | (uint32_t)(half & 0x8000) << 16);
}

static inline uint16_t moe_half(uint32_t bits)
{
    uint16_t sign = (bits >> 16) & 0x8000;
    bits &= 0x7FFFFFFF;
    if (bits >= 0x47800000)
        return sign | 0x7C00;
    if (bits < 0x38800000)
        return sign | (uint16_t)(moe_bits(moe_float(bits) + 0.5f) - 0x3F000000);
    return sign | (uint16_t)((bits - (112u << 23) + 0xFFF + ((bits >> 13) & 1)) >> 13);
}

static inline void moe_store(uint8_t *row, int64_t i, int dtype, float value)
{
    uint32_t bits = value != value ? 0x7FC00000 : moe_bits(value);
    uint16_t half;
    if (dtype == MOE_FLOAT32) {
        memcpy(row + 4 * i, &bits, 4);
        return;
    }
    if (dtype == MOE_BFLOAT16)
        half = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    else
        half = bits == 0x7FC00000 ? 0x7E00 : moe_half(bits);
    memcpy(row + 2 * i, &half, 2);
}

/* Set elements `first` to `width` of `out` to the sum of `count` rows, each times its weight (as it is where `weights`
 * is NULL), and of the old `out` if `accumulate`. */
static inline void moe_sum_plain(uint8_t *out, const uint8_t *const *rows, const float *weights, int count, int64_t first,
                                 int64_t width, int dtype, int accumulate)
{
    for (int64_t i = first; i < width; i++) {
        float total = 0;
        for (int k = 0; k < count; k++) {
            float value = moe_load(rows[k], i, dtype);
            total += weights ? weights[k] * value : value;
        }
        if (accumulate)
            total += moe_load(out, i, dtype);
        moe_store(out, i, dtype, total);
    }
}

#if defined(__x86_64__)
#include <immintrin.h>
#define MOE_AVX2 __attribute__((target("avx2,f16c")))

static inline int moe_has_avx2(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"); }

MOE_AVX2 static inline __m256 moe_load8(const uint8_t *row, int64_t i, int dtype)
{
    if (dtype == MOE_FLOAT32)
        return _mm256_loadu_ps((const float *)(row + 4 * i));
    __m128i halves = _mm_loadu_si128((const __m128i *)(row + 2 * i));
    if (dtype == MOE_FLOAT16)
        return _mm256_cvtph_ps(halves);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

MOE_AVX2 static inline void moe_store8(uint8_t *row, int64_t i, int dtype, __m256 value)
{
    __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FC00000));
    value = _mm256_blendv_ps(value, nan, _mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    if (dtype == MOE_FLOAT32) {
        _mm256_storeu_ps((float *)(row + 4 * i), value);
        return;
    }
    __m128i *to = (__m128i *)(row + 2 * i);
    if (dtype == MOE_FLOAT16) {
        _mm_storeu_si128(to, _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
        return;
    }
    __m256i bits = _mm256_castps_si256(value);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    bits = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))), 16);
    bits = _mm256_permute4x64_epi64(_mm256_packus_epi32(bits, bits), 0x08);
    _mm_storeu_si128(to, _mm256_castsi256_si128(bits));
}

/* Sum thirty-two elements at a time, so that each row is read a cache line or two at once and the sums stay in
 * registers. Return the number of elements that were summed; the rest is for the plain C. */
MOE_AVX2 static inline int64_t moe_sum_avx2(uint8_t *out, const uint8_t *const *rows, const float *weights, int count,
                                            int64_t width, int dtype, int accumulate)
{
    int64_t i = 0;
    for (; i + 32 <= width; i += 32) {
        __m256 total[4];
        for (int j = 0; j < 4; j++)
            total[j] = _mm256_setzero_ps();
        for (int k = 0; k < count; k++) {
            __m256 weight = weights ? _mm256_set1_ps(weights[k]) : _mm256_setzero_ps();
            for (int j = 0; j < 4; j++) {
                __m256 value = moe_load8(rows[k], i + 8 * j, dtype);
                total[j] = _mm256_add_ps(total[j], weights ? _mm256_mul_ps(weight, value) : value);
            }
        }
        for (int j = 0; j < 4; j++) {
            if (accumulate)
                total[j] = _mm256_add_ps(total[j], moe_load8(out, i + 8 * j, dtype));
            moe_store8(out, i + 8 * j, dtype, total[j]);
        }
    }
    return i;
}

/* One copy for each type, so that the type is a constant for the compiler. */
#define MOE_SUM_OF(name, dtype)                                                                                              \
    MOE_AVX2 static int64_t name(uint8_t *out, const uint8_t *const *rows, const float *weights, int count, int64_t width, \
                                 int accumulate)                                                                          \
    {                                                                                                                      \
        return weights ? moe_sum_avx2(out, rows, weights, count, width, dtype, accumulate)                                 \
                       : moe_sum_avx2(out, rows, NULL, count, width, dtype, accumulate);                                   \
    }
MOE_SUM_OF(moe_sum_bfloat16, MOE_BFLOAT16)
MOE_SUM_OF(moe_sum_float16, MOE_FLOAT16)
MOE_SUM_OF(moe_sum_float32, MOE_FLOAT32)

static inline int64_t moe_sum_wide(uint8_t *out, const uint8_t *const *rows, const float *weights, int count,
                                   int64_t width, int dtype, int accumulate)
{
    if (dtype == MOE_BFLOAT16)
        return moe_sum_bfloat16(out, rows, weights, count, width, accumulate);
    if (dtype == MOE_FLOAT16)
        return moe_sum_float16(out, rows, weights, count, width, accumulate);
    return moe_sum_float32(out, rows, weights, count, width, accumulate);
}
#else
static inline int moe_has_avx2(void) { return 0; }
static inline int64_t moe_sum_wide(uint8_t *out, const uint8_t *const *rows, const float *weights, int count,
                                   int64_t width, int dtype, int accumulate)
{
    return 0;
}
#endif

static inline void moe_sum(uint8_t *out, const uint8_t *const *rows, const float *weights, int count, int64_t width,
                           int dtype, int accumulate, int wide)
{
    int64_t done = wide ? moe_sum_wide(out, rows, weights, count, width, dtype, accumulate) : 0;
    moe_sum_plain(out, rows, weights, count, done, width, dtype, accumulate);
}
