// Choosing one token from one row of logits: penalties, bias, bans, masks, temperature, truncation, inverse CDF.
//
// What is computed, in what order, and which ties go where is written in docs/decisions/0006-sampling.md and, as
// plain NumPy, in src/shoal/sampling/reference.py. One row is one call on one thread; rows share nothing, so a row's
// token cannot depend on its neighbours. sampler.cpp is compiled once per instruction set with SHOAL_ISA defined
// (isa_portable when it is not) and with -ffp-contract=off; all sets give the same bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace shoal {

// What one row wants. SAMPLE_PARAMS in src/shoal/sampling/batch.py has the same layout.
// The starts and counts are ranges of the flat arrays of SampleArrays.
struct SampleParams {
    float temperature;     // 0: the most likely token
    int32_t top_k;         // <= 0: all
    float top_p;           // >= 1: all
    float min_p;           // <= 0: all
    float repetition;      // 1: none
    float presence;        // 0: none
    float frequency;       // 0: none
    int32_t num_logprobs;  // -1: none, 0: of the chosen token, k: and the k most likely
    uint64_t seed;         // of this completion
    int64_t position;      // of the token to be sampled
    int32_t bias_start;
    int32_t bias_count;
    int32_t banned_start;
    int32_t banned_count;
    int32_t history_start;
    int32_t history_count;
    int32_t num_prompt;  // so many of the history are the prompt's
    int32_t mask;        // 0: every token may be chosen; k: those in row k - 1 of the masks
    int32_t given;       // -1: choose a token; else it is this one, and only its log-probabilities are wanted
    int32_t unused;
};

static_assert(offsetof(SampleParams, temperature) == 0 && offsetof(SampleParams, top_k) == 4);
static_assert(offsetof(SampleParams, top_p) == 8 && offsetof(SampleParams, min_p) == 12);
static_assert(offsetof(SampleParams, repetition) == 16 && offsetof(SampleParams, presence) == 20);
static_assert(offsetof(SampleParams, frequency) == 24 && offsetof(SampleParams, num_logprobs) == 28);
static_assert(offsetof(SampleParams, seed) == 32 && offsetof(SampleParams, position) == 40);
static_assert(offsetof(SampleParams, bias_start) == 48 && offsetof(SampleParams, bias_count) == 52);
static_assert(offsetof(SampleParams, banned_start) == 56 && offsetof(SampleParams, banned_count) == 60);
static_assert(offsetof(SampleParams, history_start) == 64 && offsetof(SampleParams, history_count) == 68);
static_assert(offsetof(SampleParams, num_prompt) == 72 && offsetof(SampleParams, mask) == 76);
static_assert(offsetof(SampleParams, given) == 80 && offsetof(SampleParams, unused) == 84);
static_assert(sizeof(SampleParams) == 88);

// Shared by the rows of a step. The caller has checked that every row's ranges lie inside.
struct SampleArrays {
    const int32_t* bias_ids;
    const float* bias_values;
    const int32_t* banned_ids;
    const int32_t* history;
    const uint32_t* masks;  // [rows][mask_words], bit i % 32 of word i / 32 for token i; set: allowed
    int64_t mask_words;     // at least vocab / 32, rounded up
};

enum class SampleStatus : int32_t {
    ok = 0,
    not_finite = 1,    // a logit is NaN or +inf
    no_candidate = 2,  // every token is impossible
    bad_id = 3,        // a biased, banned, past or given token id is outside the vocabulary
};

// SAMPLE_RESULT in src/shoal/sampling/batch.py has the same layout.
struct SampleResult {
    int32_t token;    // -1 unless ok
    int32_t status;   // a SampleStatus
    float logprob;    // of the token under the model's own distribution; NaN unless asked for
    int32_t num_top;  // alternatives written: min(num_logprobs, tokens that are possible)
};

static_assert(sizeof(SampleResult) == 16);

struct SampleOutput {
    SampleResult* result;
    int32_t* top_ids;     // room for num_logprobs; may be null when that is <= 0
    float* top_logprobs;  // the same
};

