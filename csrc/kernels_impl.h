// The kernels, written once over sixteen lanes and compiled once per instruction set.
//
// Every file that includes this one defines SHOAL_ISA and a simd header first. The order of every sum is written
// here, so all sets give the same bits (bfloat16 products flush subnormals in hardware: the one exception). No
// result depends on how many rows a call has: each (row, column) is one chain over the input features.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "common.h"

namespace shoal::SHOAL_ISA {
namespace {

// ---- elementary functions ----------------------------------------------------------------------------------------

// e^x for x <= 88: Cody-Waite reduction, degree 6 Taylor-like minimax polynomial on [-ln2/2, ln2/2], about 1 ulp.
// Results below 2^-126 are zero, so that no subnormal is ever made.
inline F exponential(F x) {
    const F limit = f_set1(-87.33654f);
    const F y = f_max(limit, x);  // in this order a NaN passes through, here and below
    const I n = f_round(f_mul(y, f_set1(1.44269504088896341f)));
    const F nf = i_to_f(n);
    F r = f_fma(nf, f_set1(-0.693359375f), y);
    r = f_fma(nf, f_set1(2.12194440e-4f), r);
    F p = f_set1(1.9875691500e-4f);
    p = f_fma(p, r, f_set1(1.3981999507e-3f));
    p = f_fma(p, r, f_set1(8.3334519073e-3f));
    p = f_fma(p, r, f_set1(4.1665795894e-2f));
    p = f_fma(p, r, f_set1(1.6666665459e-1f));
    p = f_fma(p, r, f_set1(5.0000001201e-1f));
    p = f_add(f_fma(p, f_mul(r, r), r), f_set1(1.0f));
    return f_zero_below(x, limit, f_scale2(p, n));
}

// ---- matrix products -----------------------------------------------------------------------------------------------

template <Format kFormat> struct Traits;
template <> struct Traits<Format::Q4H> {
    static constexpr bool four = true, biased = false, half = true;
};
template <> struct Traits<Format::Q4F> {
    static constexpr bool four = true, biased = false, half = false;
};
template <> struct Traits<Format::Q8SH> {
    static constexpr bool four = false, biased = true, half = true;
};
template <> struct Traits<Format::Q8SF> {
    static constexpr bool four = false, biased = true, half = false;
};
template <> struct Traits<Format::Q8C> {
    static constexpr bool four = false, biased = true, half = false;
};
template <> struct Traits<Format::Q8AH> {
    static constexpr bool four = false, biased = false, half = true;
};
template <> struct Traits<Format::Q8AF> {
    static constexpr bool four = false, biased = false, half = false;
};

template <bool kHalf> inline F load_scales(const uint8_t* p, int which) {
    if constexpr (kHalf) return f_from_half(p + 32 * which);
    return f_load(reinterpret_cast<const float*>(p) + 16 * which);
}

// Writes one row of one panel: bias, then residual, in this order.
inline void store_panel(const Linear& args, int64_t row, int64_t panel, F value) {
    const int64_t column = panel * kLanes;
    const int64_t left = args.columns - column;
    float* out = args.out + row * args.out_stride + column;
    const float* residual = args.residual ? args.residual + row * args.out_stride + column : nullptr;
    if (left >= kLanes) {
        if (args.bias) value = f_add(value, f_load(args.bias + column));
        if (residual) value = f_add(f_load(residual), value);
        f_store(out, value);
    } else {
        const int n = static_cast<int>(left);
        if (args.bias) value = f_add(value, f_load_n(args.bias + column, n));
        if (residual) value = f_add(f_load_n(residual, n), value);
        f_store_n(out, value, n);
    }
}

// Where a tile reads its panels, and what it should have on its way to the caches meanwhile: the panels that come
// next. Null when nothing comes next.
struct Source {
    const uint8_t* data;
    int64_t stride;  // bytes between panels
    const uint8_t* ahead;
    int64_t ahead_stride;
    int64_t ahead_step;  // bytes per group of input features, or per (pair of) features of float formats
};

template <int kPanels> inline void fetch_ahead(const Source& source, int64_t step) {
    if (!source.ahead) return;
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) {
        const uint8_t* begin = source.ahead + p * source.ahead_stride + step * source.ahead_step;
        for (int64_t line = 0; line < source.ahead_step; line += kCacheLine) __builtin_prefetch(begin + line, 0, 2);
    }
}

template <Format kFormat, int kRows, int kPanels>
inline void quant_tile(const Linear& args, const Source& source, int64_t row, int64_t panel) {
    using T = Traits<kFormat>;
    constexpr int64_t kBytes = group_bytes(kFormat);
    constexpr int kVectors = T::four ? 4 : 8;
    const int64_t groups = args.features / kGroup;
    const int64_t stride = source.stride;
    const uint8_t* weight = source.data;
    const int8_t* a = args.a_q8 + row * args.a_stride;
    const GroupScale* scales = args.a_scales + row * args.a_scale_stride;
    F sum[kRows][kPanels];
    for (int r = 0; r < kRows; ++r) {
        for (int p = 0; p < kPanels; ++p) sum[r][p] = f_zero();
    }
    for (int64_t g = 0; g < groups; ++g) {
        I dots[kRows][kPanels];
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
            for (int p = 0; p < kPanels; ++p) {
                dots[r][p] = T::biased ? dot_biased_start(scales[r * args.a_scale_stride + g].biased_start) : i_zero();
            }
        }
        fetch_ahead<kPanels>(source, g);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
            if constexpr (T::four) {
                W low[kPanels], high[kPanels];
#pragma GCC unroll 2
                for (int p = 0; p < kPanels; ++p) {
                    const W w = w_load(weight + p * stride + 64 * v);
                    low[p] = w_low(w);
                    high[p] = w_high(w);
                }
#pragma GCC unroll 8
                for (int r = 0; r < kRows; ++r) {
                    const int32_t x = load_i32(a + r * args.a_stride + 4 * v);
                    const int32_t y = load_i32(a + r * args.a_stride + 16 + 4 * v);
#pragma GCC unroll 2
                    for (int p = 0; p < kPanels; ++p) {
                        dots[r][p] = dot_unsigned(dots[r][p], low[p], x);
                        dots[r][p] = dot_unsigned(dots[r][p], high[p], y);
                    }
                }
            } else {
                W w[kPanels];
#pragma GCC unroll 2
                for (int p = 0; p < kPanels; ++p) w[p] = w_load(weight + p * stride + 64 * v);
#pragma GCC unroll 8
                for (int r = 0; r < kRows; ++r) {
                    const int32_t x = load_i32(a + r * args.a_stride + 4 * v);
#pragma GCC unroll 2
                    for (int p = 0; p < kPanels; ++p) {
                        dots[r][p] = T::biased ? dot_biased(dots[r][p], w[p], x) : dot_unsigned(dots[r][p], w[p], x);
                    }
                }
            }
        }
#pragma GCC unroll 2
        for (int p = 0; p < kPanels; ++p) {
            const uint8_t* s = weight + p * stride + 64 * kVectors;
            const F d = load_scales<T::half>(s, 0);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) {
                const GroupScale& x = scales[r * args.a_scale_stride + g];
                sum[r][p] = f_fma(f_mul(f_set1(x.scale), d), i_to_f(dots[r][p]), sum[r][p]);
            }
            if constexpr (!T::biased) {
                const F m = load_scales<T::half>(s, 1);
#pragma GCC unroll 8
                for (int r = 0; r < kRows; ++r) {
                    sum[r][p] = f_fma(f_set1(scales[r * args.a_scale_stride + g].scaled_sum), m, sum[r][p]);
                }
            }
        }
        weight += kBytes;
        a += kGroup;
    }
    for (int r = 0; r < kRows; ++r) {
        for (int p = 0; p < kPanels; ++p) store_panel(args, row + r, panel + p, sum[r][p]);
    }
}

