// Sixteen lanes in plain C++, for processors without AVX2 and as the twin the other sets are compared with.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace shoal::SHOAL_ISA {

struct F {
    float v[16];
};
struct I {
    int32_t v[16];
};
struct W {
    uint8_t v[64];
};

#define SHOAL_EACH for (int i = 0; i < 16; ++i)

inline F f_load(const float* p) {
    F r;
    std::memcpy(r.v, p, 64);
    return r;
}
inline void f_store(float* p, F x) { std::memcpy(p, x.v, 64); }
inline F f_load_n(const float* p, int n) {
    F r{};
    std::memcpy(r.v, p, sizeof(float) * static_cast<size_t>(n));
    return r;
}
inline void f_store_n(float* p, F x, int n) { std::memcpy(p, x.v, sizeof(float) * static_cast<size_t>(n)); }
inline F f_set1(float x) {
    F r;
    SHOAL_EACH r.v[i] = x;
    return r;
}
inline F f_zero() { return F{}; }
inline F f_add(F x, F y) {
    SHOAL_EACH x.v[i] += y.v[i];
    return x;
}
inline F f_sub(F x, F y) {
    SHOAL_EACH x.v[i] -= y.v[i];
    return x;
}
inline F f_mul(F x, F y) {
    SHOAL_EACH x.v[i] *= y.v[i];
    return x;
}
inline F f_div(F x, F y) {
    SHOAL_EACH x.v[i] /= y.v[i];
    return x;
}
inline F f_fma(F x, F y, F z) {
    SHOAL_EACH z.v[i] = std::fma(x.v[i], y.v[i], z.v[i]);
    return z;
}
inline F f_max(F x, F y) {
    SHOAL_EACH x.v[i] = x.v[i] > y.v[i] ? x.v[i] : y.v[i];
    return x;
}
inline F f_min(F x, F y) {
    SHOAL_EACH x.v[i] = x.v[i] < y.v[i] ? x.v[i] : y.v[i];
    return x;
}
inline F f_abs(F x) {
    SHOAL_EACH x.v[i] = std::fabs(x.v[i]);
    return x;
}
inline F f_first(int n, F x, F y) {
    SHOAL_EACH x.v[i] = i < n ? x.v[i] : y.v[i];
    return x;
}
inline F f_zero_below(F x, F limit, F v) {
    SHOAL_EACH v.v[i] = x.v[i] < limit.v[i] ? 0.0f : v.v[i];
    return v;
}
inline float f_reduce_add(F x) {
    for (int width = 8; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) x.v[i] += x.v[i + width];
    }
    return x.v[0];
}
inline float f_reduce_max(F x) {
    float best = x.v[0];
    SHOAL_EACH {
        if (x.v[i] != x.v[i]) return x.v[i];
        best = x.v[i] > best ? x.v[i] : best;
    }
    return best;
}
// As the x86 conversion: out of range and NaN give the most negative integer.
inline I f_round(F x) {
    I r;
    SHOAL_EACH r.v[i] = std::fabs(x.v[i]) < 2147483648.0f ? static_cast<int32_t>(std::nearbyint(x.v[i])) : INT32_MIN;
    return r;
}
inline F i_to_f(I x) {
    F r;
    SHOAL_EACH r.v[i] = static_cast<float>(x.v[i]);
    return r;
}
inline I i_zero() { return I{}; }
inline I i_set1(int32_t x) {
    I r;
    SHOAL_EACH r.v[i] = x;
    return r;
}
inline F f_scale2(F x, I n) {
    SHOAL_EACH {
        uint32_t bits;
        std::memcpy(&bits, &x.v[i], 4);
        bits += static_cast<uint32_t>(n.v[i]) << 23;
        std::memcpy(&x.v[i], &bits, 4);
    }
    return x;
}
inline float half_to_float(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
    const uint32_t exponent = (h >> 10) & 0x1fu, mantissa = h & 0x3ffu;
    float value;
    if (exponent == 0) {
        value = std::ldexp(static_cast<float>(mantissa), -24);
        return sign ? -value : value;
    }
    const uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | (mantissa << 13);
    std::memcpy(&value, &bits, 4);
    return value;
}
inline F f_from_half(const void* p) {
    uint16_t h[16];
    std::memcpy(h, p, 32);
    F r;
    SHOAL_EACH r.v[i] = half_to_float(h[i]);
    return r;
}
inline void i_store_s8(int8_t* p, I x) { SHOAL_EACH p[i] = static_cast<int8_t>(x.v[i]); }
inline I i_add(I x, const I& y) {
    SHOAL_EACH x.v[i] += y.v[i];
    return x;
}
inline int32_t i_sum(I x) {
    int32_t s = 0;
    SHOAL_EACH s += x.v[i];
    return s;
}

