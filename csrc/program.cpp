#include "program.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

namespace shoal {
namespace {

constexpr int64_t kHugePage = 2 << 20;
constexpr int64_t kWeightChunk = 32 << 20;
constexpr int64_t kMaxPhases = 4096;

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

// Packing spread over the team, some panels per unit.
class PackWork final : public PhaseWork {
  public:
    PackWork(const std::vector<WeightPart>& parts, Format format, int64_t features, int64_t panels, uint8_t* out)
        : parts_(parts), format_(format), features_(features), panels_(panels), out_(out) {}
    int64_t units(int64_t) const override { return (panels_ + kPanels - 1) / kPanels; }
    void run(int64_t, int64_t unit, int) override {
        const int64_t begin = unit * kPanels;
        pack_panels(format_, parts_.data(), static_cast<int64_t>(parts_.size()), features_, begin,
                    std::min(panels_, begin + kPanels), out_);
    }

  private:
    static constexpr int64_t kPanels = 4;
    const std::vector<WeightPart>& parts_;
    const Format format_;
    const int64_t features_, panels_;
    uint8_t* const out_;
};

}  // namespace

Memory::~Memory() {
    if (data_) munmap(data_, static_cast<size_t>(size_));
}

Memory::Memory(Memory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Memory& Memory::operator=(Memory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
}

bool Memory::allocate(int64_t bytes) {
    const int64_t size = round_up(std::max<int64_t>(bytes, 1), bytes >= kHugePage ? kHugePage : 4096);
    void* p = mmap(nullptr, static_cast<size_t>(size), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return false;
#ifdef MADV_HUGEPAGE
    if (size >= kHugePage) madvise(p, static_cast<size_t>(size), MADV_HUGEPAGE);
#endif
    data_ = static_cast<uint8_t*>(p);
    size_ = size;
    return true;
}

Program::Program(const ProgramShape& shape, const KernelTable* kernels)
    : shape_(shape), kernels_(kernels), team_(shape.threads) {
    team_.start(kMaxPhases);
}

Program::~Program() { team_.stop(); }

// Weights lie one after the other in the order of their use, on huge pages: a single one is mostly smaller than such a
// page, and a step walks through all of them. Null if there is no memory.
uint8_t* Program::take_weight_memory(int64_t bytes) {
    bytes = round_up(bytes, 4096);
    if (weight_chunks_.empty() || chunk_used_ + bytes > weight_chunks_.back().size()) {
        Memory chunk;
        if (!chunk.allocate(std::max(bytes, kWeightChunk))) return nullptr;
        weight_chunks_.push_back(std::move(chunk));
        chunk_used_ = 0;
    }
    uint8_t* data = weight_chunks_.back().data() + chunk_used_;
    chunk_used_ += bytes;
    return data;
}

// ---- recording -----------------------------------------------------------------------------------------------------

std::string Program::add_weight(const std::vector<WeightPart>& parts, int64_t features, Format format, int32_t* id) {
    int64_t columns = 0;
    for (const WeightPart& part : parts) {
        if (row_bytes(part.type, features) == 0 || part.row_bytes != row_bytes(part.type, features)) {
            return "a weight's rows do not fill whole blocks";
        }
        if (!can_pack(part.type, format, features)) return "a weight of this type has no such packed format";
        columns += part.rows;
    }
    if (columns <= 0 || features <= 0) return "a weight is empty";
    Weight weight;
    weight.format = format;
    weight.features = features;
    weight.columns = columns;
    weight.panels = (columns + kLanes - 1) / kLanes;
    const int64_t bytes = weight.panels * panel_bytes(format, features);
    uint8_t* data = take_weight_memory(bytes);
    if (!data) return "out of memory for packed weights";
    weight.data = data;
    weight_bytes_ += bytes;
    PackWork work(parts, format, features, weight.panels, data);
    team_.run(work, 1);
    weights_.push_back(weight);
    *id = static_cast<int32_t>(weights_.size()) - 1;
    return {};
}

int32_t Program::add_vector(const float* values, int64_t size) {
    Memory memory;
    if (!memory.allocate(size * 4)) return -1;
    std::memcpy(memory.data(), values, static_cast<size_t>(size) * 4);
    vectors_.push_back(std::move(memory));
    return static_cast<int32_t>(vectors_.size()) - 1;
}

int32_t Program::add_buffer(int64_t width, bool per_sample) {
    Buffer buffer;
    buffer.width = width;
    buffer.per_sample = per_sample;
    buffers_.push_back(buffer);
    return static_cast<int32_t>(buffers_.size()) - 1;
}

std::string Program::push(Op op) {
    if (sealed_) return "the program is sealed";
    for (int32_t id : {op.in, op.in2, op.residual}) {
        if (id >= 0 && !buffer_ok(id)) return "unknown buffer";
        if (id >= 0 && buffers_[static_cast<size_t>(id)].producer < 0) return "a buffer is read before it is written";
    }
    if (op.out >= 0) {
        if (!buffer_ok(op.out)) return "unknown buffer";
        buffers_[static_cast<size_t>(op.out)].producer = static_cast<int32_t>(ops_.size());
    }
    ops_.push_back(op);
    if (static_cast<int64_t>(ops_.size()) >= kMaxPhases / 2) return "the program is too long";
    return {};
}

std::string Program::embed(TensorType type, const uint8_t* data, int64_t bytes, int64_t width, int32_t out) {
    if (!buffer_ok(out) || buffers_[static_cast<size_t>(out)].width != width || row_bytes(type, width) != bytes) {
        return "embed: widths differ";
    }
    Op op{.kind = OpKind::Embed};
    op.out = out;
    op.type = type;
    op.data = data;
    op.row_bytes = bytes;
    return push(op);
}

std::string Program::rms_norm(int32_t in, int32_t out, int32_t weight, float eps) {
    if (!buffer_ok(in) || !buffer_ok(out) || weight < 0 || weight >= static_cast<int32_t>(vectors_.size()))
        return "rms_norm: unknown id";
    const int64_t width = buffers_[static_cast<size_t>(in)].width;
    if (buffers_[static_cast<size_t>(out)].width != width || vectors_[static_cast<size_t>(weight)].size() < width * 4) {
        return "rms_norm: widths differ";
    }
    Op op{.kind = OpKind::RmsNorm};
    op.in = in;
    op.out = out;
    op.weight = weight;
    op.eps = eps;
    op.fuse_forms = true;
    return push(op);
}

std::string Program::linear(int32_t in, int32_t out, int64_t column, int32_t weight, int32_t bias, int32_t residual) {
    if (!buffer_ok(in) || !buffer_ok(out) || weight < 0 || weight >= static_cast<int32_t>(weights_.size()) ||
        bias >= static_cast<int32_t>(vectors_.size())) {
        return "linear: unknown id";
    }
    const Weight& w = weights_[static_cast<size_t>(weight)];
    if (w.features != buffers_[static_cast<size_t>(in)].width) return "linear: input width differs from the weight's";
    if (column < 0 || column + w.columns > buffers_[static_cast<size_t>(out)].width) return "linear: output too narrow";
    if (bias >= 0 && vectors_[static_cast<size_t>(bias)].size() < w.columns * 4) return "linear: bias too short";
    if (residual >= 0 && (!buffer_ok(residual) ||
                          buffers_[static_cast<size_t>(residual)].width != buffers_[static_cast<size_t>(out)].width)) {
        return "linear: residual width differs";
    }
    Op op{.kind = OpKind::Linear};
    op.in = in;
    op.out = out;
    op.weight = weight;
    op.bias = bias;
    op.residual = residual;
    op.column = column;
    return push(op);
}

std::string Program::rope_and_cache(int32_t qkv, int32_t out, int32_t layer, int32_t cos_sin, int32_t rotary_dim,
                                    bool interleaved) {
    const CacheGeometry& c = shape_.cache;
    if (!buffer_ok(qkv) || !buffer_ok(out) || cos_sin < 0 || cos_sin >= static_cast<int32_t>(vectors_.size()))
        return "rope: unknown id";
    if (buffers_[static_cast<size_t>(qkv)].width != int64_t(shape_.num_heads + 2 * c.num_kv_heads) * c.head_dim)
        return "rope: width differs";
    if (buffers_[static_cast<size_t>(out)].width != int64_t(shape_.num_heads) * c.head_dim)
        return "rope: output width differs";
    if (layer < 0 || layer >= shape_.num_layers) return "rope: no such layer";
    if (rotary_dim < 2 || rotary_dim > c.head_dim || rotary_dim % 2) return "rope: rotary dimension out of range";
    if (vectors_[static_cast<size_t>(cos_sin)].size() < int64_t(shape_.max_context) * rotary_dim * 4)
        return "rope: table too short";
    Op op{.kind = OpKind::Rope};
    op.in = qkv;
    op.out = out;
    op.layer = layer;
    op.weight = cos_sin;
    op.rotary_dim = rotary_dim;
    op.interleaved = interleaved;
    buffers_[static_cast<size_t>(out)].query = true;
    return push(op);
}

std::string Program::attention(int32_t query, int32_t out, int32_t layer, float scale) {
    const CacheGeometry& c = shape_.cache;
    if (!buffer_ok(query) || !buffer_ok(out) || !buffers_[static_cast<size_t>(query)].query)
        return "attention: not a rotated query";
    if (buffers_[static_cast<size_t>(out)].width != int64_t(shape_.num_heads) * c.head_dim)
        return "attention: width differs";
    if (layer < 0 || layer >= shape_.num_layers) return "attention: no such layer";
    Op op{.kind = OpKind::Attention};
    op.in = query;
    op.out = out;
    op.layer = layer;
    op.scale = scale;
    return push(op);
}

std::string Program::silu_mul(int32_t in, int32_t out) {
    if (!buffer_ok(in) || !buffer_ok(out) ||
        buffers_[static_cast<size_t>(in)].width != 2 * buffers_[static_cast<size_t>(out)].width) {
        return "silu_mul: the input is not twice as wide as the output";
    }
    Op op{.kind = OpKind::SiluMul};
    op.in = in;
    op.out = out;
    op.fuse_forms = true;
    return push(op);
}

std::string Program::add(int32_t a, int32_t b, int32_t out) {
    if (!buffer_ok(a) || !buffer_ok(b) || !buffer_ok(out)) return "add: unknown buffer";
    const int64_t width = buffers_[static_cast<size_t>(a)].width;
    if (buffers_[static_cast<size_t>(b)].width != width || buffers_[static_cast<size_t>(out)].width != width)
        return "add: widths differ";
    Op op{.kind = OpKind::Add};
    op.in = a;
    op.in2 = b;
    op.out = out;
    return push(op);
}

std::string Program::gather(int32_t in, int32_t out) {
    if (!buffer_ok(in) || !buffer_ok(out) ||
        buffers_[static_cast<size_t>(in)].width != buffers_[static_cast<size_t>(out)].width) {
        return "gather: widths differ";
    }
    Op op{.kind = OpKind::Gather};
    op.in = in;
    op.out = out;
    return push(op);
}

// ---- sealing -------------------------------------------------------------------------------------------------------

void Program::plan_forms() {
    for (const Op& op : ops_) {
        if (op.kind == OpKind::Linear) {
            Buffer& in = buffers_[static_cast<size_t>(op.in)];
            const Format format = weights_[static_cast<size_t>(op.weight)].format;
            if (format == Format::F32)
                in.want_f32 = true;
            else if (format == Format::BF16)
                in.want_bf16 = true;
            else {
                in.want_q8 = true;
                in.q8_group = group_size(format);
            }
        } else if (op.kind != OpKind::Attention) {
            for (int32_t id : {op.in, op.in2}) {
                if (id >= 0) buffers_[static_cast<size_t>(id)].want_f32 = true;
            }
        }
        if (op.residual >= 0) buffers_[static_cast<size_t>(op.residual)].want_f32 = true;
        // Only norms and activations can do without the float32 form of what they write.
        if (op.out >= 0 && op.kind != OpKind::RmsNorm && op.kind != OpKind::SiluMul && op.kind != OpKind::Rope) {
            buffers_[static_cast<size_t>(op.out)].want_f32 = true;
        }
    }
    std::vector<Op> planned;
    for (size_t i = 0; i < ops_.size(); ++i) {
        // Units of attention write whole heads, which must not share a scale.
        if (ops_[i].kind == OpKind::Attention) {
            ops_[i].fuse_forms = shape_.cache.head_dim % buffers_[static_cast<size_t>(ops_[i].out)].q8_group == 0;
        }
        planned.push_back(ops_[i]);
        const int32_t id = ops_[i].out;
        if (id < 0 || ops_[i].fuse_forms) continue;
        const Buffer& out = buffers_[static_cast<size_t>(id)];
        if (out.producer == static_cast<int32_t>(i) && (out.want_bf16 || out.want_q8)) {
            Op op{.kind = OpKind::Convert};
            op.in = id;
            op.out = id;
            planned.push_back(op);
        }
    }
    Op sample{.kind = OpKind::Sample};
    sample.in = logits_;
    planned.push_back(sample);
    ops_ = std::move(planned);
}

std::string Program::plan_memory() {
    struct Span {
        int32_t first = -1, last = -1;
        int64_t offset = 0, bytes = 0;
    };
    std::vector<Span> spans(buffers_.size());
    for (size_t i = 0; i < ops_.size(); ++i) {
        for (int32_t id : {ops_[i].in, ops_[i].in2, ops_[i].residual, ops_[i].out}) {
            if (id < 0) continue;
            Span& span = spans[static_cast<size_t>(id)];
            if (span.first < 0) span.first = static_cast<int32_t>(i);
            span.last = static_cast<int32_t>(i);
        }
    }
    struct Parts {
        int64_t f32, bf16, q8, scales, rotated;
    };
    std::vector<Parts> parts(buffers_.size());
    for (size_t i = 0; i < buffers_.size(); ++i) {
        Buffer& b = buffers_[i];
        const int64_t rows = capacity_of(b);
        b.stride = round_up(b.width, kLanes);
        b.bf16_stride = round_up(b.width + 1, 32) + 32;
        b.q8_stride = round_up(b.width, 64) + 64;
        b.scale_stride = (b.width + b.q8_group - 1) / b.q8_group;
        int64_t end = 0;
        const auto take = [&end](int64_t bytes) {
            const int64_t at = end;
            end += round_up(bytes, 64);
            return at;
        };
        parts[i].f32 = b.want_f32 ? take(rows * b.stride * 4) : -1;
        parts[i].bf16 = b.want_bf16 ? take(rows * b.bf16_stride * 2) : -1;
        parts[i].q8 = b.want_q8 ? take(rows * b.q8_stride) : -1;
        parts[i].scales = b.want_q8 ? take(rows * b.scale_stride * static_cast<int64_t>(sizeof(GroupScale))) : -1;
        parts[i].rotated = -1;
        if (b.query) {
            b.stride = int64_t(shape_.num_heads) * shape_.cache.padded_dim;
            parts[i].rotated = take(rows * b.stride * 4);
        }
        spans[i].bytes = round_up(end, 4096);
    }
    // First fit by order of creation: a buffer may lie where no buffer alive at the same time lies.
    int64_t total = 0;
    for (size_t i = 0; i < spans.size(); ++i) {
        if (spans[i].first < 0) continue;
        bool moved = true;
        while (moved) {
            moved = false;
            for (size_t j = 0; j < i; ++j) {
                const bool together =
                    spans[j].first >= 0 && spans[j].first <= spans[i].last && spans[i].first <= spans[j].last;
                const bool overlap = spans[j].offset < spans[i].offset + spans[i].bytes &&
                                     spans[i].offset < spans[j].offset + spans[j].bytes;
                if (together && overlap) {
                    spans[i].offset = spans[j].offset + spans[j].bytes;
                    moved = true;
                }
            }
        }
        total = std::max(total, spans[i].offset + spans[i].bytes);
    }
    if (!arena_.allocate(total)) return "out of memory for activations";
    for (size_t i = 0; i < buffers_.size(); ++i) {
        Buffer& b = buffers_[i];
        uint8_t* base = arena_.data() + spans[i].offset;
        if (parts[i].f32 >= 0) b.f32 = reinterpret_cast<float*>(base + parts[i].f32);
        if (parts[i].bf16 >= 0) b.bf16 = reinterpret_cast<uint16_t*>(base + parts[i].bf16);
        if (parts[i].q8 >= 0) b.q8 = reinterpret_cast<int8_t*>(base + parts[i].q8);
        if (parts[i].scales >= 0) b.scales = reinterpret_cast<GroupScale*>(base + parts[i].scales);
        if (parts[i].rotated >= 0) b.rotated = reinterpret_cast<float*>(base + parts[i].rotated);
    }
    return {};
}

std::string Program::seal(int32_t logits) {
    if (sealed_) return "the program is sealed";
    if (!buffer_ok(logits) || !buffers_[static_cast<size_t>(logits)].per_sample ||
        buffers_[static_cast<size_t>(logits)].width != shape_.vocab) {
        return "the logits buffer has the wrong shape";
    }
    if (shape_.cache.padded_dim > kMaxHeadDim) return "head dimension too large";
    logits_ = logits;
    plan_forms();
    if (std::string error = plan_memory(); !error.empty()) return error;
    if (!cache_.allocate(shape_.cache.layer_bytes() * shape_.num_layers)) return "out of memory for the KV cache";
    int64_t widest = 0;
    for (const Buffer& b : buffers_) widest = std::max(widest, b.width);
    const int64_t tokens = round_up(shape_.max_context, kLanes) + kLanes;
    for (int32_t i = 0; i < shape_.threads; ++i) {
        auto scratch = std::make_unique<ThreadScratch>();
        if (!scratch->scores.allocate(kMaxParts * kMaxQueries * tokens * 4) ||
            !scratch->row.allocate(round_up(widest, kLanes) * 4) ||
            !scratch->panels.allocate(linear_scratch_bytes(widest)) ||
            !scratch->sample_memory.allocate(static_cast<int64_t>(sample_scratch_bytes(shape_.vocab)))) {
            return "out of memory for scratch";
        }
        scratch->sample = sample_scratch(scratch->sample_memory.data(), shape_.vocab);
        scratch_.push_back(std::move(scratch));
    }
    tiles_.reserve(static_cast<size_t>(shape_.max_rows));
    row_sequence_.resize(static_cast<size_t>(shape_.max_rows));
    sealed_ = true;
    return {};
}

// ---- running -------------------------------------------------------------------------------------------------------

void Program::prepare_tiles() {
    const int32_t group = shape_.num_heads / shape_.cache.num_kv_heads;
    const int32_t least_splits = (group + kMaxQueries - 1) / kMaxQueries;
    const int32_t heads = (group + least_splits - 1) / least_splits;
    const int32_t rows_per_tile = std::max(1, kMaxQueries / heads);
    tiles_.clear();
    for (int32_t s = 0; s < step_.sequences; ++s) {
        const int32_t begin = step_.row_starts[s], end = step_.row_starts[s + 1];
        for (int32_t row = begin; row < end; ++row) row_sequence_[static_cast<size_t>(row)] = s;
        for (int32_t row = begin; row < end; row += rows_per_tile)
            tiles_.push_back({s, row, std::min(rows_per_tile, end - row)});
    }
    head_splits_ = least_splits;
    // Few tiles: spread the heads of a group over the threads instead.
    const int64_t units = static_cast<int64_t>(tiles_.size()) * shape_.cache.num_kv_heads * least_splits;
    if (units < 4 * shape_.threads) head_splits_ = group;
    // Many tiles: a unit reads the keys of several heads, which lie side by side in a block.
    heads_together_ = 1;
    if (least_splits == 1 && static_cast<int32_t>(tiles_.size()) >= 4 * shape_.threads) {
        heads_together_ = std::min(shape_.cache.num_kv_heads, kMaxParts);
    }
}

std::string Program::run(const StepView& step) {
    if (!sealed_) return "the program is not sealed";
    if (step.rows < 1 || step.rows > shape_.max_rows) return "too many rows";
    if (step.sequences < 1 || step.sequences > shape_.max_sequences) return "too many sequences";
    if (step.samples < 0 || step.samples > shape_.max_samples) return "too many samples";
    if (step.row_starts[0] != 0 || step.row_starts[step.sequences] != step.rows)
        return "row starts do not cover the rows";
    const CacheGeometry& cache = shape_.cache;
    for (int32_t s = 0; s < step.sequences; ++s) {
        const int32_t begin = step.row_starts[s], end = step.row_starts[s + 1];
        if (begin >= end || end > step.rows) return "row starts do not increase";
        for (int32_t row = begin; row < end; ++row) {
            if (step.token_ids[row] < 0 || step.token_ids[row] >= shape_.vocab)
                return "a token id is out of the vocabulary";
            if (step.positions[row] != step.positions[begin] + row - begin)
                return "positions of a sequence are not consecutive";
        }
        const int32_t last = step.positions[end - 1];
        if (step.positions[begin] < 0 || last >= shape_.max_context) return "a position is out of the context";
        const int64_t blocks = last / cache.block_size + 1;
        if (blocks > step.table_stride) return "a block table is too short";
        for (int64_t b = 0; b < blocks; ++b) {
            const int32_t block = step.block_tables[s * step.table_stride + b];
            if (block < 0 || block >= cache.num_blocks) return "a block id is out of the cache";
        }
    }
    for (int32_t i = 0; i < step.samples; ++i) {
        if (step.sample_rows[i] < 0 || step.sample_rows[i] >= step.rows) return "a sample row is out of range";
    }
    step_ = step;
    prepare_tiles();
    std::fill(times_, times_ + kNumOpKinds, 0);
    phase_began_ = now_ns();
    team_.run(*this, static_cast<int64_t>(ops_.size()));
    return {};
}

const float* Program::logits() const { return buffers_[static_cast<size_t>(logits_)].f32; }
int64_t Program::logits_stride() const { return buffers_[static_cast<size_t>(logits_)].stride; }

void Program::phase_done(int64_t phase) {
    const int64_t now = now_ns();
    times_[static_cast<int>(ops_[static_cast<size_t>(phase)].kind)] += now - phase_began_;
    phase_began_ = now;
}

int64_t Program::rows_per_unit(const Op& op) const {
    const int64_t rows = rows_of(buffers_[static_cast<size_t>(op.out >= 0 ? op.out : op.in)]);
    return std::clamp<int64_t>(rows / (4 * shape_.threads), 1, 16);
}

int64_t Program::panels_per_unit(const Op& op) const {
    const Weight& w = weights_[static_cast<size_t>(op.weight)];
    const int64_t granule = kernels_->panels_per_unit;
    const int64_t granules = (w.panels + granule - 1) / granule;
    return granule * std::clamp<int64_t>(granules / (6 * shape_.threads), 1, 32);
}

int64_t Program::units(int64_t phase) const {
    const Op& op = ops_[static_cast<size_t>(phase)];
    if (op.kind == OpKind::Sample) return step_.params ? step_.samples : 0;
    if (op.kind == OpKind::Attention) {
        return static_cast<int64_t>(tiles_.size()) * attention_units_per_tile();
    }
    if (op.kind == OpKind::Linear) {
        if (rows_of(buffers_[static_cast<size_t>(op.out)]) == 0) return 0;
        const int64_t per = panels_per_unit(op);
        return (weights_[static_cast<size_t>(op.weight)].panels + per - 1) / per;
    }
    const int64_t per = rows_per_unit(op);
    return (rows_of(buffers_[static_cast<size_t>(op.out)]) + per - 1) / per;
}

void Program::run(int64_t phase, int64_t unit, int thread) {
    const Op& op = ops_[static_cast<size_t>(phase)];
    switch (op.kind) {
        case OpKind::Linear: return run_linear(op, unit, thread);
        case OpKind::Attention: return run_attention(op, unit, thread);
        case OpKind::Sample: {
            const Buffer& in = buffers_[static_cast<size_t>(op.in)];
            const SampleOutput output{step_.results + unit, step_.top_ids + unit * step_.top_stride,
                                      step_.top_logprobs + unit * step_.top_stride};
            kernels_->sample_row(in.f32 + unit * in.stride, shape_.vocab, step_.params[unit], step_.arrays,
                                 scratch_[static_cast<size_t>(thread)]->sample, output);
            return;
        }
        default: {
            const int64_t per = rows_per_unit(op), rows = rows_of(buffers_[static_cast<size_t>(op.out)]);
            run_rows(op, unit * per, std::min(rows, (unit + 1) * per), thread);
        }
    }
}

RowForms Program::forms(const Buffer& b, int64_t row, bool with_f32) const {
    return {with_f32 && b.f32 ? b.f32 + row * b.stride : nullptr, b.bf16 ? b.bf16 + row * b.bf16_stride : nullptr,
            b.q8 ? b.q8 + row * b.q8_stride : nullptr, b.scales ? b.scales + row * b.scale_stride : nullptr,
            b.q8_group};
}

void Program::run_rows(const Op& op, int64_t begin, int64_t end, int thread) {
    const Buffer& out = buffers_[static_cast<size_t>(op.out)];
    const Buffer* in = op.in >= 0 ? &buffers_[static_cast<size_t>(op.in)] : nullptr;
    float* scratch = reinterpret_cast<float*>(scratch_[static_cast<size_t>(thread)]->row.data());
    for (int64_t row = begin; row < end; ++row) {
        switch (op.kind) {
            case OpKind::Embed:
                dequantize_row(op.type, op.data + step_.token_ids[row] * op.row_bytes, out.width,
                               out.f32 + row * out.stride);
                break;
            case OpKind::RmsNorm:
            case OpKind::SiluMul: {
                float* target = out.f32 ? out.f32 + row * out.stride : scratch;
                const float* x = in->f32 + row * in->stride;
                if (op.kind == OpKind::RmsNorm) {
                    kernels_->rms_norm(x,
                                       reinterpret_cast<const float*>(vectors_[static_cast<size_t>(op.weight)].data()),
                                       op.eps, out.width, target);
                } else {
                    kernels_->silu_mul(x, x + out.width, 0, out.width, target);
                }
                kernels_->convert(target, 0, out.width, forms(out, row, false));
                break;
            }
            case OpKind::Rope: {
                const int32_t sequence = row_sequence_[static_cast<size_t>(row)];
                const int32_t first = step_.positions[step_.row_starts[sequence]];
                const int32_t position = step_.positions[row];
                const bool last = row + 1 == step_.row_starts[sequence + 1];
                RopeArgs args{};
                args.qkv = in->f32 + row * in->stride;
                args.cos_sin = reinterpret_cast<const float*>(vectors_[static_cast<size_t>(op.weight)].data()) +
                               int64_t(position) * op.rotary_dim;
                args.rotary_dim = op.rotary_dim;
                args.interleaved = op.interleaved;
                args.num_heads = shape_.num_heads;
                args.position = position;
                args.block_table = step_.block_tables + sequence * step_.table_stride;
                args.layer = cache_.data() + op.layer * shape_.cache.layer_bytes();
                // A tile begun in an earlier step had its tail cleared then.
                args.clear_tail = last && position / kLanes * kLanes >= first;
                args.query = out.rotated + row * out.stride;
                kernels_->rope_and_cache(shape_.cache, args);
                break;
            }
            case OpKind::Add: {
                const Buffer& other = buffers_[static_cast<size_t>(op.in2)];
                for (int64_t i = 0; i < out.width; ++i) {
                    out.f32[row * out.stride + i] = in->f32[row * in->stride + i] + other.f32[row * other.stride + i];
                }
                break;
            }
            case OpKind::Gather:
                std::memcpy(out.f32 + row * out.stride, in->f32 + step_.sample_rows[row] * in->stride,
                            static_cast<size_t>(out.width) * 4);
                break;
            case OpKind::Convert:
                kernels_->convert(out.f32 + row * out.stride, 0, out.width, forms(out, row, false));
                break;
            default: break;
        }
    }
}

void Program::run_linear(const Op& op, int64_t unit, int thread) {
    const Weight& w = weights_[static_cast<size_t>(op.weight)];
    const Buffer& in = buffers_[static_cast<size_t>(op.in)];
    const Buffer& out = buffers_[static_cast<size_t>(op.out)];
    Linear args{};
    args.weight = w.data;
    args.format = w.format;
    args.features = w.features;
    args.columns = w.columns;
    args.bias = op.bias >= 0 ? reinterpret_cast<const float*>(vectors_[static_cast<size_t>(op.bias)].data()) : nullptr;
    args.a_f32 = in.f32;
    args.a_bf16 = in.bf16;
    args.a_q8 = in.q8;
    args.a_scales = in.scales;
    args.a_stride = w.format == Format::F32 ? in.stride : w.format == Format::BF16 ? in.bf16_stride : in.q8_stride;
    args.a_scale_stride = in.scale_stride;
    args.out = out.f32 + op.column;
    args.residual = op.residual >= 0 ? buffers_[static_cast<size_t>(op.residual)].f32 + op.column : nullptr;
    args.out_stride = out.stride;
    args.scratch = scratch_[static_cast<size_t>(thread)]->panels.data();
    const int64_t per = panels_per_unit(op);
    kernels_->linear(args, rows_of(out), unit * per, std::min(w.panels, (unit + 1) * per));
}

void Program::run_attention(const Op& op, int64_t unit, int thread) {
    const int32_t kv_heads = shape_.cache.num_kv_heads;
    const int64_t per_tile = attention_units_per_tile();
    const Tile& tile = tiles_[static_cast<size_t>(unit / per_tile)];
    const int32_t place = static_cast<int32_t>(unit % per_tile);
    AttentionArgs parts[kMaxParts];
    int count = 0;
    if (heads_together_ > 1) {
        const int32_t begin = place * heads_together_, end = std::min(kv_heads, begin + heads_together_);
        for (int32_t head = begin; head < end; ++head, ++count) {
            parts[count] = attention_part(op, tile, head, 0, thread, count);
        }
    } else {
        parts[count++] = attention_part(op, tile, place / head_splits_, place % head_splits_, thread, 0);
        if (parts[0].head_begin == parts[0].head_end) return;
    }
    kernels_->attention(shape_.cache, parts, count);
    if (!op.fuse_forms) return;
    const Buffer& out = buffers_[static_cast<size_t>(op.out)];
    for (int32_t r = 0; r < tile.rows; ++r) {
        kernels_->convert(out.f32 + (tile.row + r) * out.stride, int64_t(parts[0].head_begin) * shape_.cache.head_dim,
                          int64_t(parts[count - 1].head_end) * shape_.cache.head_dim, forms(out, tile.row + r, false));
    }
}

// One KV head's share of a unit: one split of its query heads. `place` is its own area of the thread's scores.
AttentionArgs Program::attention_part(const Op& op, const Tile& tile, int32_t kv_head, int32_t split, int thread,
                                      int place) const {
    const CacheGeometry& cache = shape_.cache;
    const int32_t group = shape_.num_heads / cache.num_kv_heads;
    const int32_t heads = (group + head_splits_ - 1) / head_splits_;
    const Buffer& query = buffers_[static_cast<size_t>(op.in)];
    const Buffer& out = buffers_[static_cast<size_t>(op.out)];
    AttentionArgs args{};
    args.layer = cache_.data() + op.layer * cache.layer_bytes();
    args.block_table = step_.block_tables + tile.sequence * step_.table_stride;
    args.query = query.rotated + tile.row * query.stride;
    args.query_stride = query.stride;
    args.out = out.f32 + tile.row * out.stride;
    args.out_stride = out.stride;
    args.position = step_.positions[tile.row];
    args.rows = tile.rows;
    args.kv_head = kv_head;
    args.head_begin = kv_head * group + std::min(group, split * heads);
    args.head_end = kv_head * group + std::min(group, (split + 1) * heads);
    args.scale = op.scale;
    args.score_stride = round_up(args.position + args.rows, kLanes);
    args.scores = reinterpret_cast<float*>(scratch_[static_cast<size_t>(thread)]->scores.data()) +
                  place * kMaxQueries * args.score_stride;
    return args;
}

int64_t Program::attention_units_per_tile() const {
    const int64_t kv_heads = shape_.cache.num_kv_heads;
    return heads_together_ > 1 ? (kv_heads + heads_together_ - 1) / heads_together_ : kv_heads * head_splits_;
}

}  // namespace shoal
