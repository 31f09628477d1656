// Matrix products on the AMX unit. Included by kernels_impl.h where SHOAL_AMX is defined.
//
// Quantized weights, 16 rows and more: a tile instruction multiplies 16 rows by 16 columns over one group of 32
// features, the same exact integer sums that the vector kernels make. They go through memory into vector registers,
// where scales are applied in the very order of `quant_tile`: a row's bits do not depend on which of the two computed
// it, so fewer rows are left to the vector kernels, which are faster there. Results are read two groups late, because
// a tile's store is too slow to be waited for.
//
// bfloat16 weights, any number of rows: the packed layout is that of a tile, and sums stay in the unit over all
// features. The unit's order of summation is its own, so bfloat16 products differ in bits from those of other sets.

constexpr int kAmxRows = 16;

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t column_bytes[16] = {};
    uint8_t rows[16] = {};
};

// Holds the unit for this thread; `shape` says how many rows and bytes each tile has.
class TileUnit {
  public:
    TileUnit() = default;
    ~TileUnit() { _tile_release(); }
    TileUnit(const TileUnit&) = delete;
    TileUnit& operator=(const TileUnit&) = delete;

    // Tiles 0 and 1 are sums, 2 and 3 activations, 4 and 5 weights, of one group of features.
    void shape_int8(int64_t group) {
        TileConfig config;
        for (int i = 0; i < 6; ++i) {
            config.rows[i] = static_cast<uint8_t>(i < 4 ? kAmxRows : group / 4);
            config.column_bytes[i] = static_cast<uint16_t>(i == 2 || i == 3 ? group : 64);
        }
        _tile_loadconfig(&config);
    }
    // Tiles 0 to 3 are sums. A single block of activations, which may have less than 16 rows, is in tile 7 and its
    // weights in 4 to 6; two blocks are always whole, and so is every tile then.
    void shape_bf16(int rows) {
        TileConfig config;
        for (int i = 0; i < 8; ++i) {
            config.rows[i] = static_cast<uint8_t>(i < 4 || i == 7 ? rows : 16);
            config.column_bytes[i] = 64;
        }
        _tile_loadconfig(&config);
    }
};

// ---- quantized -----------------------------------------------------------------------------------------------------

constexpr int kAmxLag = 2;
constexpr int kAmxRing = 4;  // a power of two, more than the lag
// A tail of fewer rows is cheaper on the vector kernels than as a second pass over rows already done.
constexpr int64_t kAmxLeastTail = 6;

// Unpacked: 8 x 64 bytes, then 16 float scales and, for asymmetric formats, 16 float minima. Q8C: 16 x 64 bytes.
template <Format kFormat> constexpr int64_t amx_group_bytes() {
    if constexpr (kFormat == Format::Q8C) return group_bytes(kFormat);
    return 512 + (Traits<kFormat>::biased ? 64 : 128);
}

template <Format kFormat> void unpack_signed(const uint8_t* packed, int64_t groups, uint8_t* out) {
    constexpr int kVectors = static_cast<int>(group_size(kFormat)) / 4;
    const W bias = _mm512_set1_epi8(-128);
    for (int64_t g = 0; g < groups; ++g) {
        for (int v = 0; v < kVectors; ++v) w_store(out + 64 * v, _mm512_xor_si512(w_load(packed + 64 * v), bias));
        if constexpr (kFormat != Format::Q8C) {
            f_store(reinterpret_cast<float*>(out + 512), load_scales<Traits<kFormat>::half>(packed + 512, 0));
        }
        packed += group_bytes(kFormat);
        out += amx_group_bytes<kFormat>();
    }
}

template <Format kFormat> void unpack_bytes(const uint8_t* packed, int64_t groups, uint8_t* out) {
    for (int64_t g = 0; g < groups; ++g) {
        for (int v = 0; v < 8; ++v) w_store(out + 64 * v, w_load(packed + 64 * v));
        float* scales = reinterpret_cast<float*>(out + 512);
        f_store(scales, load_scales<Traits<kFormat>::half>(packed + 512, 0));
        f_store(scales + 16, load_scales<Traits<kFormat>::half>(packed + 512, 1));
        packed += group_bytes(kFormat);
        out += amx_group_bytes<kFormat>();
    }
}