template <int kRows, int kPanels>
inline void f32_tile(const Linear& args, const Source& source, int64_t row, int64_t panel) {
    const int64_t stride = source.stride / 4;
    const float* weight = reinterpret_cast<const float*>(source.data);
    const float* a = args.a_f32 + row * args.a_stride;
    F sum[kRows][kPanels];
    for (int r = 0; r < kRows; ++r) {
        for (int p = 0; p < kPanels; ++p) sum[r][p] = f_zero();
    }
    for (int64_t k = 0; k < args.features; ++k) {
        fetch_ahead<kPanels>(source, k);
        F w[kPanels];
#pragma GCC unroll 2
        for (int p = 0; p < kPanels; ++p) {
            w[p] = f_load(weight + p * stride + k * kLanes);
        }
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            const F x = f_set1(a[r * args.a_stride + k]);
#pragma GCC unroll 2
            for (int p = 0; p < kPanels; ++p) sum[r][p] = f_fma(w[p], x, sum[r][p]);
        }
    }
    for (int r = 0; r < kRows; ++r) {
        for (int p = 0; p < kPanels; ++p) store_panel(args, row + r, panel + p, sum[r][p]);
    }
}

inline uint32_t load_pair(const uint16_t* p) {
    uint32_t v;
    std::memcpy(&v, p, 4);
    return v;
}

template <int kRows, int kPanels>
inline void bf16_tile(const Linear& args, const Source& source, int64_t row, int64_t panel) {
    const int64_t pairs = (args.features + 1) / 2;
    const int64_t stride = source.stride;
    const uint8_t* weight = source.data;
    const uint16_t* a = args.a_bf16 + row * args.a_stride;
    F sum[kRows][kPanels];
    for (int r = 0; r < kRows; ++r) {
        for (int p = 0; p < kPanels; ++p) sum[r][p] = f_zero();
    }
    for (int64_t k = 0; k < pairs; ++k) {
        fetch_ahead<kPanels>(source, k);
        W w[kPanels];
#pragma GCC unroll 2
        for (int p = 0; p < kPanels; ++p) {
            w[p] = w_load(weight + p * stride + k * 64);
        }
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            const uint32_t x = load_pair(a + r * args.a_stride + 2 * k);
#pragma GCC unroll 2
            for (int p = 0; p < kPanels; ++p) sum[r][p] = dot_bf16(sum[r][p], w[p], x);
        }
    }
    for (int r = 0; r < kRows; ++r) {
        for (int p = 0; p < kPanels; ++p) store_panel(args, row + r, panel + p, sum[r][p]);
    }
}

