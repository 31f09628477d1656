// The sampler, written once as plain loops over sixteen lanes that the compiler turns into vectors.
//
// Compiled once per instruction set. The order of every sum is written here and nothing contracts a multiply and an
// add, so all sets give the same bits. A row takes at most these passes over the vocabulary:
//   scan      maximum, validity, and the maxima of blocks (which later let whole blocks be skipped)
//   weigh     exp((z - max) / T) and its sum per block
//   top-p     a few passes that narrow down the weight at which the nucleus ends; only that band is sorted
// Greedy takes the scan alone; top-k goes on with its k survivors only.

#include "sampler.h"

#include <algorithm>
#include <bit>
#include <cfloat>
#include <limits>

#ifndef SHOAL_ISA
#define SHOAL_ISA isa_portable
#endif

namespace shoal::SHOAL_ISA {
namespace {

constexpr int kLane = kSampleLanes;
constexpr int kBlockSize = kSampleBlock;
constexpr int kSmallBand = 64;  // tokens that top-p sorts outright
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Own types, so that no standard template is instantiated that another instruction set's file instantiates too:
// the linker would keep only one of them.
struct Key {
    uint64_t rank;
};
struct Real {
    float value;
};
struct BetterKey {
    bool operator()(const Key& a, const Key& b) const { return a.rank > b.rank; }
};
struct LargerReal {
    bool operator()(const Real& a, const Real& b) const { return a.value > b.value; }
};

inline int block_count(int n) { return (n + kBlockSize - 1) / kBlockSize; }
inline int block_length(int n, int block) {
    const int left = n - block * kBlockSize;
    return left < kBlockSize ? left : kBlockSize;
}

// ---- random numbers: Philox4x32-10 (Salmon et al. 2011) ------------------------------------------------------------

// Key: the seed. Counter: (draw, 0, position). The first two words give 53 bits.
inline double uniform(uint64_t seed, int64_t position, uint32_t draw) {
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    const uint64_t where = static_cast<uint64_t>(position);
    uint32_t c0 = draw, c1 = 0, c2 = static_cast<uint32_t>(where), c3 = static_cast<uint32_t>(where >> 32);
    for (int round = 0; round < 10; ++round) {
        const uint64_t p0 = uint64_t{0xD2511F53u} * c0, p1 = uint64_t{0xCD9E8D57u} * c2;
        const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0, n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
        c1 = static_cast<uint32_t>(p1);
        c3 = static_cast<uint32_t>(p0);
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return static_cast<double>((uint64_t{c0} << 32 | c1) >> 11) * 0x1p-53;
}

// ---- exp and log ---------------------------------------------------------------------------------------------------

// e^x for x <= 0, within 2 ulp; 0 below -87, so that no result is subnormal. x = n ln2 + r with |r| <= ln2 / 2, ln2 in
// two parts so that little of r is lost, then Taylor to degree 7 (what it leaves out is below 6e-9).
inline float exponential(float x) {
    constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    const float shifted = x * 1.44269504f + kMagic;
    const float n = shifted - kMagic;
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.0f / 5040.0f;
    p = p * r + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = (p * r) * r + r + 1.0f;
    const uint32_t bits = std::bit_cast<uint32_t>(p) + (std::bit_cast<uint32_t>(shifted) << 23);
    const uint32_t keep = x < -87.0f ? 0u : ~0u;  // a mask rather than a branch: the compiler makes no vectors of that
    return std::bit_cast<float>(bits & keep);
}

// ln x for normal x > 0, within 2e-16 relative to max(1, |ln x|): x = 2^e m with m in [sqrt(1/2), sqrt(2)), and
// ln m = 2 atanh((m - 1) / (m + 1)) as a series. Own code, because libraries differ in the last bit.
inline double logarithm(double x) {
    uint64_t bits = std::bit_cast<uint64_t>(x);
    int exponent = static_cast<int>(bits >> 52) - 1023;
    double m = std::bit_cast<double>((bits & 0x000FFFFFFFFFFFFFu) | 0x3FF0000000000000u);
    if (m > 1.4142135623730951) {
        m *= 0.5;
        ++exponent;
    }
    const double s = (m - 1.0) / (m + 1.0), s2 = s * s;
    double series = 0.0;
    for (int k = 23; k >= 1; k -= 2) series = series * s2 + 1.0 / k;
    return exponent * 0.6931471805599453 + 2.0 * s * series;
}

// ---- passes over a row ---------------------------------------------------------------------------------------------

// f(i) for each i of a block; a whole block has a constant length, which makes better vectors.
template <typename F>
inline void each(int length, F f) {
    if (length == kBlockSize) {
        for (int i = 0; i < kBlockSize; ++i) f(i);
    } else {
        for (int i = 0; i < length; ++i) f(i);
    }
}

// A block's values, unused places holding what does not matter to the fold. Folding in halves is a fixed order that
// needs no reassociation by the compiler, and as a sum it is pairwise: the error grows with the logarithm.
struct alignas(64) Block {
    float v[kBlockSize];

    void fill_from(int length, float value) {
        for (int i = length; i < kBlockSize; ++i) v[i] = value;
    }
    double sum() {
        for (int i = 0; i < 128; ++i) v[i] += v[i + 128];
        for (int i = 0; i < 64; ++i) v[i] += v[i + 64];
        for (int i = 0; i < 32; ++i) v[i] += v[i + 32];
        for (int i = 0; i < 16; ++i) v[i] += v[i + 16];
        for (int i = 0; i < 8; ++i) v[i] += v[i + 8];
        for (int i = 0; i < 4; ++i) v[i] += v[i + 4];
        return static_cast<double>((v[0] + v[2]) + (v[1] + v[3]));
    }
    void max_to_lanes() {
        for (int i = 0; i < 128; ++i) v[i] = v[i + 128] > v[i] ? v[i + 128] : v[i];
        for (int i = 0; i < 64; ++i) v[i] = v[i + 64] > v[i] ? v[i + 64] : v[i];
        for (int i = 0; i < 32; ++i) v[i] = v[i + 32] > v[i] ? v[i + 32] : v[i];
        for (int i = 0; i < 16; ++i) v[i] = v[i + 16] > v[i] ? v[i + 16] : v[i];
    }
};
static_assert(kBlockSize == 256 && kLane == 16);

struct Scan {
    float max;    // -inf when nothing is possible
    int argmax;   // lowest index of the maximum
    bool finite;  // no NaN, no +inf
};

// Fills lane_max and block_max.
Scan scan(const float* x, int n, const SampleScratch& scratch) {
    const int blocks = block_count(n);
    int32_t bad = 0;
    float best = -kInfinity;
    int best_block = 0;
    for (int b = 0; b < blocks; ++b) {
        const float* row = x + b * kBlockSize;
        const int length = block_length(n, b);
        Block top;
        each(length, [&](int i) { bad |= row[i] <= FLT_MAX ? 0 : 1; });
        each(length, [&](int i) { top.v[i] = row[i]; });
        top.fill_from(length, -kInfinity);
        top.max_to_lanes();
        for (int j = 0; j < kLane; ++j) scratch.lane_max[b * kLane + j] = top.v[j];
        float block_best = top.v[0];
        for (int j = 1; j < kLane; ++j) block_best = top.v[j] > block_best ? top.v[j] : block_best;
        scratch.block_max[b] = block_best;
        if (block_best > best) {
            best = block_best;
            best_block = b;
        }
    }
    int argmax = best_block * kBlockSize;
    if (bad == 0) {
        while (x[argmax] != best) ++argmax;  // the maximum of valid values is in its block
    }
    return {best, argmax, bad == 0};
}

// w[i] = exp((z[i] - max) * scale), summed per block into block_sum; the total. Keep: whether both are stored.
template <bool Keep>
double weigh(const float* z, int n, float max, float scale, float* w, double* block_sum) {
    const int blocks = block_count(n);
    double total = 0.0;
    for (int b = 0; b < blocks; ++b) {
        const float* row = z + b * kBlockSize;
        const int length = block_length(n, b);
        Block weights;
        each(length, [&](int i) { weights.v[i] = exponential((row[i] - max) * scale); });
        if (Keep) std::memcpy(w + b * kBlockSize, weights.v, sizeof(float) * static_cast<size_t>(length));
        weights.fill_from(length, 0.0f);
        const double sum = weights.sum();
        if (Keep) block_sum[b] = sum;
        total += sum;
    }
    return total;
}

// Zeroes weights below `floor` and sums again.
double truncate(float* w, int n, float floor, double* block_sum) {
    const int blocks = block_count(n);
    double total = 0.0;
    for (int b = 0; b < blocks; ++b) {
        float* row = w + b * kBlockSize;
        const int length = block_length(n, b);
        Block weights;
        each(length, [&](int i) { weights.v[i] = row[i] >= floor ? row[i] : 0.0f; });
        std::memcpy(row, weights.v, sizeof(float) * static_cast<size_t>(length));
        weights.fill_from(length, 0.0f);
        block_sum[b] = weights.sum();
        total += block_sum[b];
    }
    return total;
}

struct Mass {
    double sum;
    int count;
};

// Sum and number of the weights that are at least `floor`.
Mass mass_from(const float* w, int n, float floor) {
    const int blocks = block_count(n);
    Mass mass{0.0, 0};
    for (int b = 0; b < blocks; ++b) {
        const float* row = w + b * kBlockSize;
        const int length = block_length(n, b);
        Block weights;
        int count = 0;
        each(length, [&](int i) {
            const bool in = row[i] >= floor;
            weights.v[i] = in ? row[i] : 0.0f;
            count += in ? 1 : 0;
        });
        weights.fill_from(length, 0.0f);
        mass.sum += weights.sum();
        mass.count += count;
    }
    return mass;
}

// ---- selection -----------------------------------------------------------------------------------------------------

// Larger is better: by value, then by lower index. -0 and +0 are equal.
inline Key rank_key(float value, int index) {
    const uint32_t bits = std::bit_cast<uint32_t>(value + 0.0f);
    const uint32_t ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return {uint64_t{ordered} << 32 | static_cast<uint32_t>(~index)};
}
inline int key_index(Key key) { return static_cast<int>(~static_cast<uint32_t>(key.rank)); }

// keys is a plain array in the scratch; Key has the same layout.
inline Key* as_keys(const SampleScratch& scratch) {
    static_assert(sizeof(Key) == sizeof(uint64_t));
    return reinterpret_cast<Key*>(scratch.keys);
}

// The k-th largest of n values (1 <= k <= n).
float kth_largest(const float* values, int n, int k, const SampleScratch& scratch) {
    static_assert(sizeof(Real) == sizeof(float));
    Real* copy = reinterpret_cast<Real*>(scratch.spare);
    for (int i = 0; i < n; ++i) copy[i].value = values[i];
    std::nth_element(copy, copy + (k - 1), copy + n, LargerReal{});
    return copy[k - 1].value;
}

// The best k of x, which `scan` has just seen: their number goes to `kept` (less than k when fewer are possible), their
// keys, in no order, to the front of scratch.keys. scratch.found then holds, ascending, `return value` indices among
// which they all are. k different blocks (or lanes of blocks) whose maxima reach a limit hold k values that reach it,
// so nothing below that limit matters.
int select_top(const float* x, int n, int k, const SampleScratch& scratch, int& kept) {
    const int blocks = block_count(n);
    float limit = -kInfinity;
    if (k <= blocks) {
        limit = kth_largest(scratch.block_max, blocks, k, scratch);
    } else if (k <= blocks * kLane) {
        limit = kth_largest(scratch.lane_max, blocks * kLane, k, scratch);
    }
    limit = limit < -FLT_MAX ? -FLT_MAX : limit;  // -inf is never selected
    int32_t* found = scratch.found;
    int number = 0;
    for (int b = 0; b < blocks; ++b) {
        if (scratch.block_max[b] < limit) continue;
        const int begin = b * kBlockSize, end = begin + block_length(n, b);
        for (int i = begin; i < end; ++i) {
            found[number] = i;
            number += x[i] >= limit ? 1 : 0;
        }
    }
    Key* keys = as_keys(scratch);
    for (int i = 0; i < number; ++i) keys[i] = rank_key(x[found[i]], found[i]);
    kept = k < number ? k : number;
    if (kept < number) std::nth_element(keys, keys + (kept - 1), keys + number, BetterKey{});
    return number;
}

// Where a nucleus ends: the weights >= high sum to `above` < target, those >= low reach it. The bits of non-negative
// floats are ordered like their values, so the limits are kept as bits and halved as integers.
struct Band {
    uint32_t low, high;
    double above;
    int count;  // weights in [low, high)

    // 1 or 0, by one unsigned comparison.
    int holds(float weight) const { return std::bit_cast<uint32_t>(weight) - low < high - low ? 1 : 0; }
};

// Halves the band until it holds at most `enough` weights, or weights of one value only. w holds the n = band.count
// weights of the band and, for the first call, nothing else either.
void narrow(Band& band, const float* w, int n, double target, int enough) {
    const double outside = band.above;
    int count_low = n, count_high = 0;
    // A first guess that splits most distributions well: 2^-12 of the best.
    for (uint32_t middle = std::bit_cast<uint32_t>(0x1p-12f);
         count_low - count_high > enough && band.high - band.low > 1; middle = 0) {
        if (middle <= band.low || middle >= band.high) middle = band.low + (band.high - band.low) / 2;
        const Mass mass = mass_from(w, n, std::bit_cast<float>(middle));
        if (outside + mass.sum >= target) {
            band.low = middle;
            count_low = mass.count;
        } else {
            band.high = middle;
            band.above = outside + mass.sum;
            count_high = mass.count;
        }
    }
    band.count = count_low - count_high;
}

// Top-p over weights w of logits z: zeroes the part of the last band that is out and gives the weight below which
// everything is out. Keeps the shortest prefix, in rank order, whose weights reach top_p * total; at least one.
float nucleus(const float* z, float* w, int n, double total, double top_p, const SampleScratch& scratch) {
    const double target = top_p * total;
    Band band{0, std::bit_cast<uint32_t>(1.0f) + 1, 0.0, n};
    narrow(band, w, n, target, kSampleBand);
    if (band.low == 0 && band.count > kSampleBand) return 0.0f;  // weightless tokens: nothing to cut

    int number = 0;
    int32_t* found = scratch.found;
    for (int b = 0; b < block_count(n); ++b) {
        const int begin = b * kBlockSize, length = block_length(n, b);
        int count = 0;
        each(length, [&](int i) { count += band.holds(w[begin + i]); });
        if (count == 0) continue;
        for (int i = begin; i < begin + length; ++i) {
            found[number] = i;
            number += band.holds(w[i]);
        }
    }

    Key* keys = as_keys(scratch);
    if (number > kSampleBand) {  // all of one weight: their number is all that counts
        for (int i = 0; i < number; ++i) keys[i] = rank_key(z[found[i]], found[i]);
        const float weight = std::bit_cast<float>(band.low);
        const double wanted = (target - band.above) / static_cast<double>(weight);
        int kept = wanted < number ? static_cast<int>(wanted) : number;
        if (kept < number && static_cast<double>(kept) < wanted) ++kept;
        if (kept == 0) kept = 1;
        if (kept < number) std::nth_element(keys, keys + (kept - 1), keys + number, BetterKey{});
        for (int i = kept; i < number; ++i) w[key_index(keys[i])] = 0.0f;
        return weight;
    }

    // Only these matter from here on: narrow a copy of them, then sort what is left.
    float* copy = scratch.band;
    for (int i = 0; i < number; ++i) copy[i] = w[found[i]];
    narrow(band, copy, number, target, kSmallBand);
    int left = 0;
    for (int i = 0; i < number; ++i) {
        if (band.holds(copy[i])) keys[left++] = rank_key(z[found[i]], found[i]);
    }
    std::sort(keys, keys + left, BetterKey{});
    double sum = band.above;
    int kept = 0;
    while (kept < left) {
        sum += static_cast<double>(w[key_index(keys[kept++])]);
        if (sum >= target) break;
    }
    for (int i = kept; i < left; ++i) w[key_index(keys[i])] = 0.0f;
    return std::bit_cast<float>(band.low);
}

// Inverse CDF in index order: the first index at which the running sum exceeds u * total.
int draw(const float* w, int n, const double* block_sum, double total, double u) {
    const double target = u * total;
    const int blocks = block_count(n);
    double sum = 0.0;
    int last = -1;  // last possible index so far: where rounding carries the target past the end
    for (int b = 0; b < blocks; ++b) {
        if (block_sum[b] == 0.0) continue;
        const int begin = b * kBlockSize, end = begin + block_length(n, b);
        if (sum + block_sum[b] > target) {
            for (int i = begin; i < end; ++i) {
                if (w[i] == 0.0f) continue;
                sum += static_cast<double>(w[i]);
                last = i;
                if (sum > target) break;
            }
            return last;
        }
        sum += block_sum[b];
        last = end - 1;
    }
    while (last > 0 && w[last] == 0.0f) --last;
    return last;
}

// ---- adjustments ---------------------------------------------------------------------------------------------------

inline bool inside(const int32_t* ids, int count, int vocab) {
    uint32_t outside = 0;
    for (int i = 0; i < count; ++i) outside |= static_cast<uint32_t>(ids[i]) >= static_cast<uint32_t>(vocab) ? 1 : 0;
    return outside == 0;
}

// Adjusting makes no possible token impossible and none infinitely likely.
inline float clamp(float v) { return v > FLT_MAX ? FLT_MAX : (v < -FLT_MAX ? -FLT_MAX : v); }

void penalize(float* z, const SampleParams& p, const int32_t* history, int32_t* marks) {
    for (int i = 0; i < p.history_count; ++i) {
        int32_t& mark = marks[history[i]];
        mark = (mark | 1) + (i < p.num_prompt ? 0 : 2);
    }
    for (int i = 0; i < p.history_count; ++i) {
        const int32_t id = history[i], mark = marks[id];
        if (mark == 0) continue;  // done at an earlier occurrence
        marks[id] = 0;
        float v = z[id];
        if (v == -kInfinity) continue;
        v = v > 0.0f ? v / p.repetition : v * p.repetition;
        const int32_t count = mark >> 1;
        if (count > 0) {
            v = v - p.presence;
            v = v - p.frequency * static_cast<float>(count);
        }
        z[id] = clamp(v);
    }
}

// Tokens whose bit is clear become impossible. Grammars allow nearly all tokens or very few, so whole words are common.
void apply_mask(float* z, int n, const uint32_t* words) {
    for (int begin = 0; begin < n; begin += 32) {
        const uint32_t word = words[begin / 32];
        if (word == ~0u) continue;
        const int length = n - begin < 32 ? n - begin : 32;
        float* row = z + begin;
        for (int i = 0; i < length; ++i) row[i] = (word >> i & 1u) != 0 ? row[i] : -kInfinity;
    }
}

inline void finish(const SampleOutput& output, int token, SampleStatus status) {
    output.result->token = token;
    output.result->status = static_cast<int32_t>(status);
}

}  // namespace

double sample_uniform(uint64_t seed, int64_t position, uint32_t draw) noexcept { return uniform(seed, position, draw); }
float sample_exp(float x) noexcept { return exponential(x); }
double sample_log(double x) noexcept { return logarithm(x); }

void sample_row(const float* logits, int vocab, const SampleParams& p, const SampleArrays& arrays,
                SampleScratch& scratch, const SampleOutput& output) noexcept {
    *output.result = {-1, 0, std::numeric_limits<float>::quiet_NaN(), 0};

    const Scan raw = scan(logits, vocab, scratch);
    if (!raw.finite) return finish(output, -1, SampleStatus::not_finite);
    if (raw.max == -kInfinity) return finish(output, -1, SampleStatus::no_candidate);

    // The model's own distribution, while the block maxima are the raw row's.
    double log_total = 0.0;
    if (p.num_logprobs >= 0) log_total = logarithm(weigh<false>(logits, vocab, raw.max, 1.0f, nullptr, nullptr));
    const auto logprob = [&](int id) {
        const double value = static_cast<double>(logits[id]) - static_cast<double>(raw.max) - log_total;
        return value < -FLT_MAX ? -FLT_MAX : static_cast<float>(value);  // a possible token's is finite
    };
    if (p.num_logprobs > 0) {
        int kept = 0;
        select_top(logits, vocab, p.num_logprobs < vocab ? p.num_logprobs : vocab, scratch, kept);
        Key* keys = as_keys(scratch);
        std::sort(keys, keys + kept, BetterKey{});
        for (int i = 0; i < kept; ++i) {
            output.top_ids[i] = key_index(keys[i]);
            output.top_logprobs[i] = logprob(key_index(keys[i]));
        }
        output.result->num_top = kept;
    }
    if (p.given >= 0) {
        if (p.given >= vocab) return finish(output, -1, SampleStatus::bad_id);
        output.result->logprob = logprob(p.given);
        return finish(output, p.given, SampleStatus::ok);
    }

    const float* z = logits;
    Scan best = raw;
    if (p.history_count > 0 || p.bias_count > 0 || p.banned_count > 0 || p.mask > 0) {
        const int32_t* bias_ids = arrays.bias_ids + p.bias_start;
        const int32_t* banned = arrays.banned_ids + p.banned_start;
        const int32_t* history = arrays.history + p.history_start;
        if (!inside(bias_ids, p.bias_count, vocab) || !inside(banned, p.banned_count, vocab) ||
            !inside(history, p.history_count, vocab)) {
            return finish(output, -1, SampleStatus::bad_id);
        }
        float* adjusted = scratch.adjusted;
        std::memcpy(adjusted, logits, sizeof(float) * static_cast<size_t>(vocab));
        penalize(adjusted, p, history, scratch.marks);
        for (int i = 0; i < p.bias_count; ++i) {
            float& v = adjusted[bias_ids[i]];
            if (v != -kInfinity) v = clamp(v + arrays.bias_values[p.bias_start + i]);
        }
        for (int i = 0; i < p.banned_count; ++i) adjusted[banned[i]] = -kInfinity;
        if (p.mask > 0) apply_mask(adjusted, vocab, arrays.masks + (p.mask - 1) * arrays.mask_words);
        best = scan(adjusted, vocab, scratch);
        if (best.max == -kInfinity) return finish(output, -1, SampleStatus::no_candidate);
        z = adjusted;
    }

    int token = best.argmax;
    if (p.temperature > 0.0f && p.top_k != 1) {
        const int32_t* ids = nullptr;  // null: index and id are the same
        int n = vocab;
        if (p.top_k > 1 && p.top_k < vocab) {
            int kept = 0;
            const int number = select_top(z, vocab, p.top_k, scratch, kept);
            const Key* keys = as_keys(scratch);
            uint64_t cut = 0;  // the rank of the last one in
            if (kept < number) cut = keys[kept - 1].rank;
            n = 0;
            for (int i = 0; i < number; ++i) {
                const int id = scratch.found[i];
                if (rank_key(z[id], id).rank < cut) continue;
                scratch.kept_logits[n] = z[id];
                scratch.kept_ids[n++] = id;
            }
            z = scratch.kept_logits;
            ids = scratch.kept_ids;
        }
        const float scale = 1.0f / (p.temperature < FLT_MIN ? FLT_MIN : p.temperature);
        float* w = scratch.weights;
        double total = weigh<true>(z, n, best.max, scale, w, scratch.block_sum);
        float floor = p.min_p > 0.0f ? p.min_p : 0.0f;
        if (p.top_p < 1.0f) {
            const float from = nucleus(z, w, n, total, static_cast<double>(p.top_p), scratch);
            floor = from > floor ? from : floor;
            total = truncate(w, n, floor, scratch.block_sum);
        } else if (floor > 0.0f) {
            total = truncate(w, n, floor, scratch.block_sum);
        }
        const int index = draw(w, n, scratch.block_sum, total, uniform(p.seed, p.position, 0));
        token = ids == nullptr ? index : ids[index];
    }
    if (p.num_logprobs >= 0) output.result->logprob = logprob(token);
    finish(output, token, SampleStatus::ok);
}

}  // namespace shoal::SHOAL_ISA