inline W w_load(const void* p) {
    W r;
    std::memcpy(r.v, p, 64);
    return r;
}
inline void w_store(void* p, const W& w) { std::memcpy(p, w.v, 64); }
inline W w_low(W w) {
    for (int i = 0; i < 64; ++i) w.v[i] &= 0x0f;
    return w;
}
inline W w_high(W w) {
    for (int i = 0; i < 64; ++i) w.v[i] >>= 4;
    return w;
}
inline int32_t load_i32(const int8_t* p) {
    int32_t v;
    std::memcpy(&v, p, 4);
    return v;
}
inline I dot_offset(I acc, const W& w, int32_t a, int32_t offset) {
    int8_t x[4];
    std::memcpy(x, &a, 4);
    SHOAL_EACH {
        int32_t s = 0;
        for (int j = 0; j < 4; ++j) s += (static_cast<int32_t>(w.v[4 * i + j]) - offset) * x[j];
        acc.v[i] += s;
    }
    return acc;
}
inline I dot_unsigned(I acc, W w, int32_t a) { return dot_offset(acc, w, a, 0); }
inline I dot_biased_start(int32_t) { return i_zero(); }
inline I dot_biased(I acc, W w, int32_t a) { return dot_offset(acc, w, a, 128); }
inline I dot_values(I acc, const W& v, int32_t weights) {
    uint8_t p[4];
    std::memcpy(p, &weights, 4);
    SHOAL_EACH {
        for (int j = 0; j < 4; ++j) acc.v[i] += static_cast<int32_t>(p[j]) * static_cast<int8_t>(v.v[4 * i + j]);
    }
    return acc;
}

inline float bits_to_float(uint32_t bits) {
    float v;
    std::memcpy(&v, &bits, 4);
    return v;
}
inline F bf16_first(const W& w) {
    F r;
    SHOAL_EACH {
        uint32_t bits;
        std::memcpy(&bits, w.v + 4 * i, 4);
        r.v[i] = bits_to_float(bits << 16);
    }
    return r;
}
inline F bf16_second(const W& w) {
    F r;
    SHOAL_EACH {
        uint32_t bits;
        std::memcpy(&bits, w.v + 4 * i, 4);
        r.v[i] = bits_to_float(bits & 0xffff0000u);
    }
    return r;
}
inline F dot_bf16(F acc, const W& w, uint32_t pair) {
    const float x0 = bits_to_float(pair << 16), x1 = bits_to_float(pair & 0xffff0000u);
    acc = f_fma(bf16_second(w), f_set1(x1), acc);
    return f_fma(bf16_first(w), f_set1(x0), acc);
}
inline uint16_t bf16_bits1(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    if (x != x) return 0x7fc0;
    return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
inline F bf16_round(F x) {
    SHOAL_EACH x.v[i] = bits_to_float(static_cast<uint32_t>(bf16_bits1(x.v[i])) << 16);
    return x;
}
inline void bf16_store(uint16_t* p, F x) { SHOAL_EACH p[i] = bf16_bits1(x.v[i]); }

#undef SHOAL_EACH

constexpr int kQuantRows = 2, kQuantPanels = 1;
constexpr int kFloatRows = 2, kFloatPanels = 1;
constexpr int kScoreQueries = 4, kValueQueries = 1;

}  // namespace shoal::SHOAL_ISA