// One scale per column: sums are exact within a group of activations, and the column's scale comes last.
template <int kRows, int kPanels>
inline void column_scaled_tile(const Linear& args, const Source& source, int64_t row, int64_t panel) {
    const int64_t groups = (args.features + kWideGroup - 1) / kWideGroup;
    const uint8_t* weight = source.data;
    const int8_t* a = args.a_q8 + row * args.a_stride;
    const GroupScale* scales = args.a_scales + row * args.a_scale_stride;
    F sum[kRows][kPanels];
    for (int r = 0; r < kRows; ++r) {
        for (int p = 0; p < kPanels; ++p) sum[r][p] = f_zero();
    }
    for (int64_t g = 0; g < groups; ++g) {
        I dots[kRows][kPanels];
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
            for (int p = 0; p < kPanels; ++p) {
                dots[r][p] = dot_biased_start(scales[r * args.a_scale_stride + g].biased_start);
            }
        }
        fetch_ahead<kPanels>(source, g);
#pragma GCC unroll 4
        for (int v = 0; v < kWideGroup / 4; ++v) {
            W w[kPanels];
#pragma GCC unroll 2
            for (int p = 0; p < kPanels; ++p) w[p] = w_load(weight + p * source.stride + 64 * v);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) {
                const int32_t x = load_i32(a + r * args.a_stride + 4 * v);
#pragma GCC unroll 2
                for (int p = 0; p < kPanels; ++p) dots[r][p] = dot_biased(dots[r][p], w[p], x);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            const F scale = f_set1(scales[r * args.a_scale_stride + g].scale);
#pragma GCC unroll 2
            for (int p = 0; p < kPanels; ++p) sum[r][p] = f_fma(scale, i_to_f(dots[r][p]), sum[r][p]);
        }
        weight += group_bytes(Format::Q8C);
        a += kWideGroup;
    }
    for (int p = 0; p < kPanels; ++p) {
        const F d = f_load(reinterpret_cast<const float*>(weight + p * source.stride));
        for (int r = 0; r < kRows; ++r) store_panel(args, row + r, panel + p, f_mul(sum[r][p], d));
    }
}

template <Format kFormat, int kRows, int kPanels>
inline void tile(const Linear& args, const Source& source, int64_t row, int64_t panel) {
    if constexpr (kFormat == Format::F32)
        f32_tile<kRows, kPanels>(args, source, row, panel);
    else if constexpr (kFormat == Format::BF16)
        bf16_tile<kRows, kPanels>(args, source, row, panel);
    else if constexpr (kFormat == Format::Q8C)
        column_scaled_tile<kRows, kPanels>(args, source, row, panel);
    else
        quant_tile<kFormat, kRows, kPanels>(args, source, row, panel);
}

// A tile of `rows` rows, chosen at run time from the compiled ones.
template <Format kFormat, int kPanels, int kRows>
inline void tile_of(const Linear& args, const Source& source, int64_t rows, int64_t row, int64_t panel) {
    if constexpr (kRows > 1) {
        if (rows < kRows) return tile_of<kFormat, kPanels, kRows - 1>(args, source, rows, row, panel);
    }
    tile<kFormat, kRows, kPanels>(args, source, row, panel);
}

template <Format kFormat, int kPanels, int kRows>
void rows_of_panel(const Linear& args, Source source, int64_t rows, int64_t panel) {
    // Tiles of nearly equal height: 8 rows as 4 + 4 rather than 6 + 2.
    int64_t tiles = (rows + kRows - 1) / kRows;
    for (int64_t row = 0; row < rows; --tiles) {
        const int64_t height = (rows - row + tiles - 1) / tiles;
        tile_of<kFormat, kPanels, kRows>(args, source, height, row, panel);
        source.ahead = nullptr;  // the first tile has sent for everything
        row += height;
    }
}

// Bytes that a tile consumes per step of its loop.
constexpr int64_t step_bytes(Format format) { return is_quantized(format) ? group_bytes(format) : 64; }

// A 4-bit panel as bytes with float scales: the same integers and scales, so the same sums, but nothing is left to
// unpack in the inner loop. Worth it when several tiles of rows read the panel.
template <Format kFormat> void unpack_panel(const uint8_t* packed, int64_t groups, uint8_t* out) {
    for (int64_t g = 0; g < groups; ++g) {
        for (int v = 0; v < 4; ++v) {
            const W w = w_load(packed + 64 * v);
            w_store(out + 64 * v, w_low(w));
            w_store(out + 256 + 64 * v, w_high(w));
        }
        float* scales = reinterpret_cast<float*>(out + 512);
        f_store(scales, load_scales<Traits<kFormat>::half>(packed + 256, 0));
        f_store(scales + 16, load_scales<Traits<kFormat>::half>(packed + 256, 1));
        packed += group_bytes(kFormat);
        out += group_bytes(Format::Q8AF);
    }
}

template <Format kFormat, int kPanels>
void panels_at(const Linear& args, int64_t rows, int64_t panel, bool more) {
    constexpr int kRows = is_quantized(kFormat) ? kQuantRows : kFloatRows;
    const int64_t stride = panel_bytes(kFormat, args.features);
    const uint8_t* data = args.weight + panel * stride;
    Source source{data, stride, more ? data + kPanels * stride : nullptr, stride, step_bytes(kFormat)};
    if constexpr (kFormat == Format::Q4H || kFormat == Format::Q4F) {
        if (rows > 2 * kRows) {
            const int64_t groups = args.features / kGroup;
            source.data = args.scratch;
            source.stride = groups * group_bytes(Format::Q8AF);
            for (int p = 0; p < kPanels; ++p) {
                unpack_panel<kFormat>(data + p * stride, groups, args.scratch + p * source.stride);
            }
            return rows_of_panel<Format::Q8AF, kPanels, kRows>(args, source, rows, panel);
        }
    }
    rows_of_panel<kFormat, kPanels, kRows>(args, source, rows, panel);
}

#if defined(SHOAL_AMX)
#include "amx_tiles.h"
constexpr int64_t kPanelsPerUnit = kAmxPanels;
#else
constexpr int64_t kPanelsPerUnit = std::max(kQuantPanels, kFloatPanels);
#endif

