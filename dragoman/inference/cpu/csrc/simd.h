// SIMD vectors of floats and ints, as wide as the processor's, by the compiler's vector extensions.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int64_t LANES = 16;
#elif defined(__AVX__)
constexpr int64_t LANES = 8;
#else
constexpr int64_t LANES = 4;
#endif

typedef float FloatVec __attribute__((vector_size(LANES * 4)));
typedef int32_t IntVec __attribute__((vector_size(LANES * 4)));
typedef uint16_t Half;  // float16 with AVX-512, else bfloat16: the upper half of a float32

static inline FloatVec load(const float* from) {
    FloatVec x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

static inline IntVec load_int(const int8_t* from) {
    IntVec x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

static inline void store(float* to, FloatVec x) { std::memcpy(to, &x, sizeof x); }

static inline FloatVec broadcast(float x) { return FloatVec{} + x; }

// Element-wise maximum; the second operand if either is NaN, so NaN propagates from the second.
static inline FloatVec vec_max(FloatVec a, FloatVec b) { return a > b ? a : b; }

#if defined(__AVX512F__)
// Keep a loaded vector in a register: for few rows the compiler would load it again for each.
template <class Vector>
static inline void keep_in_register(Vector& x) {
    __asm__("" : "+v"(x));
}

static inline FloatVec load(const Half* from) { return (FloatVec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from)); }

static inline void store(Half* to, FloatVec x) {
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

static inline float reduce_add(FloatVec x) { return _mm512_reduce_add_ps((__m512)x); }

static inline float reduce_max(FloatVec x) { return _mm512_reduce_max_ps((__m512)x); }

// Whether a comparison holds in every lane.
static inline bool all_true(IntVec condition) { return _mm512_movepi32_mask((__m512i)condition) == 0xffff; }

// Round half to even and saturate to 0..255. Clamped first: beyond 2^31 the conversion overflows.
static inline void store_uint8(uint8_t* to, FloatVec x) {
    const __m512 bounded = _mm512_min_ps((__m512)x, _mm512_set1_ps(255.0f));
    const __m512i whole = _mm512_max_epi32(_mm512_cvtps_epi32(bounded), _mm512_setzero_si512());
    _mm_storeu_si128((__m128i*)to, _mm512_cvtusepi32_epi8(whole));
}
#else
template <class Vector>
static inline void keep_in_register(Vector&) {}

static inline FloatVec load(const Half* from) {
    IntVec bits;
    for (int i = 0; i < LANES; ++i) bits[i] = (int32_t)((uint32_t)from[i] << 16);
    return (FloatVec)bits;
}

static inline void store(Half* to, FloatVec x) {
    const IntVec bits = (IntVec)x;
    for (int i = 0; i < LANES; ++i) to[i] = (Half)((uint32_t)bits[i] >> 16);
}

static inline float reduce_add(FloatVec x) {
    float half[LANES / 2], total = 0.0f;
    for (int i = 0; i < LANES / 2; ++i) half[i] = x[i] + x[i + LANES / 2];
    for (int i = 0; i < LANES / 2; ++i) total += half[i];
    return total;
}

static inline float reduce_max(FloatVec x) {
    float most = x[0];
    for (int i = 1; i < LANES; ++i) most = x[i] > most ? x[i] : most;
    return most;
}

static inline bool all_true(IntVec condition) {
    for (int i = 0; i < LANES; ++i)
        if (!condition[i]) return false;
    return true;
}

static inline void store_uint8(uint8_t* to, FloatVec x) {
    for (int i = 0; i < LANES; ++i) to[i] = (uint8_t)std::fmin(std::fmax(std::nearbyint(x[i]), 0.0f), 255.0f);
}
#endif

// exp(x) for x <= 88: 2^n times a polynomial of the remainder (Cephes, expf), within 2 ulp; NaN for NaN.
static inline FloatVec vec_exp(FloatVec x) {
    x = vec_max(broadcast(-87.0f), x);
    const float to_whole = 12582912.0f;  // 1.5 * 2^23: adding it rounds
    const FloatVec n = (x * 1.44269504088896341f + to_whole) - to_whole;
    const FloatVec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    FloatVec p = broadcast(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const IntVec power = (__builtin_convertvector(n, IntVec) + 127) << 23;
    return p * (FloatVec)power;
}
