// Types shared by the packing code, the kernels and the recorded program.
//
// Everything here is plain data: no ownership, no exceptions. Lengths are checked by the binding
// (module.cpp) and by the Python side before any of these structures is built.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sampler.h"

namespace shoal {

// Tensor types as the model file stores them (values are our own).
enum class TensorType : int32_t { F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K };

// How a packed weight lies in memory. Columns (output features) are packed in panels of 16, so that one vector
// lane is one column and the sum over input features is one fixed chain per (row, column), whatever the batch.
// Quantized panels are sequences of groups of 32 input features:
//   4-bit:  4 x 64 bytes; byte 4*c+j of vector v holds feature 4*v+j (low nibble) and 16+4*v+j (high) of column c
//   8-bit:  8 x 64 bytes; byte 4*c+j of vector v is feature 4*v+j of column c
//   then 16 scales d and, for asymmetric formats, 16 minima m (half or float32).
// Q8C has groups of 64 features, 16 x 64 bytes, the last one filled up with zeros, and at the panel's end 16 scales.
// Value = d*q + m (asymmetric) or d*(q-128) (symmetric, stored biased by 128).
enum class Format : int32_t {
    F32,   // [K][16] float
    BF16,  // [ceil(K/2)][16][2] bfloat16
    Q4H,   // 4-bit asymmetric, half scales
    Q4F,   // 4-bit asymmetric, float scales
    Q8SH,  // 8-bit symmetric, half scales
    Q8SF,  // 8-bit symmetric, float scales
    Q8AH,  // up to 7-bit asymmetric in a byte, half scales
    Q8AF,  // the same, float scales
    Q8C,   // 8-bit symmetric, one float scale per column, activations in groups of 64
};

constexpr int kLanes = 16;      // columns of a panel, floats of a vector, tokens of a KV tile
constexpr int kGroup = 32;      // input features that share a scale
constexpr int kWideGroup = 64;  // the same for Q8C
constexpr int kCacheLine = 64;

constexpr bool is_quantized(Format format) { return format >= Format::Q4H; }
constexpr int64_t group_size(Format format) { return format == Format::Q8C ? kWideGroup : kGroup; }

constexpr int64_t group_bytes(Format format) {
    switch (format) {
        case Format::Q4H: return 256 + 64;
        case Format::Q4F: return 256 + 128;
        case Format::Q8SH: return 512 + 32;
        case Format::Q8SF: return 512 + 64;
        case Format::Q8AH: return 512 + 64;
        case Format::Q8AF: return 512 + 128;
        case Format::Q8C: return 1024;
        default: return 0;
    }
}

// Bytes of one packed panel of 16 columns over `features` input features.
constexpr int64_t panel_bytes(Format format, int64_t features) {
    if (format == Format::F32) return features * kLanes * 4;
    if (format == Format::BF16) return (features + 1) / 2 * 64;
    if (format == Format::Q8C) return (features + kWideGroup - 1) / kWideGroup * group_bytes(format) + 4 * kLanes;
    return features / kGroup * group_bytes(format);
}

constexpr int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Scale of one group of quantized activations: x ~ scale * q.
struct GroupScale {
    float scale;
    float scaled_sum;      // scale * sum(q): what multiplies a weight's minimum
    int32_t biased_start;  // -128 * sum(q): takes the bias of symmetric 8-bit weights out again
};

// A matrix product: out[rows, columns] = a[rows, features] x weightT (+ bias) (+ residual).
struct Linear {
    const uint8_t* weight;
    Format format;
    int64_t features;
    int64_t columns;
    const float* bias;  // [columns] or null

    const float* a_f32;      // F32 weights
    const uint16_t* a_bf16;  // BF16 weights; rows padded with zeros to an even length
    const int8_t* a_q8;      // quantized weights
    const GroupScale* a_scales;
    int64_t a_stride;        // elements between rows of whichever a_* is used
    int64_t a_scale_stride;  // groups between rows of a_scales

    float* out;
    const float* residual;  // same stride as out, or null
    int64_t out_stride;