template <Format kFormat> void unpack_for_amx(const uint8_t* packed, int64_t groups, uint8_t* out) {
    if constexpr (Traits<kFormat>::four)
        unpack_panel<kFormat>(packed, groups, out);
    else if constexpr (Traits<kFormat>::biased)
        unpack_signed<kFormat>(packed, groups, out);
    else
        unpack_bytes<kFormat>(packed, groups, out);
}

// The sums of one group into the ring. Two sets of tiles take turns, so that two groups are under way. (GCC's
// intrinsics paste the tile's number into the instruction, so it must be written out.)
template <bool kSigned, bool kOdd>
inline void amx_multiply(const int8_t* a, int64_t a_stride, const uint8_t* weight, int32_t* sums) {
    if constexpr (kOdd) {
        _tile_zero(1);
        _tile_loadd(3, a, a_stride);
        _tile_loadd(5, weight, 64);
        if constexpr (kSigned)
            _tile_dpbssd(1, 3, 5);
        else
            _tile_dpbsud(1, 3, 5);
        _tile_stored(1, sums, 64);
    } else {
        _tile_zero(0);
        _tile_loadd(2, a, a_stride);
        _tile_loadd(4, weight, 64);
        if constexpr (kSigned)
            _tile_dpbssd(0, 2, 4);
        else
            _tile_dpbsud(0, 2, 4);
        _tile_stored(0, sums, 64);
    }
}

template <Format kFormat>
inline void amx_scale(const int32_t* dots, const uint8_t* weight, const GroupScale* scales, int64_t stride, F* sum) {
    if constexpr (kFormat == Format::Q8C) {
#pragma GCC unroll 16
        for (int r = 0; r < kAmxRows; ++r) {
            const I dot = _mm512_load_si512(dots + r * kLanes);
            sum[r] = f_fma(f_set1(scales[r * stride].scale), i_to_f(dot), sum[r]);
        }
        return;
    }
    const F d = f_load(reinterpret_cast<const float*>(weight + 512));
    if constexpr (Traits<kFormat>::biased) {
#pragma GCC unroll 16
        for (int r = 0; r < kAmxRows; ++r) {
            const F scale = f_mul(f_set1(scales[r * stride].scale), d);
            sum[r] = f_fma(scale, i_to_f(_mm512_load_si512(dots + r * kLanes)), sum[r]);
        }
    } else {
        const F m = f_load(reinterpret_cast<const float*>(weight + 576));
#pragma GCC unroll 16
        for (int r = 0; r < kAmxRows; ++r) {
            const F scale = f_mul(f_set1(scales[r * stride].scale), d);
            sum[r] = f_fma(scale, i_to_f(_mm512_load_si512(dots + r * kLanes)), sum[r]);
            sum[r] = f_fma(f_set1(scales[r * stride].scaled_sum), m, sum[r]);
        }
    }
}

// Sixteen rows by one unpacked panel.
template <Format kFormat>
void amx_tile(const Linear& args, const uint8_t* unpacked, const Source& source, int64_t row, int64_t panel) {
    constexpr bool kSigned = Traits<kFormat>::biased;
    constexpr int64_t kBytes = amx_group_bytes<kFormat>();
    constexpr int64_t kSize = group_size(kFormat);
    const int64_t groups = (args.features + kSize - 1) / kSize;
    const int8_t* a = args.a_q8 + row * args.a_stride;
    const GroupScale* scales = args.a_scales + row * args.a_scale_stride;
    alignas(64) int32_t ring[kAmxRing][kAmxRows * kLanes];
    F sum[kAmxRows];
#pragma GCC unroll 16
    for (int r = 0; r < kAmxRows; ++r) sum[r] = f_zero();
    const auto scale = [&](int64_t g) {
        amx_scale<kFormat>(ring[g % kAmxRing], unpacked + g * kBytes, scales + g, args.a_scale_stride, sum);
    };
    int64_t g = 0;
    for (; g + 2 <= groups; g += 2) {
        fetch_ahead<1>(source, g);
        amx_multiply<kSigned, false>(a + g * kSize, args.a_stride, unpacked + g * kBytes, ring[g % kAmxRing]);
        if (g >= kAmxLag) scale(g - kAmxLag);
        fetch_ahead<1>(source, g + 1);
        amx_multiply<kSigned, true>(a + (g + 1) * kSize, args.a_stride, unpacked + (g + 1) * kBytes,
                                    ring[(g + 1) % kAmxRing]);
        if (g + 1 >= kAmxLag) scale(g + 1 - kAmxLag);
    }
    if (g < groups) {
        amx_multiply<kSigned, false>(a + g * kSize, args.a_stride, unpacked + g * kBytes, ring[g % kAmxRing]);
        if (g >= kAmxLag) scale(g - kAmxLag);
        ++g;
    }
    for (int64_t late = std::max<int64_t>(0, groups - kAmxLag); late < groups; ++late) scale(late);
    if constexpr (kFormat == Format::Q8C) {
        const F d = f_load(reinterpret_cast<const float*>(source.data + groups * kBytes));
#pragma GCC unroll 16
        for (int r = 0; r < kAmxRows; ++r) sum[r] = f_mul(sum[r], d);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kAmxRows; ++r) store_panel(args, row + r, panel, sum[r]);
}

