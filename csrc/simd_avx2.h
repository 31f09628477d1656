// Sixteen lanes on AVX2 and FMA: two registers of eight.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace shoal::SHOAL_ISA {

struct F {
    __m256 a, b;
};
struct I {
    __m256i a, b;
};
struct W {
    __m256i a, b;
};

inline F f_load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void f_store(float* p, F v) {
    _mm256_storeu_ps(p, v.a);
    _mm256_storeu_ps(p + 8, v.b);
}
inline F f_load_n(const float* p, int n) {
    alignas(32) float t[16] = {};
    std::memcpy(t, p, sizeof(float) * static_cast<size_t>(n));
    return f_load(t);
}
inline void f_store_n(float* p, F v, int n) {
    alignas(32) float t[16];
    f_store(t, v);
    std::memcpy(p, t, sizeof(float) * static_cast<size_t>(n));
}
inline F f_set1(float v) { return {_mm256_set1_ps(v), _mm256_set1_ps(v)}; }
inline F f_zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F f_add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F f_sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F f_mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F f_div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F f_fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F f_max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F f_min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F f_abs(F x) {
    const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    return {_mm256_and_ps(x.a, mask), _mm256_and_ps(x.b, mask)};
}
inline F f_first(int n, F x, F y) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256 low = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), lanes));
    const __m256 high = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8), lanes));
    return {_mm256_blendv_ps(y.a, x.a, low), _mm256_blendv_ps(y.b, x.b, high)};
}
inline F f_zero_below(F x, F limit, F v) {
    return {_mm256_and_ps(_mm256_cmp_ps(x.a, limit.a, _CMP_NLT_UQ), v.a),
            _mm256_and_ps(_mm256_cmp_ps(x.b, limit.b, _CMP_NLT_UQ), v.b)};
}
inline float f_reduce_add(F v) {
    const __m256 h = _mm256_add_ps(v.a, v.b);
    const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}
inline float f_reduce_max(F v) {
    if (_mm256_movemask_ps(_mm256_cmp_ps(v.a, v.b, _CMP_UNORD_Q))) return __builtin_nanf("");
    const __m256 h = _mm256_max_ps(v.a, v.b);
    const __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    const __m128 d = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(d, _mm_movehdup_ps(d)));
}
inline I f_round(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline F i_to_f(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline I i_zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline I i_set1(int32_t v) { return {_mm256_set1_epi32(v), _mm256_set1_epi32(v)}; }
inline F f_scale2(F v, I n) {
    return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(v.a), _mm256_slli_epi32(n.a, 23))),
            _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(v.b), _mm256_slli_epi32(n.b, 23)))};
}
inline F f_from_half(const void* p) {
    const __m128i* h = static_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(h)), _mm256_cvtph_ps(_mm_loadu_si128(h + 1))};
}
inline void i_store_s8(int8_t* p, I v) {
    // Packing works within halves; the permutation puts the four pieces in order again.
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(v.a, v.b), 0xd8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
inline I i_add(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline int32_t i_sum(I v) {
    const __m256i h = _mm256_add_epi32(v.a, v.b);
    const __m128i q = _mm_add_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
    const __m128i d = _mm_add_epi32(q, _mm_shuffle_epi32(q, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(d, _mm_shuffle_epi32(d, 0xb1)));
}

inline W w_load(const void* p) {
    const __m256i* v = static_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(v), _mm256_loadu_si256(v + 1)};
}
inline void w_store(void* p, W w) {
    __m256i* v = static_cast<__m256i*>(p);
    _mm256_storeu_si256(v, w.a);
    _mm256_storeu_si256(v + 1, w.b);
}
inline W w_low(W w) {
    const __m256i mask = _mm256_set1_epi8(0x0f);
    return {_mm256_and_si256(w.a, mask), _mm256_and_si256(w.b, mask)};
}
inline W w_high(W w) {
    const __m256i mask = _mm256_set1_epi8(0x0f);
    return {_mm256_and_si256(_mm256_srli_epi16(w.a, 4), mask), _mm256_and_si256(_mm256_srli_epi16(w.b, 4), mask)};
}
inline int32_t load_i32(const int8_t* p) {
    int32_t v;
    std::memcpy(&v, p, 4);
    return v;
}
// Weights are below 128 and activations in [-127, 127], so a pair's sum stays within int16: never saturates.
inline I dot_unsigned(I acc, W w, int32_t a) {
    const __m256i x = _mm256_set1_epi32(a), ones = _mm256_set1_epi16(1);
    return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(_mm256_maddubs_epi16(w.a, x), ones)),
            _mm256_add_epi32(acc.b, _mm256_madd_epi16(_mm256_maddubs_epi16(w.b, x), ones))};
}
// Unbiased again here: |w| * sign(a, w) keeps a pair's sum within 2 * 128 * 127 < 2^15.
inline I dot_biased_start(int32_t) { return i_zero(); }
inline I dot_biased(I acc, W w, int32_t a) {
    const __m256i x = _mm256_set1_epi32(a), ones = _mm256_set1_epi16(1), bias = _mm256_set1_epi8(-128);
    const __m256i wa = _mm256_xor_si256(w.a, bias), wb = _mm256_xor_si256(w.b, bias);
    const __m256i pa = _mm256_maddubs_epi16(_mm256_abs_epi8(wa), _mm256_sign_epi8(x, wa));
    const __m256i pb = _mm256_maddubs_epi16(_mm256_abs_epi8(wb), _mm256_sign_epi8(x, wb));
    return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(pa, ones)), _mm256_add_epi32(acc.b, _mm256_madd_epi16(pb, ones))};
}