template <Format kFormat> void linear_of(const Linear& args, int64_t rows, int64_t begin, int64_t end) {
#if defined(SHOAL_AMX)
    if constexpr (kFormat == Format::BF16) {
        // Whatever the number of rows, so that their number does not change their bits.
        if (args.features % kGroup == 0) return amx_linear_bf16(args, rows, begin, end);
    } else if constexpr (is_quantized(kFormat)) {
        if (rows >= kAmxRows) return amx_linear<kFormat>(args, rows, begin, end);
    }
#endif
    constexpr int kPanels = is_quantized(kFormat) ? kQuantPanels : kFloatPanels;
    int64_t panel = begin;
    for (; panel + kPanels <= end; panel += kPanels) {
        panels_at<kFormat, kPanels>(args, rows, panel, panel + 2 * kPanels <= end);
    }
    for (; panel < end; ++panel) panels_at<kFormat, 1>(args, rows, panel, false);
}

void linear(const Linear& args, int64_t rows, int64_t begin, int64_t end) {
    switch (args.format) {
        case Format::F32: return linear_of<Format::F32>(args, rows, begin, end);
        case Format::BF16: return linear_of<Format::BF16>(args, rows, begin, end);
        case Format::Q4H: return linear_of<Format::Q4H>(args, rows, begin, end);
        case Format::Q4F: return linear_of<Format::Q4F>(args, rows, begin, end);
        case Format::Q8SH: return linear_of<Format::Q8SH>(args, rows, begin, end);
        case Format::Q8SF: return linear_of<Format::Q8SF>(args, rows, begin, end);
        case Format::Q8AH: return linear_of<Format::Q8AH>(args, rows, begin, end);
        case Format::Q8AF: return linear_of<Format::Q8AF>(args, rows, begin, end);
        case Format::Q8C: return linear_of<Format::Q8C>(args, rows, begin, end);
    }
}

// ---- rows ----------------------------------------------------------------------------------------------------------

void rms_norm(const float* x, const float* weight, float eps, int64_t width, float* out) {
    F squares = f_zero();
    int64_t i = 0;
    for (; i + 16 <= width; i += 16) {
        const F v = f_load(x + i);
        squares = f_fma(v, v, squares);
    }
    if (i < width) {
        const F v = f_load_n(x + i, static_cast<int>(width - i));
        squares = f_fma(v, v, squares);
    }
    const F factor = f_set1(1.0f / std::sqrt(f_reduce_add(squares) / static_cast<float>(width) + eps));
    i = 0;
    for (; i + 16 <= width; i += 16) f_store(out + i, f_mul(f_mul(f_load(x + i), factor), f_load(weight + i)));
    if (i < width) {
        const int n = static_cast<int>(width - i);
        f_store_n(out + i, f_mul(f_mul(f_load_n(x + i, n), factor), f_load_n(weight + i, n)), n);
    }
}

// Eight-bit activations, symmetric, one scale per group: q = round_half_even(x * (127 / absmax)).
template <int kSize> inline void quantize_group(const float* x, int8_t* q, GroupScale* scale) {
    constexpr int kVectors = kSize / kLanes;
    F v[kVectors], most = f_zero(), fault = f_zero();
    for (int i = 0; i < kVectors; ++i) {
        v[i] = f_load(x + kLanes * i);
        most = f_max(f_abs(v[i]), most);
        fault = f_fma(v[i], f_zero(), fault);  // NaN where v is no number or infinite: a maximum may forget it
    }
    const float largest = f_reduce_max(f_add(most, fault));
    // NaN compares false and takes the multiplying branch, where it spreads into the scale.
    if (largest == 0.0f) {
        for (int i = 0; i < kVectors; ++i) i_store_s8(q + kLanes * i, i_zero());
        *scale = {0.0f, 0.0f, 0};
        return;
    }
    const F inverse = f_set1(127.0f / largest);
    const F limit = f_set1(127.0f), low = f_set1(-127.0f);
    I levels = i_zero();
    for (int i = 0; i < kVectors; ++i) {
        const I level = f_round(f_max(f_min(f_mul(v[i], inverse), limit), low));
        i_store_s8(q + kLanes * i, level);
        levels = i_add(levels, level);
    }
    const int32_t sum = i_sum(levels);
    const float d = largest / 127.0f;
    *scale = {d, d * static_cast<float>(sum), -128 * sum};
}

void convert(const float* x, int64_t begin, int64_t end, const RowForms& forms) {
    if (forms.f32) std::copy(x + begin, x + end, forms.f32 + begin);
    if (forms.bf16) {
        int64_t i = begin;
        for (; i + 16 <= end; i += 16) bf16_store(forms.bf16 + i, f_load(x + i));
        if (i < end) {
            const int n = static_cast<int>(end - i);
            uint16_t t[16];
            bf16_store(t, f_load_n(x + i, n));
            std::memcpy(forms.bf16 + i, t, sizeof(uint16_t) * static_cast<size_t>(n));
            if (end % 2) forms.bf16[end] = 0;  // the pair of an odd last feature
        }
    }
    if (forms.q8 && forms.group == kWideGroup) {
        for (int64_t i = begin; i < end; i += kWideGroup) {
            if (i + kWideGroup <= end) {
                quantize_group<kWideGroup>(x + i, forms.q8 + i, forms.scales + i / kWideGroup);
            } else {
                alignas(64) float filled[kWideGroup] = {};
                std::copy(x + i, x + end, filled);
                quantize_group<kWideGroup>(filled, forms.q8 + i, forms.scales + i / kWideGroup);
            }
        }
    } else if (forms.q8) {
        for (int64_t i = begin; i + kGroup <= end; i += kGroup)
            quantize_group<kGroup>(x + i, forms.q8 + i, forms.scales + i / kGroup);
    }
}