template <Format kFormat> void amx_linear(const Linear& args, int64_t rows, int64_t begin, int64_t end) {
    TileUnit unit;
    unit.shape_int8(group_size(kFormat));
    const int64_t stride = panel_bytes(kFormat, args.features);
    const int64_t groups = (args.features + group_size(kFormat) - 1) / group_size(kFormat);
    for (int64_t panel = begin; panel < end; ++panel) {
        const uint8_t* packed = args.weight + panel * stride;
        unpack_for_amx<kFormat>(packed, groups, args.scratch);
        Source source{packed, stride, panel + 1 < end ? packed + stride : nullptr, stride, group_bytes(kFormat)};
        int64_t row = 0;
        for (; row + kAmxRows <= rows; row += kAmxRows) {
            amx_tile<kFormat>(args, args.scratch, source, row, panel);
            source.ahead = nullptr;
        }
        if (rows - row >= kAmxLeastTail) {
            // Some rows are computed twice, to the same bits.
            amx_tile<kFormat>(args, args.scratch, source, rows - kAmxRows, panel);
        } else if (row < rows) {
            tile_of<kFormat, 1, kQuantRows>(args, source, rows - row, row, panel);
        }
    }
}

// ---- bfloat16 ------------------------------------------------------------------------------------------------------

constexpr int kAmxPanels = 4;
constexpr int64_t kAmxTileBytes = 1024;  // 16 pairs of features x 16 columns

template <int kPanels> inline void clear_sums() {
    _tile_zero(0);
    if constexpr (kPanels > 1) _tile_zero(1);
    if constexpr (kPanels > 2) _tile_zero(2);
    if constexpr (kPanels > 3) _tile_zero(3);
}

// One block of rows by kPanels panels, one group.
template <int kPanels> inline void multiply_block(const uint16_t* a, int64_t a_bytes, const uint8_t* w,
                                                  int64_t stride) {
    _tile_loadd(7, a, a_bytes);
    _tile_loadd(4, w, 64);
    _tile_dpbf16ps(0, 7, 4);
    if constexpr (kPanels > 1) {
        _tile_loadd(5, w + stride, 64);
        _tile_dpbf16ps(1, 7, 5);
    }
    if constexpr (kPanels > 2) {
        _tile_loadd(6, w + 2 * stride, 64);
        _tile_dpbf16ps(2, 7, 6);
    }
    if constexpr (kPanels > 3) {
        _tile_loadd(4, w + 3 * stride, 64);
        _tile_dpbf16ps(3, 7, 4);
    }
}

template <int kSum> inline void store_sums(const Linear& args, int64_t row, int rows, int64_t panel) {
    alignas(64) float sums[kAmxRows * kLanes];
    if constexpr (kSum == 0) _tile_stored(0, sums, 64);
    if constexpr (kSum == 1) _tile_stored(1, sums, 64);
    if constexpr (kSum == 2) _tile_stored(2, sums, 64);
    if constexpr (kSum == 3) _tile_stored(3, sums, 64);
    for (int r = 0; r < rows; ++r) store_panel(args, row + r, panel, f_load(sums + r * kLanes));
}