// Widened to 16 bits first: two products of 255 and 127 would not fit the byte instruction's sum.
inline __m256i dot_values8(__m256i acc, __m256i v, __m256i even, __m256i odd) {
    const __m256i first = _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8), second = _mm256_srai_epi16(v, 8);
    return _mm256_add_epi32(acc, _mm256_add_epi32(_mm256_madd_epi16(first, even), _mm256_madd_epi16(second, odd)));
}
inline I dot_values(I acc, W v, int32_t weights) {
    const __m256i p = _mm256_set1_epi32(weights), low = _mm256_set1_epi16(0x00ff);
    const __m256i even = _mm256_and_si256(p, low), odd = _mm256_srli_epi16(p, 8);
    return {dot_values8(acc.a, v.a, even, odd), dot_values8(acc.b, v.b, even, odd)};
}

inline F bf16_first(W w) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(w.a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(w.b, 16))};
}
inline F bf16_second(W w) {
    const __m256i high = _mm256_set1_epi32(static_cast<int32_t>(0xffff0000u));
    return {_mm256_castsi256_ps(_mm256_and_si256(w.a, high)), _mm256_castsi256_ps(_mm256_and_si256(w.b, high))};
}

inline F dot_bf16(F acc, W w, uint32_t pair) {
    const __m256 x0 = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int32_t>(pair << 16)));
    const __m256 x1 = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int32_t>(pair & 0xffff0000u)));
    const F first = bf16_first(w), second = bf16_second(w);
    acc = {_mm256_fmadd_ps(second.a, x1, acc.a), _mm256_fmadd_ps(second.b, x1, acc.b)};
    return {_mm256_fmadd_ps(first.a, x0, acc.a), _mm256_fmadd_ps(first.b, x0, acc.b)};
}

inline __m256i bf16_bits8(__m256 v) {
    const __m256i u = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
}
inline F bf16_round(F v) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(bf16_bits8(v.a), 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(bf16_bits8(v.b), 16))};
}
inline void bf16_store(uint16_t* p, F v) {
    const __m256i packed = _mm256_packus_epi32(bf16_bits8(v.a), bf16_bits8(v.b));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}

constexpr int kQuantRows = 2, kQuantPanels = 1;
constexpr int kFloatRows = 4, kFloatPanels = 1;
constexpr int kScoreQueries = 4, kValueQueries = 1;

}  // namespace shoal::SHOAL_ISA