    uint8_t* scratch;  // linear_scratch_bytes(features), of this thread
};

// What unpacking two 4-bit panels, or one of 8 bits, takes.
constexpr int64_t linear_scratch_bytes(int64_t features) {
    return 2 * round_up(features, kWideGroup) / kGroup * group_bytes(Format::Q8AF);
}

// Forms in which a row of activations may be wanted by its consumers. Null means not wanted.
struct RowForms {
    float* f32;
    uint16_t* bf16;
    int8_t* q8;
    GroupScale* scales;
    int64_t group;  // values per scale: kGroup or kWideGroup
};

// What keys and values are stored as.
enum class CacheType : int32_t { F32, BF16, I8 };

// Geometry of the paged KV cache. One layer is [block][K | V], and each half is [head][tile of 16 tokens]:
//   float32    K [dim][16 tokens],                 V [16 tokens][dim]
//   bfloat16   K [dim/2][16][2], dims in pairs,    V [8][dim][2], tokens in pairs
//   8-bit      K [dim/4][16][4], biased by 128,    V [16][dim], signed; each tile ends in 16 float scales, one per
//   token
struct CacheGeometry {
    int32_t num_blocks;
    int32_t block_size;  // tokens, a multiple of 16
    int32_t num_kv_heads;
    int32_t head_dim;
    int32_t padded_dim;  // head_dim rounded up to 16; the rest is zero
    CacheType type;

    int64_t value_bytes() const {
        const int64_t size = type == CacheType::F32 ? 4 : type == CacheType::BF16 ? 2 : 1;
        return int64_t(padded_dim) * kLanes * size;
    }
    int64_t tile_bytes() const { return value_bytes() + (type == CacheType::I8 ? 4 * kLanes : 0); }
    int64_t tiles_per_block() const { return block_size / kLanes; }
    int64_t half_bytes() const { return num_kv_heads * tiles_per_block() * tile_bytes(); }
    int64_t block_bytes() const { return 2 * half_bytes(); }
    int64_t layer_bytes() const { return block_bytes() * num_blocks; }
    int64_t key_tile(int64_t block, int64_t head, int64_t tile) const {
        return block * block_bytes() + (head * tiles_per_block() + tile) * tile_bytes();
    }
    int64_t value_tile(int64_t block, int64_t head, int64_t tile) const {
        return key_tile(block, head, tile) + half_bytes();
    }
};

// Rotary embedding and KV write of one row.
struct RopeArgs {
    const float* qkv;      // [num_heads*dim | kv*dim | kv*dim]
    const float* cos_sin;  // [rotary_dim/2] cos then [rotary_dim/2] sin of this row's position
    int32_t rotary_dim;
    int32_t interleaved;
    int32_t num_heads;
    int32_t position;
    const int32_t* block_table;
    uint8_t* layer;      // this layer's cache
    int32_t clear_tail;  // zero the value slots after this one up to the end of its tile
    float* query;        // [num_heads][padded_dim]
};

// Attention of some query heads of one KV head, for consecutive rows of one sequence.
struct AttentionArgs {
    const uint8_t* layer;
    const int32_t* block_table;
    const float* query;    // first row; [row][num_heads][padded_dim]
    int64_t query_stride;  // elements between rows
    float* out;            // first row; [row][num_heads*head_dim]
    int64_t out_stride;
    int32_t position;  // of the first row
    int32_t rows;
    int32_t kv_head;
    int32_t head_begin, head_end;  // query heads
    float scale;
    float* scores;         // [kMaxQueries][score_stride]
    int64_t score_stride;  // >= tokens rounded up to 16
};

constexpr int kMaxQueries = 12;   // query vectors of one part of attention
constexpr int kMaxParts = 4;      // KV heads of one call
constexpr int kMaxHeadDim = 512;  // padded

// The kernels of one instruction set. All sets compute the same bits, the same operations in the same order, but for
// the bfloat16 products of the AMX unit (amx_tiles.h).
struct KernelTable {
    const char* name;
    void (*linear)(const Linear&, int64_t rows, int64_t panel_begin, int64_t panel_end);
    void (*rms_norm)(const float* x, const float* weight, float eps, int64_t width, float* out);
    void (*convert)(const float* x, int64_t begin, int64_t end, const RowForms& forms);
    void (*silu_mul)(const float* gate, const float* up, int64_t begin, int64_t end, float* out);
    void (*rope_and_cache)(const CacheGeometry&, const RopeArgs&);
    void (*attention)(const CacheGeometry&, const AttentionArgs* parts, int count);
    SampleRowFunction* sample_row;
    int64_t panels_per_unit;  // panels the linear kernel likes to take together
};

const KernelTable* kernels_amx();
const KernelTable* kernels_avx512();
const KernelTable* kernels_avx2();
const KernelTable* kernels_portable();

}  // namespace shoal
