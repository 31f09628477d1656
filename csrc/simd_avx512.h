// Sixteen lanes on AVX-512 (F, BW, DQ, VL, VNNI, BF16).
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace shoal::SHOAL_ISA {

using F = __m512;
using I = __m512i;
using W = __m512i;  // 64 bytes of packed weights

inline F f_load(const float* p) { return _mm512_loadu_ps(p); }
inline void f_store(float* p, F v) { _mm512_storeu_ps(p, v); }
inline F f_load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p); }
inline void f_store_n(float* p, F v, int n) { _mm512_mask_storeu_ps(p, __mmask16((1u << n) - 1), v); }
inline F f_set1(float v) { return _mm512_set1_ps(v); }
inline F f_zero() { return _mm512_setzero_ps(); }
inline F f_add(F a, F b) { return _mm512_add_ps(a, b); }
inline F f_sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F f_mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F f_div(F a, F b) { return _mm512_div_ps(a, b); }
inline F f_fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F f_max(F a, F b) { return _mm512_max_ps(a, b); }  // b where either is NaN
inline F f_min(F a, F b) { return _mm512_min_ps(a, b); }
inline F f_abs(F a) { return _mm512_abs_ps(a); }
// where lane < n: a, else b
inline F f_first(int n, F a, F b) { return _mm512_mask_blend_ps(__mmask16((1u << n) - 1), b, a); }
// where x < limit: zero, else v
inline F f_zero_below(F x, F limit, F v) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), v); }
// Sum of the lanes: halves are added until one lane is left.
inline float f_reduce_add(F v) {
    const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}
// Largest lane; NaN if any lane is: a row that went wrong must not look healthy.
inline float f_reduce_max(F v) {
    if (_mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q)) return __builtin_nanf("");
    return _mm512_reduce_max_ps(v);
}
inline I f_round(F a) { return _mm512_cvtps_epi32(a); }
inline F i_to_f(I a) { return _mm512_cvtepi32_ps(a); }
inline I i_zero() { return _mm512_setzero_si512(); }
inline I i_set1(int32_t v) { return _mm512_set1_epi32(v); }
// v * 2^n by adding to the exponent
inline F f_scale2(F v, I n) {
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(v), _mm512_slli_epi32(n, 23)));
}
inline F f_from_half(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p))); }
// Sixteen int32 in [-128, 127] to bytes.
inline void i_store_s8(int8_t* p, I v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(v)); }
inline I i_add(I a, I b) { return _mm512_add_epi32(a, b); }
inline int32_t i_sum(I v) { return _mm512_reduce_add_epi32(v); }

inline W w_load(const void* p) { return _mm512_loadu_si512(p); }
inline void w_store(void* p, W w) { _mm512_storeu_si512(p, w); }
inline W w_low(W w) { return _mm512_and_si512(w, _mm512_set1_epi8(0x0f)); }
inline W w_high(W w) { return _mm512_and_si512(_mm512_srli_epi16(w, 4), _mm512_set1_epi8(0x0f)); }
inline int32_t load_i32(const int8_t* p) {
    int32_t v;
    std::memcpy(&v, p, 4);
    return v;
}
// acc + sum of 4 products of unsigned weights (below 128) and signed activations
inline I dot_unsigned(I acc, W w, int32_t a) { return _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(a)); }
// The same for weights stored biased by 128; the accumulator starts at biased_start.
inline I dot_biased_start(int32_t biased_start) { return _mm512_set1_epi32(biased_start); }
inline I dot_biased(I acc, W w, int32_t a) { return _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(a)); }

// acc + sum of 4 products of weights in [0, 255] and signed values
inline I dot_values(I acc, W v, int32_t weights) { return _mm512_dpbusd_epi32(acc, _mm512_set1_epi32(weights), v); }

// acc + w[1]*a[1] + w[0]*a[0] for pairs of bfloat16: products are exact in float32, each sum is rounded once.
inline F dot_bf16(F acc, W w, uint32_t pair) {
    return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(w),
                            reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int32_t>(pair))));
}

// Of pairs of bfloat16: the first of each, the second of each, as float32.
inline F bf16_first(W w) { return _mm512_castsi512_ps(_mm512_slli_epi32(w, 16)); }
inline F bf16_second(W w) {
    return _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u))));
}

// Round to nearest even bfloat16; the result's bits in the low half of each lane. NaN stays NaN.
inline I bf16_bits(F v) {
    const I u = _mm512_castps_si512(v);
    const I odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const I rounded = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    return _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0));
}
inline F bf16_round(F v) { return _mm512_castsi512_ps(_mm512_slli_epi32(bf16_bits(v), 16)); }
inline void bf16_store(uint16_t* p, F v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(bf16_bits(v)));
}

constexpr int kQuantRows = 6, kQuantPanels = 2;  // tile of the quantized product
constexpr int kFloatRows = 8, kFloatPanels = 2;  // tile of the float and bfloat16 products
constexpr int kScoreQueries = 12, kValueQueries = 6;

}  // namespace shoal::SHOAL_ISA
