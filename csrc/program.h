// The recorded program: a model's forward pass as a flat list of operations over preallocated buffers.
//
// Python records the operations once, in order, by calling the add_* methods; `seal` works out which forms of each
// buffer are wanted (float32, bfloat16, quantized), gives buffers memory (reused once nothing reads them any more) and
// starts the threads. `run` replays the program for one step's rows in one call, without allocating.
//
// No method throws. A method that can fail gives a message, empty on success; ids and sizes are checked here, array
// lengths by the binding.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "common.h"
#include "pack.h"
#include "thread_team.h"

namespace shoal {

// Anonymous memory on huge pages where the system gives them; zero until written.
class Memory {
  public:
    Memory() = default;
    ~Memory();
    Memory(Memory&& other) noexcept;
    Memory& operator=(Memory&& other) noexcept;
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    bool allocate(int64_t bytes);
    uint8_t* data() const { return data_; }
    int64_t size() const { return size_; }

  private:
    uint8_t* data_ = nullptr;
    int64_t size_ = 0;
};

struct ProgramShape {
    int32_t max_rows;     // rows of a step
    int32_t max_samples;  // rows whose logits are wanted
    int32_t max_sequences;
    int32_t max_context;  // tokens of a sequence
    int32_t vocab;
    int32_t num_layers;
    int32_t num_heads;
    int32_t threads;
    CacheGeometry cache;
};

enum class OpKind : int32_t { Embed, RmsNorm, Linear, Rope, Attention, SiluMul, Add, Gather, Convert, Sample };
constexpr int kNumOpKinds = 10;

// One step's inputs; lengths as in StepInputs of the Python side.
struct StepView {
    const int32_t* token_ids;
    const int32_t* positions;
    int32_t rows;
    const int32_t* row_starts;
    int32_t sequences;
    const int32_t* block_tables;
    int64_t table_stride;
    const int32_t* sample_rows;
    int32_t samples;
    // Sampling; null to stop at the logits.
    const SampleParams* params;
    SampleArrays arrays;
    SampleResult* results;  // [samples]
    int32_t* top_ids;       // [samples][top_stride]
    float* top_logprobs;    // the same
    int64_t top_stride;
};

class Program final : private PhaseWork {
  public:
    Program(const ProgramShape& shape, const KernelTable* kernels);
    ~Program() override;

    // Recording. Ids are indices in order of creation; a negative id means none.
    std::string add_weight(const std::vector<WeightPart>& parts, int64_t features, Format format, int32_t* id);
    int32_t add_vector(const float* values, int64_t size);
    int32_t add_buffer(int64_t width, bool per_sample);
    std::string embed(TensorType type, const uint8_t* data, int64_t row_bytes, int64_t width, int32_t out);
    std::string rms_norm(int32_t in, int32_t out, int32_t weight, float eps);
    std::string linear(int32_t in, int32_t out, int64_t column, int32_t weight, int32_t bias, int32_t residual);
    std::string rope_and_cache(int32_t qkv, int32_t out, int32_t layer, int32_t cos_sin, int32_t rotary_dim,
                               bool interleaved);
    std::string attention(int32_t query, int32_t out, int32_t layer, float scale);
    std::string silu_mul(int32_t in, int32_t out);
    std::string add(int32_t a, int32_t b, int32_t out);
    std::string gather(int32_t in, int32_t out);
    std::string seal(int32_t logits);

    std::string run(const StepView& step);

    const float* logits() const;
    int64_t logits_stride() const;
    int64_t weight_bytes() const { return weight_bytes_; }
    int64_t buffer_bytes() const { return arena_.size(); }
    int64_t cache_bytes() const { return cache_.size(); }
    // Nanoseconds per kind of operation in the last step, on the calling thread (waiting included).
    const int64_t* last_times() const { return times_; }

  private:
    struct Weight {
        const uint8_t* data;
        Format format;
        int64_t features, columns, panels;
    };
    struct Buffer {
        int64_t width;
        bool per_sample;
        bool want_f32 = false, want_bf16 = false, want_q8 = false, query = false;
        int64_t q8_group = kGroup;
        int32_t producer = -1, last_use = -1;
        // Memory, after seal.
        float* f32 = nullptr;
        uint16_t* bf16 = nullptr;
        int8_t* q8 = nullptr;
        GroupScale* scales = nullptr;
        float* rotated = nullptr;  // queries, heads padded
        int64_t stride = 0, bf16_stride = 0, q8_stride = 0, scale_stride = 0;
    };
    struct Op {
        OpKind kind;
        int32_t in = -1, in2 = -1, out = -1, weight = -1, bias = -1, residual = -1, layer = 0;
        int64_t column = 0, row_bytes = 0;
        TensorType type{};
        const uint8_t* data = nullptr;
        int32_t rotary_dim = 0;
        bool interleaved = false;
        float eps = 0.0f, scale = 0.0f;
        // The forms of `out` that this operation writes itself; a Convert writes the others.
        bool fuse_forms = false;
    };
    struct Tile {  // consecutive rows of one sequence
        int32_t sequence, row, rows;
    };
    struct alignas(64) ThreadScratch {
        Memory scores, row, panels, sample_memory;
        SampleScratch sample{};
    };

    int64_t units(int64_t phase) const override;
    void run(int64_t phase, int64_t unit, int thread) override;
    void phase_done(int64_t phase) override;

    bool buffer_ok(int32_t id) const { return id >= 0 && id < static_cast<int32_t>(buffers_.size()); }
    int64_t rows_of(const Buffer& buffer) const { return buffer.per_sample ? step_.samples : step_.rows; }
    int64_t capacity_of(const Buffer& buffer) const { return buffer.per_sample ? shape_.max_samples : shape_.max_rows; }
    RowForms forms(const Buffer& buffer, int64_t row, bool with_f32) const;
    uint8_t* take_weight_memory(int64_t bytes);
    std::string push(Op op);
    void plan_forms();
    std::string plan_memory();
    void prepare_tiles();
    void run_rows(const Op& op, int64_t begin, int64_t end, int thread);
    void run_linear(const Op& op, int64_t unit, int thread);
    void run_attention(const Op& op, int64_t unit, int thread);
    AttentionArgs attention_part(const Op& op, const Tile& tile, int32_t kv_head, int32_t split, int thread,
                                 int place) const;
    int64_t attention_units_per_tile() const;
    int64_t rows_per_unit(const Op& op) const;
    int64_t panels_per_unit(const Op& op) const;

    const ProgramShape shape_;
    const KernelTable* const kernels_;
    std::vector<Weight> weights_;
    std::vector<Memory> weight_chunks_;
    int64_t chunk_used_ = 0;  // of the last one
    std::vector<Memory> vectors_;
    std::vector<Buffer> buffers_;
    std::vector<Op> ops_;
    int32_t logits_ = -1;
    bool sealed_ = false;
    int64_t weight_bytes_ = 0;
    Memory arena_, cache_;
    std::vector<std::unique_ptr<ThreadScratch>> scratch_;
    StepView step_{};
    std::vector<Tile> tiles_;
    std::vector<int32_t> row_sequence_;
    int32_t head_splits_ = 1;     // parts of a KV head's query heads
    int32_t heads_together_ = 1;  // KV heads of one unit
    int64_t times_[kNumOpKinds] = {};
    int64_t phase_began_ = 0;
    ThreadTeam team_;
};

}  // namespace shoal