void silu_mul(const float* gate, const float* up, int64_t begin, int64_t end, float* out) {
    // Below -88 the result is as good as zero, and the exponential would overflow.
    const F one = f_set1(1.0f), lowest = f_set1(-88.0f);
    for (int64_t i = begin; i < end; i += 16) {
        const int n = static_cast<int>(std::min<int64_t>(16, end - i));
        const F g = f_max(lowest, n == 16 ? f_load(gate + i) : f_load_n(gate + i, n));
        const F u = n == 16 ? f_load(up + i) : f_load_n(up + i, n);
        const F e = exponential(f_sub(f_zero(), g));
        const F v = f_mul(f_div(g, f_add(one, e)), u);
        if (n == 16)
            f_store(out + i, v);
        else
            f_store_n(out + i, v, n);
    }
}

// One scale for a whole row of a multiple of 16 values: q = round_half_even(x * (127 / absmax)). Zeros past `width` add
// nothing. A row with an infinity or NaN gets a NaN scale and unspecified integers. Gives the scale and the sum of q.
struct RowScale {
    float scale;
    int32_t sum;
};
inline RowScale quantize_row(const float* x, int32_t width, int8_t* q) {
    F largest = f_zero(), fault = f_zero();
    for (int32_t i = 0; i < width; i += kLanes) {
        const F v = f_load(x + i);
        largest = f_max(f_abs(v), largest);
        fault = f_fma(v, f_zero(), fault);  // NaN where v is no number or infinite
    }
    const float top = f_reduce_max(f_add(largest, fault));
    if (top == 0.0f) {
        for (int32_t i = 0; i < width; i += kLanes) i_store_s8(q + i, i_zero());
        return {0.0f, 0};
    }
    const F inverse = f_set1(127.0f / top), limit = f_set1(127.0f), low = f_set1(-127.0f);
    I levels = i_zero();
    for (int32_t i = 0; i < width; i += kLanes) {
        const I v = f_round(f_max(f_min(f_mul(f_load(x + i), inverse), limit), low));
        i_store_s8(q + i, v);
        levels = i_add(levels, v);
    }
    return {top / 127.0f, i_sum(levels)};
}

// ---- rotary embedding and KV write ---------------------------------------------------------------------------------

inline void rotate(const float* x, const RopeArgs& args, int32_t dim, float* out) {
    const int32_t half = args.rotary_dim / 2;
    const float* cosines = args.cos_sin;
    const float* sines = args.cos_sin + half;
    for (int32_t i = 0; i < half; ++i) {
        const int32_t first = args.interleaved ? 2 * i : i;
        const int32_t second = args.interleaved ? 2 * i + 1 : i + half;
        const float a = x[first], b = x[second];
        out[first] = a * cosines[i] - b * sines[i];
        out[second] = a * sines[i] + b * cosines[i];
    }
    for (int32_t i = args.rotary_dim; i < dim; ++i) out[i] = x[i];
}

// Where one token's key and value go: its tile and its place in there.
struct CacheSlot {
    uint8_t* tile;
    int64_t slot;
};

inline void write_key(const CacheGeometry& cache, const CacheSlot& at, const float* row) {
    const int32_t padded = cache.padded_dim;
    if (cache.type == CacheType::F32) {
        float* k = reinterpret_cast<float*>(at.tile) + at.slot;
        for (int32_t i = 0; i < padded; ++i) k[i * kLanes] = row[i];
    } else if (cache.type == CacheType::BF16) {
        alignas(64) uint16_t bits[kMaxHeadDim];
        for (int32_t i = 0; i < padded; i += 16) bf16_store(bits + i, f_load(row + i));
        uint16_t* k = reinterpret_cast<uint16_t*>(at.tile) + 2 * at.slot;
        for (int32_t i = 0; i < padded; i += 2) std::memcpy(k + i * kLanes, bits + i, 4);
    } else {
        alignas(64) int8_t q[kMaxHeadDim];
        const RowScale scale = quantize_row(row, padded, q);
        for (int32_t i = 0; i < padded; i += 4) {
            uint32_t four;
            std::memcpy(&four, q + i, 4);
            four ^= 0x80808080u;
            std::memcpy(at.tile + i * kLanes + 4 * at.slot, &four, 4);
        }
        std::memcpy(at.tile + cache.value_bytes() + 4 * at.slot, &scale.scale, 4);
    }
}

// With clear_tail, the slots after this one get values that give zero when multiplied by zero.
inline void write_value(const CacheGeometry& cache, const CacheSlot& at, const float* row, bool clear_tail) {
    const int32_t padded = cache.padded_dim;
    int64_t used = (at.slot + 1) * padded * 4;
    if (cache.type == CacheType::F32) {
        std::copy(row, row + padded, reinterpret_cast<float*>(at.tile) + at.slot * padded);
    } else if (cache.type == CacheType::BF16) {
        alignas(64) uint16_t bits[kMaxHeadDim];
        for (int32_t i = 0; i < padded; i += 16) bf16_store(bits + i, f_load(row + i));
        uint16_t* v = reinterpret_cast<uint16_t*>(at.tile) + (at.slot / 2) * padded * 2 + at.slot % 2;
        for (int32_t i = 0; i < padded; ++i) v[2 * i] = bits[i];
        if (clear_tail && at.slot % 2 == 0) {
            for (int32_t i = 0; i < padded; ++i) v[2 * i + 1] = 0;
        }
        used = (at.slot / 2 + 1) * padded * 4;
    } else {
        alignas(64) int8_t q[kMaxHeadDim];
        const RowScale scale = quantize_row(row, padded, q);
        uint8_t* v = at.tile + (at.slot / 4) * padded * 4 + at.slot % 4;
        for (int32_t i = 0; i < padded; ++i) v[4 * i] = static_cast<uint8_t>(q[i]);
        std::memcpy(at.tile + cache.value_bytes() + 4 * at.slot, &scale.scale, 4);
        used = cache.value_bytes() + 4 * (at.slot + 1);  // a scale of zero is enough
    }
    if (clear_tail) std::memset(at.tile + used, 0, static_cast<size_t>(cache.tile_bytes() - used));
}