constexpr int kSampleLanes = 16;   // maxima kept per block
constexpr int kSampleBlock = 256;  // tokens whose weights are summed in float32
constexpr int kSampleBand = 4096;  // tokens among which top-p looks for the end of the nucleus in a copy

// Working memory of one thread, carved from one piece by sample_scratch; nothing is allocated in a step.
// marks is all zero between calls.
struct SampleScratch {
    int vocab;
    float* adjusted;     // [vocab] logits after penalties, bias and bans
    float* weights;      // [vocab] unnormalised probabilities
    float* kept_logits;  // [vocab] logits that top-k left, by ascending id
    int32_t* kept_ids;   // [vocab] their ids
    int32_t* found;      // [vocab + 1] indices of a partial selection
    uint64_t* keys;      // [vocab] rank keys of a partial selection
    int32_t* marks;      // [vocab] 2 * count in the output + (1 if seen at all)
    float* lane_max;     // [blocks * 16]
    float* block_max;    // [blocks]
    float* spare;        // [blocks * 16]
    float* band;         // [kSampleBand]
    double* block_sum;   // [blocks]
};

namespace sample_detail {
static inline size_t padded(size_t bytes) { return (bytes + 63) / 64 * 64; }
static inline size_t blocks(int vocab) { return (static_cast<size_t>(vocab) + kSampleBlock - 1) / kSampleBlock; }
}  // namespace sample_detail

static inline size_t sample_scratch_bytes(int vocab) {
    using sample_detail::padded;
    const size_t n = static_cast<size_t>(vocab), b = sample_detail::blocks(vocab);
    return 5 * padded(4 * n) + padded(4 * (n + 1)) + padded(8 * n) + 2 * padded(4 * b * kSampleLanes) + padded(4 * b) +
           padded(4 * kSampleBand) + padded(8 * b);
}

// memory: sample_scratch_bytes(vocab) bytes, aligned to 64, which must outlive the result.
static inline SampleScratch sample_scratch(void* memory, int vocab) {
    const size_t n = static_cast<size_t>(vocab), b = sample_detail::blocks(vocab);
    unsigned char* next = static_cast<unsigned char*>(memory);
    const auto take = [&next](size_t bytes) {
        void* piece = next;
        next += sample_detail::padded(bytes);
        return piece;
    };
    SampleScratch s;
    s.vocab = vocab;
    s.adjusted = static_cast<float*>(take(4 * n));
    s.weights = static_cast<float*>(take(4 * n));
    s.kept_logits = static_cast<float*>(take(4 * n));
    s.kept_ids = static_cast<int32_t*>(take(4 * n));
    s.found = static_cast<int32_t*>(take(4 * (n + 1)));
    s.keys = static_cast<uint64_t*>(take(8 * n));
    s.marks = static_cast<int32_t*>(take(4 * n));
    s.lane_max = static_cast<float*>(take(4 * b * kSampleLanes));
    s.block_max = static_cast<float*>(take(4 * b));
    s.spare = static_cast<float*>(take(4 * b * kSampleLanes));
    s.band = static_cast<float*>(take(4 * kSampleBand));
    s.block_sum = static_cast<double*>(take(8 * b));
    std::memset(s.marks, 0, 4 * n);
    return s;
}

using SampleRowFunction = void(const float* logits, int vocab, const SampleParams& params, const SampleArrays& arrays,
                               SampleScratch& scratch, const SampleOutput& output) noexcept;

// One definition per instruction set. vocab must be scratch.vocab and at least 1.
namespace isa_portable {
SampleRowFunction sample_row;
double sample_uniform(uint64_t seed, int64_t position, uint32_t draw) noexcept;
float sample_exp(float x) noexcept;
double sample_log(double x) noexcept;
}  // namespace isa_portable
namespace isa_avx2 {
SampleRowFunction sample_row;
}
namespace isa_avx512 {
SampleRowFunction sample_row;
}
namespace isa_amx {
SampleRowFunction sample_row;
}

}  // namespace shoal
