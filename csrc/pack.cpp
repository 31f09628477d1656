// Packing runs once, at load. It is plain C++: its cost is a fraction of a second and its result must not depend on
// the instruction set.
#include "pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace shoal {
namespace {

float half(const uint8_t* p) {
    uint16_t h;
    std::memcpy(&h, p, 2);
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
    const uint32_t exponent = (h >> 10) & 0x1fu, mantissa = h & 0x3ffu;
    if (exponent == 0) {
        const float value = std::ldexp(static_cast<float>(mantissa), -24);
        return sign ? -value : value;
    }
    const uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | (mantissa << 13);
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// Only for values that a half holds exactly.
uint16_t exact_half(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
    const float magnitude = std::fabs(value);
    if (magnitude < std::ldexp(1.0f, -14))
        return static_cast<uint16_t>(sign | static_cast<uint16_t>(std::ldexp(magnitude, 24)));
    const uint32_t exponent = ((bits >> 23) & 0xffu) - 112;
    return static_cast<uint16_t>(sign | (exponent << 10) | ((bits >> 13) & 0x3ffu));
}

uint16_t bfloat_bits(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    if (x != x) return 0x7fc0;
    return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

struct BlockFacts {
    int64_t elements, bytes;
};

BlockFacts facts(TensorType type) {
    switch (type) {
        case TensorType::F32: return {1, 4};
        case TensorType::F16: return {1, 2};
        case TensorType::BF16: return {1, 2};
        case TensorType::Q8_0: return {32, 34};
        case TensorType::Q4_0: return {32, 18};
        case TensorType::Q4_1: return {32, 20};
        case TensorType::Q5_0: return {32, 22};
        case TensorType::Q5_1: return {32, 24};
        case TensorType::Q4_K: return {256, 144};
        case TensorType::Q5_K: return {256, 176};
        case TensorType::Q6_K: return {256, 210};
    }
    return {1, 0};
}

// Six-bit scale and minimum of group j of a K-quant block.
void k_scale(const uint8_t* packed, int j, int* scale, int* minimum) {
    if (j < 4) {
        *scale = packed[j] & 63;
        *minimum = packed[j + 4] & 63;
    } else {
        *scale = (packed[j + 4] & 15) | ((packed[j - 4] >> 6) << 4);
        *minimum = (packed[j + 4] >> 4) | ((packed[j] >> 6) << 4);
    }
}

// Group g of 32 values of a stored row as integers and value = scale * (q - offset) + minimum. Not for Q6_K, whose
// scales cover 16 values.
struct Group {
    uint8_t q[kGroup];
    float scale;
    float minimum;
    int offset;
};

void nibbles(const uint8_t* p, uint8_t* q) {
    for (int i = 0; i < 16; ++i) {
        q[i] = p[i] & 15;
        q[16 + i] = p[i] >> 4;
    }
}

void fifth_bits(const uint8_t* p, uint8_t* q) {
    uint32_t bits;
    std::memcpy(&bits, p, 4);
    for (int i = 0; i < 32; ++i) q[i] = static_cast<uint8_t>(q[i] | (((bits >> i) & 1u) << 4));
}

void read_group(TensorType type, const uint8_t* row, int64_t g, Group* out) {
    out->minimum = 0.0f;
    out->offset = 0;
    switch (type) {
        case TensorType::Q8_0: {
            const uint8_t* b = row + g * 34;
            out->scale = half(b);
            out->offset = 128;
            for (int i = 0; i < 32; ++i) out->q[i] = static_cast<uint8_t>(b[2 + i] ^ 0x80);
            return;
        }
        case TensorType::Q4_0: {
            const uint8_t* b = row + g * 18;
            out->scale = half(b);
            out->offset = 8;
            nibbles(b + 2, out->q);
            return;
        }
        case TensorType::Q4_1: {
            const uint8_t* b = row + g * 20;
            out->scale = half(b);
            out->minimum = half(b + 2);
            nibbles(b + 4, out->q);
            return;
        }
        case TensorType::Q5_0: {
            const uint8_t* b = row + g * 22;
            out->scale = half(b);
            out->offset = 16;
            nibbles(b + 6, out->q);
            fifth_bits(b + 2, out->q);
            return;
        }
        case TensorType::Q5_1: {
            const uint8_t* b = row + g * 24;
            out->scale = half(b);
            out->minimum = half(b + 2);
            nibbles(b + 8, out->q);
            fifth_bits(b + 4, out->q);
            return;
        }
        case TensorType::Q4_K:
        case TensorType::Q5_K: {
            const bool five = type == TensorType::Q5_K;
            const uint8_t* b = row + g / 8 * (five ? 176 : 144);
            const int j = static_cast<int>(g % 8);
            int scale, minimum;
            k_scale(b + 4, j, &scale, &minimum);
            out->scale = half(b) * static_cast<float>(scale);
            out->minimum = -(half(b + 2) * static_cast<float>(minimum));
            const uint8_t* high = b + 16;
            const uint8_t* low = b + (five ? 48 : 16) + 32 * (j / 2);
            for (int i = 0; i < 32; ++i) {
                out->q[i] = static_cast<uint8_t>((low[i] >> (4 * (j % 2))) & 15);
                if (five) out->q[i] = static_cast<uint8_t>(out->q[i] | (((high[i] >> j) & 1) << 4));
            }
            return;
        }
        default: return;
    }
}

void dequantize_q6(const uint8_t* b, float* out) {
    const uint8_t* low = b;
    const uint8_t* high = b + 128;
    const int8_t* scales = reinterpret_cast<const int8_t*>(b + 192);
    const float d = half(b + 208);
    for (int i = 0; i < 256; ++i) {
        const int part = i / 128, quarter = i % 128 / 32, l = i % 32;
        const int nibble = (low[part * 64 + (quarter % 2) * 32 + l] >> (4 * (quarter / 2))) & 15;
        const int q = (nibble | (((high[part * 32 + l] >> (2 * quarter)) & 3) << 4)) - 32;
        out[i] = d * static_cast<float>(scales[i / 16]) * static_cast<float>(q);
    }
}

float minimum_of(const Group& group) {
    return group.offset && group.offset != 128 ? group.scale * static_cast<float>(-group.offset) : group.minimum;
}

bool is_float(TensorType type) {
    return type == TensorType::F32 || type == TensorType::F16 || type == TensorType::BF16;
}

bool is_four_bit(TensorType type) {
    return type == TensorType::Q4_0 || type == TensorType::Q4_1 || type == TensorType::Q4_K;
}

// The nearest half, ties to even; beyond its range the largest one.
float round_to_half(float x) {
    const float magnitude = std::fabs(x);
    if (!(magnitude < 65504.0f)) return std::copysign(65504.0f, x);
    int exponent;
    std::frexp(magnitude, &exponent);
    const float unit = std::ldexp(1.0f, std::max(exponent, -13) - 11);
    return std::copysign(std::nearbyint(magnitude / unit) * unit, x);
}

// Thirty-two values as four bits between their least and greatest, with scale and minimum that a half can hold.
void round_to_four_bits(const float* x, Group* out) {
    const auto [least, greatest] = std::minmax_element(x, x + kGroup);
    out->offset = 0;
    out->minimum = round_to_half(*least);
    out->scale = round_to_half((*greatest - out->minimum) / 15.0f);
    const float inverse = out->scale > 0.0f ? 1.0f / out->scale : 0.0f;
    for (int i = 0; i < kGroup; ++i) {
        out->q[i] = static_cast<uint8_t>(std::clamp(std::nearbyint((x[i] - out->minimum) * inverse), 0.0f, 15.0f));
    }
}

// A group of any type as eight symmetric bits with a float scale (what Q6_K becomes).
void requantize_group(const float* x, uint8_t* q, float* scale) {
    float largest = 0.0f;
    for (int i = 0; i < kGroup; ++i) largest = std::max(largest, std::fabs(x[i]));
    *scale = largest / 127.0f;
    const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
    for (int i = 0; i < kGroup; ++i)
        q[i] = static_cast<uint8_t>(128 + static_cast<int>(std::nearbyint(x[i] * inverse)));
}

struct FormatFacts {
    bool four, symmetric, half;
};

FormatFacts describe(Format format) {
    switch (format) {
        case Format::Q4H: return {true, false, true};
        case Format::Q4F: return {true, false, false};
        case Format::Q8SH: return {false, true, true};
        case Format::Q8SF: return {false, true, false};
        case Format::Q8AH: return {false, false, true};
        default: return {false, false, false};
    }
}

const uint8_t* find_row(const WeightPart* parts, int64_t num_parts, int64_t column, TensorType* type) {
    for (int64_t i = 0; i < num_parts; ++i) {
        if (column < parts[i].rows) {
            *type = parts[i].type;
            return parts[i].data + column * parts[i].row_bytes;
        }
        column -= parts[i].rows;
    }
    return nullptr;
}

void pack_quantized(Format format, const uint8_t* row, TensorType type, int column, int64_t features, uint8_t* panel) {
    const FormatFacts f = describe(format);
    const int64_t bytes = group_bytes(format);
    std::vector<float> values;
    const bool to_four_bits = f.four && !is_four_bit(type);
    if (type == TensorType::Q6_K || to_four_bits) {
        values.resize(static_cast<size_t>(features));
        dequantize_row(type, row, features, values.data());
    }
    Group group{};
    for (int64_t g = 0; g < features / kGroup; ++g) {
        uint8_t* out = panel + g * bytes;
        if (to_four_bits)
            round_to_four_bits(values.data() + g * kGroup, &group);
        else if (type == TensorType::Q6_K)
            requantize_group(values.data() + g * kGroup, group.q, &group.scale);
        else
            read_group(type, row, g, &group);
        if (f.four) {
            for (int v = 0; v < 4; ++v) {
                for (int j = 0; j < 4; ++j) {
                    out[64 * v + 4 * column + j] =
                        static_cast<uint8_t>(group.q[4 * v + j] | (group.q[16 + 4 * v + j] << 4));
                }
            }
        } else {
            for (int v = 0; v < 8; ++v) std::memcpy(out + 64 * v + 4 * column, group.q + 4 * v, 4);
        }
        uint8_t* scales = out + (f.four ? 256 : 512);
        const float minimum = minimum_of(group);
        if (f.half) {
            const uint16_t d = exact_half(group.scale), m = exact_half(minimum);
            std::memcpy(scales + 2 * column, &d, 2);
            if (!f.symmetric) std::memcpy(scales + 32 + 2 * column, &m, 2);
        } else {
            std::memcpy(scales + 4 * column, &group.scale, 4);
            if (!f.symmetric) std::memcpy(scales + 64 + 4 * column, &minimum, 4);
        }
    }
}

// One scale for the column, groups of 64 features.
void pack_column_scaled(const float* values, int column, int64_t features, uint8_t* panel) {
    float largest = 0.0f;
    for (int64_t k = 0; k < features; ++k) largest = std::max(largest, std::fabs(values[k]));
    const float scale = largest / 127.0f, inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
    const int64_t padded = round_up(features, kWideGroup);
    for (int64_t k = 0; k < padded; ++k) {
        const int level = k < features ? static_cast<int>(std::nearbyint(values[k] * inverse)) : 0;
        panel[k / 4 * 64 + 4 * column + k % 4] = static_cast<uint8_t>(128 + level);
    }
    std::memcpy(panel + padded * kLanes + 4 * column, &scale, 4);
}

}  // namespace

bool can_pack(TensorType type, Format format, int64_t features) {
    if (!is_quantized(format) || format == Format::Q8C) return true;
    if (format == Format::Q4H && is_float(type)) return features % kGroup == 0;
    return !is_float(type);
}

int64_t row_bytes(TensorType type, int64_t features) {
    const BlockFacts f = facts(type);
    return features % f.elements ? 0 : features / f.elements * f.bytes;
}

void dequantize_row(TensorType type, const uint8_t* row, int64_t features, float* out) {
    switch (type) {
        case TensorType::F32: std::memcpy(out, row, static_cast<size_t>(features) * 4); return;
        case TensorType::F16:
            for (int64_t i = 0; i < features; ++i) out[i] = half(row + 2 * i);
            return;
        case TensorType::BF16:
            for (int64_t i = 0; i < features; ++i) {
                const uint32_t bits =
                    (static_cast<uint32_t>(row[2 * i]) << 16) | (static_cast<uint32_t>(row[2 * i + 1]) << 24);
                std::memcpy(out + i, &bits, 4);
            }
            return;
        case TensorType::Q6_K:
            for (int64_t b = 0; b < features / 256; ++b) dequantize_q6(row + 210 * b, out + 256 * b);
            return;
        default: break;
    }
    Group group{};
    for (int64_t g = 0; g < features / kGroup; ++g) {
        read_group(type, row, g, &group);
        for (int i = 0; i < kGroup; ++i) {
            out[g * kGroup + i] = group.scale * static_cast<float>(group.q[i] - group.offset) + group.minimum;
        }
    }
}

void pack_panels(Format format, const WeightPart* parts, int64_t num_parts, int64_t features, int64_t begin,
                 int64_t end, uint8_t* out) {
    const int64_t bytes = panel_bytes(format, features);
    std::vector<float> values(static_cast<size_t>(features));
    for (int64_t p = begin; p < end; ++p) {
        uint8_t* panel = out + p * bytes;
        std::memset(panel, 0, static_cast<size_t>(bytes));
        for (int column = 0; column < kLanes; ++column) {
            TensorType type{};
            const uint8_t* row = find_row(parts, num_parts, p * kLanes + column, &type);
            if (!row) continue;
            if (is_quantized(format) && format != Format::Q8C) {
                pack_quantized(format, row, type, column, features, panel);
                continue;
            }
            dequantize_row(type, row, features, values.data());
            if (format == Format::Q8C) {
                pack_column_scaled(values.data(), column, features, panel);
            } else if (format == Format::F32) {
                for (int64_t k = 0; k < features; ++k) {
                    std::memcpy(panel + (k * kLanes + column) * 4, &values[static_cast<size_t>(k)], 4);
                }
            } else {
                for (int64_t k = 0; k < features; ++k) {
                    const uint16_t bits = bfloat_bits(values[static_cast<size_t>(k)]);
                    std::memcpy(panel + k / 2 * 64 + column * 4 + k % 2 * 2, &bits, 2);
                }
            }
        }
    }
}

}  // namespace shoal