void rope_and_cache(const CacheGeometry& cache, const RopeArgs& args) {
    const int32_t dim = cache.head_dim, padded = cache.padded_dim;
    alignas(64) float row[kMaxHeadDim];
    std::fill(row, row + padded, 0.0f);
    for (int32_t h = 0; h < args.num_heads; ++h) {
        rotate(args.qkv + h * dim, args, dim, row);
        std::copy(row, row + padded, args.query + h * padded);
    }
    const float* keys = args.qkv + args.num_heads * dim;
    const float* values = keys + cache.num_kv_heads * dim;
    const int64_t block = args.block_table[args.position / cache.block_size];
    const int64_t tile = args.position % cache.block_size / kLanes;
    const int64_t slot = args.position % kLanes;
    for (int32_t h = 0; h < cache.num_kv_heads; ++h) {
        rotate(keys + h * dim, args, dim, row);
        write_key(cache, {args.layer + cache.key_tile(block, h, tile), slot}, row);
        std::copy(values + h * dim, values + (h + 1) * dim, row);
        write_value(cache, {args.layer + cache.value_tile(block, h, tile), slot}, row, args.clear_tail);
    }
}

// ---- attention -----------------------------------------------------------------------------------------------------

struct Query {
    const float* vector;
    float* out;
    int32_t position;
    // For an 8-bit cache: the vector in 8 bits, its scale, and what takes the keys' bias out again.
    const int8_t* q8;
    float scale;
    int32_t biased_start;
};

constexpr int64_t kTilesAhead = 2;  // how far key tiles are fetched before their use

// Scores of kCount queries with the 16 tokens of one tile. One chain over the dims per (query, token).
template <int kCount>
inline void score_tile(const CacheGeometry& cache, const uint8_t* key, const Query* queries, F scale, float* scores,
                       int64_t stride) {
    if (cache.type == CacheType::I8) {
        I dots[kCount];
        for (int q = 0; q < kCount; ++q) dots[q] = dot_biased_start(queries[q].biased_start);
        for (int32_t i = 0; i < cache.padded_dim / 4; ++i) {
            const W k = w_load(key + 64 * i);
#pragma GCC unroll 12
            for (int q = 0; q < kCount; ++q) dots[q] = dot_biased(dots[q], k, load_i32(queries[q].q8 + 4 * i));
        }
        const F key_scale = f_mul(f_load(reinterpret_cast<const float*>(key + cache.value_bytes())), scale);
        for (int q = 0; q < kCount; ++q) {
            f_store(scores + q * stride, f_mul(i_to_f(dots[q]), f_mul(key_scale, f_set1(queries[q].scale))));
        }
        return;
    }
    F sum[kCount];
    for (int q = 0; q < kCount; ++q) sum[q] = f_zero();
    if (cache.type == CacheType::BF16) {
        for (int32_t i = 0; i < cache.padded_dim / 2; ++i) {
            const W k = w_load(key + 64 * i);
            const F first = bf16_first(k), second = bf16_second(k);
#pragma GCC unroll 12
            for (int q = 0; q < kCount; ++q) {
                sum[q] = f_fma(first, f_set1(queries[q].vector[2 * i]), sum[q]);
                sum[q] = f_fma(second, f_set1(queries[q].vector[2 * i + 1]), sum[q]);
            }
        }
    } else {
        for (int32_t i = 0; i < cache.padded_dim; ++i) {
            const F k = f_load(reinterpret_cast<const float*>(key) + 16 * i);
#pragma GCC unroll 12
            for (int q = 0; q < kCount; ++q) {
                sum[q] = f_fma(k, f_set1(queries[q].vector[i]), sum[q]);
            }
        }
    }
    for (int q = 0; q < kCount; ++q) f_store(scores + q * stride, f_mul(sum[q], scale));
}

template <int kMost>
inline void score_tiles(const CacheGeometry& cache, const uint8_t* key, const Query* queries, int count, F scale,
                        float* scores, int64_t stride) {
    while (count >= kMost) {
        score_tile<kMost>(cache, key, queries, scale, scores, stride);
        queries += kMost;
        scores += kMost * stride;
        count -= kMost;
    }
    if constexpr (kMost > 1) {
        if (count > 0) {
            constexpr int kNext = kMost > 6 ? 6 : kMost > 4 ? 4 : kMost > 3 ? 3 : kMost - 1;
            score_tiles<kNext>(cache, key, queries, count, scale, scores, stride);
        }
    }
}

