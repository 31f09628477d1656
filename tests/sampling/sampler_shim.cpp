// The sampler as plain C functions, for the tests. Compiled with SHOAL_ISA naming the instruction set to test.
#include "sampler.cpp"

#include <cstdlib>

namespace isa = shoal::SHOAL_ISA;

extern "C" {

void shim_sample_rows(const float* logits, int rows, int vocab, const shoal::SampleParams* params,
                      const int32_t* bias_ids, const float* bias_values, const int32_t* banned_ids,
                      const int32_t* history, const uint32_t* masks, int64_t mask_words, shoal::SampleResult* results, int32_t* top_ids, float* top_logprobs,
                      int top_stride) {
    void* memory = std::aligned_alloc(64, shoal::sample_scratch_bytes(vocab));
    shoal::SampleScratch scratch = shoal::sample_scratch(memory, vocab);
    const shoal::SampleArrays arrays{bias_ids, bias_values, banned_ids, history, masks, mask_words};
    for (int r = 0; r < rows; ++r) {
        const int64_t top = int64_t{r} * top_stride;
        const shoal::SampleOutput output{results + r, top_ids + top, top_logprobs + top};
        isa::sample_row(logits + int64_t{r} * vocab, vocab, params[r], arrays, scratch, output);
    }
    std::free(memory);
}

double shim_uniform(uint64_t seed, int64_t position, uint32_t draw) { return isa::sample_uniform(seed, position, draw); }
double shim_log(double x) { return isa::sample_log(x); }
void shim_exp(const float* x, int n, float* y) {
    for (int i = 0; i < n; ++i) y[i] = isa::sample_exp(x[i]);
}

// Offsets of the fields in declaration order, then the size.
void shim_params_layout(int64_t* out) {
    using P = shoal::SampleParams;
    const size_t offsets[] = {
        offsetof(P, temperature),   offsetof(P, top_k),         offsetof(P, top_p),        offsetof(P, min_p),
        offsetof(P, repetition),    offsetof(P, presence),      offsetof(P, frequency),    offsetof(P, num_logprobs),
        offsetof(P, seed),          offsetof(P, position),      offsetof(P, bias_start),   offsetof(P, bias_count),
        offsetof(P, banned_start),  offsetof(P, banned_count),  offsetof(P, history_start), offsetof(P, history_count),
        offsetof(P, num_prompt),    offsetof(P, mask),      offsetof(P, given),         offsetof(P, unused),
        sizeof(P),
    };
    for (const size_t offset : offsets) *out++ = static_cast<int64_t>(offset);
}
void shim_result_layout(int64_t* out) {
    using R = shoal::SampleResult;
    const size_t offsets[] = {offsetof(R, token), offsetof(R, status), offsetof(R, logprob), offsetof(R, num_top),
                              sizeof(R)};
    for (const size_t offset : offsets) *out++ = static_cast<int64_t>(offset);
}
}
