// Reading the file's tensor types and packing them into panels (see common.h for the layouts).
#pragma once

#include "common.h"

namespace shoal {

// Bytes of one row of `features` values as stored; 0 if features does not fill whole blocks.
int64_t row_bytes(TensorType type, int64_t features);

// One stored row as float32, each value rounded once.
void dequantize_row(TensorType type, const uint8_t* row, int64_t features, float* out);

// Some rows (output features) of a weight, as stored.
struct WeightPart {
    TensorType type;
    const uint8_t* data;
    int64_t rows;
    int64_t row_bytes;
};

// Whether a stored type can be packed so. 4-bit types keep their own integers in the 4-bit formats; whatever else is
// asked for in 4 or in 8 bits with one scale per column is rounded once more.
bool can_pack(TensorType type, Format format, int64_t features);

// Packs panels [begin, end) of the concatenation of `parts`. Columns past the last row are zero.
void pack_panels(Format format, const WeightPart* parts, int64_t num_parts, int64_t features, int64_t begin,
                 int64_t end, uint8_t* out);

}  // namespace shoal