// Softmax weights of one query over its tokens, in place; zeros up to `tiles`. Gives their sum.
inline float softmax(const Query& query, int64_t tiles, float* scores) {
    const int64_t own = query.position / kLanes + 1;
    const F lowest = f_set1(-std::numeric_limits<float>::infinity());
    float* last = scores + (own - 1) * kLanes;
    f_store(last, f_first(query.position % kLanes + 1, f_load(last), lowest));
    F largest = lowest;
    for (int64_t t = 0; t < own; ++t) largest = f_max(f_load(scores + t * kLanes), largest);
    const F shift = f_set1(f_reduce_max(largest));
    F sum = f_zero();
    for (int64_t t = 0; t < own; ++t) {
        const F p = exponential(f_sub(f_load(scores + t * kLanes), shift));
        f_store(scores + t * kLanes, p);
        sum = f_add(sum, p);
    }
    for (int64_t t = own; t < tiles; ++t) f_store(scores + t * kLanes, f_zero());
    return f_reduce_add(sum);
}

// Softmax weights of one tile for 8-bit values: the values' own scales are multiplied in, then all are rounded to 7
// bits with one scale. They lie where the float weights of the tile lay.
struct TileWeights {
    int32_t four[kLanes / 4];
    float scale;
};
inline const TileWeights* weights_of(const float* scores) { return reinterpret_cast<const TileWeights*>(scores); }

inline void quantize_weights(const CacheGeometry& cache, const AttentionArgs& args, int count, int64_t tiles) {
    const int64_t per_block = cache.tiles_per_block();
    for (int64_t t = 0; t < tiles; ++t) {
        const uint8_t* value =
            args.layer + cache.value_tile(args.block_table[t / per_block], args.kv_head, t % per_block);
        const F scale = f_load(reinterpret_cast<const float*>(value + cache.value_bytes()));
        for (int q = 0; q < count; ++q) {
            float* scores = args.scores + q * args.score_stride + t * kLanes;
            const F weights = f_mul(f_load(scores), scale);
            const float top = f_reduce_max(weights);
            // Eight bits without a sign, stored by way of the signed ones. NaN compares false and takes the multiplying
            // branch, where it spreads into the scale.
            alignas(16) int8_t levels[kLanes];
            const F most = f_set1(255.0f), middle = f_set1(128.0f);
            const F inverse = f_set1(top == 0.0f ? 0.0f : 255.0f / top);
            i_store_s8(levels, f_round(f_sub(f_min(f_mul(weights, inverse), most), middle)));
            TileWeights packed;
            std::memcpy(packed.four, levels, sizeof(levels));
            for (int32_t& four : packed.four) four = static_cast<int32_t>(static_cast<uint32_t>(four) ^ 0x80808080u);
            packed.scale = top / 255.0f;
            std::memcpy(scores, &packed, sizeof(packed));
        }
    }
}

// Weighted sum of values for kCount queries and kChunks x 16 dims: one chain over the tokens per (query, dim).
template <int kCount, int kChunks>
inline void value_sum(const CacheGeometry& cache, const AttentionArgs& args, const Query* queries, int64_t tiles,
                      int32_t dim_begin, const float* scores, const float* sums) {
    F out[kCount][kChunks];
    for (int q = 0; q < kCount; ++q) {
        for (int c = 0; c < kChunks; ++c) out[q][c] = f_zero();
    }
    const int64_t per_block = cache.tiles_per_block();
    for (int64_t t = 0; t < tiles; ++t) {
        const uint8_t* value =
            args.layer + cache.value_tile(args.block_table[t / per_block], args.kv_head, t % per_block);
        if (cache.type == CacheType::I8) {
            I dots[kCount][kChunks];
#pragma GCC unroll 6
            for (int q = 0; q < kCount; ++q) {
#pragma GCC unroll 4
                for (int c = 0; c < kChunks; ++c) dots[q][c] = i_zero();
            }
#pragma GCC unroll 4
            for (int i = 0; i < kLanes / 4; ++i) {
                const uint8_t* four = value + (i * int64_t(cache.padded_dim) + dim_begin) * 4;
                W v[kChunks];
#pragma GCC unroll 4
                for (int c = 0; c < kChunks; ++c) v[c] = w_load(four + 64 * c);
#pragma GCC unroll 6
                for (int q = 0; q < kCount; ++q) {
                    const int32_t p = weights_of(scores + q * args.score_stride + t * kLanes)->four[i];
#pragma GCC unroll 4
                    for (int c = 0; c < kChunks; ++c) dots[q][c] = dot_values(dots[q][c], v[c], p);
                }
            }
#pragma GCC unroll 6
            for (int q = 0; q < kCount; ++q) {
                const F scale = f_set1(weights_of(scores + q * args.score_stride + t * kLanes)->scale);
#pragma GCC unroll 4
                for (int c = 0; c < kChunks; ++c) out[q][c] = f_fma(i_to_f(dots[q][c]), scale, out[q][c]);
            }
        } else if (cache.type == CacheType::BF16) {
            const int64_t pair_bytes = int64_t(cache.padded_dim) * 4;
            for (int i = 0; i < kLanes / 2; ++i) {
                W v[kChunks];
#pragma GCC unroll 4
                for (int c = 0; c < kChunks; ++c) v[c] = w_load(value + i * pair_bytes + dim_begin * 4 + 64 * c);
#pragma GCC unroll 6
                for (int q = 0; q < kCount; ++q) {
                    const float* p = scores + q * args.score_stride + t * kLanes + 2 * i;
                    const F p0 = f_set1(p[0]), p1 = f_set1(p[1]);
#pragma GCC unroll 4
                    for (int c = 0; c < kChunks; ++c) {
                        out[q][c] = f_fma(bf16_first(v[c]), p0, out[q][c]);
                        out[q][c] = f_fma(bf16_second(v[c]), p1, out[q][c]);
                    }
                }
            }
        } else {
            const float* v32 = reinterpret_cast<const float*>(value) + dim_begin;
            for (int i = 0; i < kLanes; ++i) {
                F v[kChunks];
#pragma GCC unroll 4
                for (int c = 0; c < kChunks; ++c) v[c] = f_load(v32 + i * int64_t(cache.padded_dim) + 16 * c);
#pragma GCC unroll 6
                for (int q = 0; q < kCount; ++q) {
                    const F p = f_set1(scores[q * args.score_stride + t * kLanes + i]);
#pragma GCC unroll 4
                    for (int c = 0; c < kChunks; ++c) out[q][c] = f_fma(v[c], p, out[q][c]);
                }
            }
        }
    }
    for (int q = 0; q < kCount; ++q) {
        for (int c = 0; c < kChunks; ++c) {
            const int32_t dim = dim_begin + 16 * c;
            const int n = std::min(16, cache.head_dim - dim);
            if (n > 0) f_store_n(queries[q].out + dim, f_div(out[q][c], f_set1(sums[q])), n);
        }
    }
}