template <int kPanels> inline void store_block(const Linear& args, int64_t row, int rows, int64_t panel) {
    store_sums<0>(args, row, rows, panel);
    if constexpr (kPanels > 1) store_sums<1>(args, row, rows, panel + 1);
    if constexpr (kPanels > 2) store_sums<2>(args, row, rows, panel + 2);
    if constexpr (kPanels > 3) store_sums<3>(args, row, rows, panel + 3);
}

// One block of rows by kPanels panels, sending for the panels that come next if there are more.
template <int kPanels>
void one_block(const Linear& args, int64_t row, int rows, int64_t panel, const uint8_t* weight, int64_t stride,
               bool more) {
    const uint16_t* a = args.a_bf16 + row * args.a_stride;
    const int64_t groups = args.features / kGroup;
    clear_sums<kPanels>();
    for (int64_t g = 0; g < groups; ++g) {
        if (more) {
            const uint8_t* ahead = weight + kPanels * stride + g * kAmxTileBytes;
            for (int p = 0; p < kPanels; ++p) {
                for (int64_t i = 0; i < kAmxTileBytes; i += kCacheLine)
                    __builtin_prefetch(ahead + p * stride + i, 0, 2);
            }
        }
        multiply_block<kPanels>(a + g * kGroup, args.a_stride * 2, weight + g * kAmxTileBytes, stride);
    }
    store_block<kPanels>(args, row, rows, panel);
}

// Two whole blocks of rows by two panels: each tile that is loaded is used twice.
inline void two_blocks(const Linear& args, int64_t row, int64_t panel, const uint8_t* weight, int64_t stride) {
    const int64_t groups = args.features / kGroup;
    const int64_t a_bytes = args.a_stride * 2;
    const uint16_t* a = args.a_bf16 + row * args.a_stride;
    const uint16_t* b = a + kAmxRows * args.a_stride;
    clear_sums<4>();
    for (int64_t g = 0; g < groups; ++g) {
        _tile_loadd(4, a + g * kGroup, a_bytes);
        _tile_loadd(6, weight + g * kAmxTileBytes, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, weight + stride + g * kAmxTileBytes, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, b + g * kGroup, a_bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    store_sums<0>(args, row, kAmxRows, panel);
    store_sums<1>(args, row, kAmxRows, panel + 1);
    store_sums<2>(args, row + kAmxRows, kAmxRows, panel);
    store_sums<3>(args, row + kAmxRows, kAmxRows, panel + 1);
}

template <int kPanels> void amx_panels(const Linear& args, TileUnit& unit, int64_t rows, int64_t panel, bool more) {
    const int64_t stride = panel_bytes(Format::BF16, args.features);
    const uint8_t* weight = args.weight + panel * stride;
    const int first = static_cast<int>(std::min<int64_t>(rows, kAmxRows));
    unit.shape_bf16(first);
    one_block<kPanels>(args, 0, first, panel, weight, stride, more);
    int64_t row = kAmxRows;
    if constexpr (kPanels % 2 == 0) {
        // Two panels stay in the first-level cache while the rows pass by.
        const int64_t end = row + std::max<int64_t>(0, rows - row) / (2 * kAmxRows) * (2 * kAmxRows);
        for (int p = 0; p < kPanels; p += 2) {
            for (int64_t r = row; r < end; r += 2 * kAmxRows) {
                two_blocks(args, r, panel + p, weight + p * stride, stride);
            }
        }
        row = end;
    }
    for (; row + kAmxRows <= rows; row += kAmxRows) {
        one_block<kPanels>(args, row, kAmxRows, panel, weight, stride, false);
    }
    // The last block may overlap the one before: some rows are computed twice, to the same bits.
    if (row < rows) one_block<kPanels>(args, rows - kAmxRows, kAmxRows, panel, weight, stride, false);
}

void amx_linear_bf16(const Linear& args, int64_t rows, int64_t begin, int64_t end) {
    TileUnit unit;
    int64_t panel = begin;
    for (; panel + kAmxPanels <= end; panel += kAmxPanels) {
        amx_panels<kAmxPanels>(args, unit, rows, panel, panel + 2 * kAmxPanels <= end);
    }
    for (; panel + 2 <= end; panel += 2) amx_panels<2>(args, unit, rows, panel, false);
    for (; panel < end; ++panel) amx_panels<1>(args, unit, rows, panel, false);
}