template <int kMost>
inline void value_sums(const CacheGeometry& cache, const AttentionArgs& args, const Query* queries, int count,
                       int64_t tiles, const float* scores, const float* sums) {
    while (count >= kMost) {
        int32_t dim = 0;
        for (; dim + 64 <= cache.padded_dim; dim += 64) {
            value_sum<kMost, 4>(cache, args, queries, tiles, dim, scores, sums);
        }
        for (; dim < cache.padded_dim; dim += 16) {
            value_sum<kMost, 1>(cache, args, queries, tiles, dim, scores, sums);
        }
        queries += kMost;
        scores += kMost * args.score_stride;
        sums += kMost;
        count -= kMost;
    }
    if constexpr (kMost > 1) {
        if (count > 0) {
            constexpr int kNext = kMost > 3 ? 3 : kMost - 1;
            value_sums<kNext>(cache, args, queries, count, tiles, scores, sums);
        }
    }
}

// The query vectors of one part, in the order row, head.
struct Queries {
    Query each[kMaxQueries];
    int count;
};

inline void gather_queries(const CacheGeometry& cache, const AttentionArgs& args, int8_t (*q8)[kMaxHeadDim],
                           Queries* out) {
    out->count = 0;
    for (int32_t row = 0; row < args.rows; ++row) {
        for (int32_t head = args.head_begin; head < args.head_end; ++head) {
            int8_t* levels = q8[out->count];
            Query& query = out->each[out->count++];
            query = {args.query + row * args.query_stride + int64_t(head) * cache.padded_dim,
                     args.out + row * args.out_stride + int64_t(head) * cache.head_dim,
                     args.position + row,
                     levels,
                     0.0f,
                     0};
            if (cache.type == CacheType::I8) {
                const RowScale scale = quantize_row(query.vector, cache.padded_dim, levels);
                query.scale = scale.scale;
                query.biased_start = -128 * scale.sum;
            }
        }
    }
}

// `parts` are of the same rows and differ in their KV head. Their keys are read together, tile by tile, because the
// heads of a block lie side by side.
void attention(const CacheGeometry& cache, const AttentionArgs* parts, int count) {
    Queries queries[kMaxParts];
    alignas(64) int8_t q8[kMaxParts][kMaxQueries][kMaxHeadDim];
    for (int p = 0; p < count; ++p) gather_queries(cache, parts[p], q8[p], &queries[p]);
    const int64_t tiles = (parts[0].position + parts[0].rows - 1) / kLanes + 1;
    const int64_t per_block = cache.tiles_per_block();
    const int64_t bytes = cache.tile_bytes();
    const auto key_tile = [&](int p, int64_t t) {
        return parts[p].layer + cache.key_tile(parts[p].block_table[t / per_block], parts[p].kv_head, t % per_block);
    };
    for (int64_t t = 0; t < tiles; ++t) {
        for (int p = 0; p < count; ++p) {
            // The cache is scattered over memory in pieces too short for the hardware's own prefetcher.
            if (t + kTilesAhead < tiles) {
                const uint8_t* next = key_tile(p, t + kTilesAhead);
                for (int64_t i = 0; i < bytes; i += kCacheLine) __builtin_prefetch(next + i, 0, 3);
            }
            const uint8_t* key = key_tile(p, t);
            const uint8_t* value = key + cache.half_bytes();
            for (int64_t i = 0; i < bytes; i += kCacheLine) __builtin_prefetch(value + i, 0, 2);
            score_tiles<kScoreQueries>(cache, key, queries[p].each, queries[p].count, f_set1(parts[p].scale),
                                       parts[p].scores + t * kLanes, parts[p].score_stride);
        }
    }
    for (int p = 0; p < count; ++p) {
        const AttentionArgs& args = parts[p];
        const int n = queries[p].count;
        float sums[kMaxQueries];
        for (int q = 0; q < n; ++q) {
            sums[q] = softmax(queries[p].each[q], tiles, args.scores + q * args.score_stride);
        }
        if (cache.type == CacheType::I8) {
            quantize_weights(cache, args, n, tiles);
            value_sums<std::min(kValueQueries, 3)>(cache, args, queries[p].each, n, tiles, args.scores, sums);
        } else {
            value_sums<kValueQueries>(cache, args, queries[p].each, n, tiles, args.scores, sums);
        }
    }
}

}  // namespace

constexpr KernelTable kTable = {
    SHOAL_ISA_NAME, linear, rms_norm, convert, silu_mul, rope_and_cache, attention, sample_row, kPanelsPerUnit,
};

}  // namespace shoal::SHOAL_ISA
