// The Python binding: checks every length, then calls plain C++.
//
// Methods of Program that can fail return a message ("" on success); the Python side raises. Arrays arrive as
// C-contiguous views whose element type nanobind checks. The step runs with the GIL released.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "cpu_features.h"
#include "probes.h"
#include "program.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <typename T> using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T> using Matrix = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <typename T> using OutVector = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T> using OutMatrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

const shoal::KernelTable* kernels_of(const std::string& isa) {
#if defined(SHOAL_X86)
    if (isa == "amx" && shoal::cpu_has_amx()) return shoal::kernels_amx();
    if (isa == "avx512" && shoal::cpu_has_avx512()) return shoal::kernels_avx512();
    if (isa == "avx2" && shoal::cpu_has_avx2()) return shoal::kernels_avx2();
#endif
    if (isa == "portable") return shoal::kernels_portable();
    return nullptr;
}

std::vector<std::string> available_isas() {
    std::vector<std::string> names;
    for (const char* name : {"amx", "avx512", "avx2", "portable"}) {
        if (kernels_of(name)) names.emplace_back(name);
    }
    return names;
}

bool known_type(int type) { return type >= 0 && type <= static_cast<int>(shoal::TensorType::Q6_K); }

struct SamplingArrays {
    Vector<uint8_t> params;  // SampleParams records
    Vector<int32_t> bias_ids;
    Vector<float> bias_values;
    Vector<int32_t> banned_ids;
    Vector<int32_t> history;
    Matrix<uint32_t> masks;
};

std::pair<std::string, std::vector<double>> probe_compute(const std::string& path, int threads, double seconds,
                                                          int repetitions) {
    std::vector<double> rates;
    nb::gil_scoped_release release;
    std::string error = shoal::probe_compute(path, threads, seconds, repetitions, &rates);
    return {error, rates};
}

std::pair<std::string, std::vector<double>> probe_read(int64_t bytes, int threads, double seconds, int repetitions) {
    std::vector<double> rates;
    nb::gil_scoped_release release;
    std::string error = shoal::probe_read(bytes, threads, seconds, repetitions, &rates);
    return {error, rates};
}

// Ranges of every record inside the flat arrays, and room for the alternatives.
std::string check_sampling(const SamplingArrays& s, size_t samples, size_t room, int64_t vocab) {
    if (s.params.size() != samples * sizeof(shoal::SampleParams)) return "sampling: one record per sample row";
    if (s.bias_ids.size() != s.bias_values.size()) return "sampling: bias ids and values differ in length";
    const auto inside = [](int32_t start, int32_t count, size_t size) {
        return start >= 0 && count >= 0 && static_cast<size_t>(start) + static_cast<size_t>(count) <= size;
    };
    const auto* params = reinterpret_cast<const shoal::SampleParams*>(s.params.data());
    for (size_t i = 0; i < samples; ++i) {
        const shoal::SampleParams& p = params[i];
        if (!inside(p.bias_start, p.bias_count, s.bias_ids.size()) ||
            !inside(p.banned_start, p.banned_count, s.banned_ids.size()) ||
            !inside(p.history_start, p.history_count, s.history.size()) || p.num_prompt < 0) {
            return "sampling: a range is out of its array";
        }
        if (p.num_logprobs > 0 && static_cast<size_t>(p.num_logprobs) > room)
            return "sampling: too little room for alternatives";
        if (p.mask < 0 || static_cast<size_t>(p.mask) > s.masks.shape(0)) return "sampling: no such mask";
        if (p.mask > 0 && static_cast<int64_t>(s.masks.shape(1)) * 32 < vocab)
            return "sampling: masks are narrower than the vocabulary";
    }
    return {};
}

class NativeProgram {
  public:
    NativeProgram(const std::string& isa, int max_rows, int max_samples, int max_sequences, int max_context, int vocab,
                  int num_layers, int num_heads, int threads, int num_blocks, int block_size, int num_kv_heads,
                  int head_dim, const std::string& cache_type)
        : program_(shape(max_rows, max_samples, max_sequences, max_context, vocab, num_layers, num_heads, threads,
                         num_blocks, block_size, num_kv_heads, head_dim, cache_type),
                   kernels(isa)),
          vocab_(vocab) {}

    std::pair<std::string, int> add_weight(const std::vector<std::tuple<int, Matrix<uint8_t>>>& parts, int64_t features,
                                           int format) {
        std::vector<shoal::WeightPart> native;
        for (const auto& [type, data] : parts) {
            if (!known_type(type)) return {"unknown tensor type", -1};
            native.push_back({static_cast<shoal::TensorType>(type), data.data(), static_cast<int64_t>(data.shape(0)),
                              static_cast<int64_t>(data.shape(1))});
        }
        if (format < 0 || format > static_cast<int>(shoal::Format::Q8C)) return {"unknown format", -1};
        int32_t id = -1;
        nb::gil_scoped_release release;
        std::string error = program_.add_weight(native, features, static_cast<shoal::Format>(format), &id);
        return {error, id};
    }
    int add_vector(Vector<float> values) {
        return program_.add_vector(values.data(), static_cast<int64_t>(values.size()));
    }
    int add_buffer(int64_t width, bool per_sample) { return width > 0 ? program_.add_buffer(width, per_sample) : -1; }
    std::string embed(int type, Matrix<uint8_t> table, int64_t width, int out) {
        if (!known_type(type)) return "unknown tensor type";
        if (static_cast<int64_t>(table.shape(0)) < vocab_) return "embed: fewer rows than the vocabulary";
        std::string error = program_.embed(static_cast<shoal::TensorType>(type), table.data(),
                                           static_cast<int64_t>(table.shape(1)), width, out);
        if (error.empty()) kept_.push_back(table);
        return error;
    }
    std::string rms_norm(int in, int out, int weight, float eps) { return program_.rms_norm(in, out, weight, eps); }
    std::string linear(int in, int out, int64_t column, int weight, int bias, int residual) {
        return program_.linear(in, out, column, weight, bias, residual);
    }
    std::string rope_and_cache(int qkv, int out, int layer, int cos_sin, int rotary_dim, bool interleaved) {
        return program_.rope_and_cache(qkv, out, layer, cos_sin, rotary_dim, interleaved);
    }
    std::string attention(int query, int out, int layer, float scale) {
        return program_.attention(query, out, layer, scale);
    }
    std::string silu_mul(int in, int out) { return program_.silu_mul(in, out); }
    std::string add(int a, int b, int out) { return program_.add(a, b, out); }
    std::string gather(int in, int out) { return program_.gather(in, out); }
    std::string seal(int logits) { return program_.seal(logits); }

    std::string step(Vector<int32_t> token_ids, Vector<int32_t> positions, Vector<int32_t> row_starts,
                     Matrix<int32_t> block_tables, Vector<int32_t> sample_rows, Vector<uint8_t> params,
                     Vector<int32_t> bias_ids, Vector<float> bias_values, Vector<int32_t> banned_ids,
                     Vector<int32_t> history, Matrix<uint32_t> masks, OutVector<uint8_t> results,
                     OutMatrix<int32_t> top_ids, OutMatrix<float> top_logprobs) {
        shoal::StepView view{};
        if (std::string error = fill(view, token_ids, positions, row_starts, block_tables, sample_rows); !error.empty())
            return error;
        const size_t samples = sample_rows.size();
        const SamplingArrays sampling{params, bias_ids, bias_values, banned_ids, history, masks};
        if (top_ids.shape(0) < samples || top_logprobs.shape(0) < samples ||
            top_ids.shape(1) != top_logprobs.shape(1)) {
            return "sampling: the alternatives' arrays have the wrong shape";
        }
        if (results.size() != samples * sizeof(shoal::SampleResult)) return "sampling: one result per sample row";
        if (std::string error = check_sampling(sampling, samples, top_ids.shape(1), vocab_); !error.empty())
            return error;
        view.params = reinterpret_cast<const shoal::SampleParams*>(params.data());
        view.arrays = {bias_ids.data(), bias_values.data(), banned_ids.data(),
                       history.data(),  masks.data(),       static_cast<int64_t>(masks.shape(1))};
        view.results = reinterpret_cast<shoal::SampleResult*>(results.data());
        view.top_ids = top_ids.data();
        view.top_logprobs = top_logprobs.data();
        view.top_stride = static_cast<int64_t>(top_ids.shape(1));
        nb::gil_scoped_release release;
        return program_.run(view);
    }

    // Logits instead of tokens, copied into `out` [samples, vocab].
    std::string logits(Vector<int32_t> token_ids, Vector<int32_t> positions, Vector<int32_t> row_starts,
                       Matrix<int32_t> block_tables, Vector<int32_t> sample_rows, OutMatrix<float> out) {
        shoal::StepView view{};
        if (std::string error = fill(view, token_ids, positions, row_starts, block_tables, sample_rows); !error.empty())
            return error;
        if (out.shape(0) != sample_rows.size() || static_cast<int64_t>(out.shape(1)) != vocab_)
            return "logits: the output has the wrong shape";
        nb::gil_scoped_release release;
        if (std::string error = program_.run(view); !error.empty()) return error;
        for (size_t i = 0; i < out.shape(0); ++i) {
            const float* row = program_.logits() + static_cast<int64_t>(i) * program_.logits_stride();
            std::copy(row, row + vocab_, out.data() + static_cast<int64_t>(i) * vocab_);
        }
        return {};
    }

    int64_t weight_bytes() const { return program_.weight_bytes(); }
    int64_t buffer_bytes() const { return program_.buffer_bytes(); }
    int64_t cache_bytes() const { return program_.cache_bytes(); }
    std::vector<int64_t> last_times() const {
        return {program_.last_times(), program_.last_times() + shoal::kNumOpKinds};
    }

  private:
    static const shoal::KernelTable* kernels(const std::string& isa) {
        const shoal::KernelTable* table = kernels_of(isa);
        if (!table) throw nb::value_error("this processor lacks the instruction set, or it is unknown");
        return table;
    }
    static shoal::ProgramShape shape(int max_rows, int max_samples, int max_sequences, int max_context, int vocab,
                                     int num_layers, int num_heads, int threads, int num_blocks, int block_size,
                                     int num_kv_heads, int head_dim, const std::string& cache_type) {
        for (int v : {max_rows, max_samples, max_sequences, max_context, vocab, num_layers, num_heads, threads,
                      num_blocks, block_size, num_kv_heads, head_dim}) {
            if (v < 1) throw nb::value_error("every size must be at least 1");
        }
        if (block_size % shoal::kLanes) throw nb::value_error("block_size must be a multiple of 16");
        if (num_heads % num_kv_heads) throw nb::value_error("num_heads must be a multiple of num_kv_heads");
        const int padded = static_cast<int>(shoal::round_up(head_dim, shoal::kLanes));
        shoal::CacheType type{};
        if (cache_type == "bf16")
            type = shoal::CacheType::BF16;
        else if (cache_type == "int8")
            type = shoal::CacheType::I8;
        else if (cache_type != "f32")
            throw nb::value_error("cache_type must be f32, bf16 or int8");
        return {max_rows,    max_samples, max_sequences,
                max_context, vocab,       num_layers,
                num_heads,   threads,     {num_blocks, block_size, num_kv_heads, head_dim, padded, type}};
    }
    static std::string fill(shoal::StepView& view, const Vector<int32_t>& token_ids, const Vector<int32_t>& positions,
                            const Vector<int32_t>& row_starts, const Matrix<int32_t>& block_tables,
                            const Vector<int32_t>& sample_rows) {
        if (positions.size() != token_ids.size()) return "step: one position per token";
        if (row_starts.size() < 2 || block_tables.shape(0) + 1 != row_starts.size())
            return "step: one block table per sequence";
        view.token_ids = token_ids.data();
        view.positions = positions.data();
        view.rows = static_cast<int32_t>(token_ids.size());
        view.row_starts = row_starts.data();
        view.sequences = static_cast<int32_t>(row_starts.size()) - 1;
        view.block_tables = block_tables.data();
        view.table_stride = static_cast<int64_t>(block_tables.shape(1));
        view.sample_rows = sample_rows.data();
        view.samples = static_cast<int32_t>(sample_rows.size());
        return {};
    }

    shoal::Program program_;
    const int64_t vocab_;
    std::vector<Matrix<uint8_t>> kept_;  // arrays the program reads in every step
};

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Shoal's native kernels";
    m.def("available_isas", &available_isas, "Instruction sets this processor can run, best first.");
    m.def("probe_paths", &shoal::probe_paths, "Arithmetic paths this processor can run.");
    m.def("probe_compute", &probe_compute, "path"_a, "threads"_a, "seconds"_a, "repetitions"_a);
    m.def("probe_read", &probe_read, "bytes"_a, "threads"_a, "seconds"_a, "repetitions"_a);
    nb::class_<NativeProgram>(m, "Program")
        .def(nb::init<const std::string&, int, int, int, int, int, int, int, int, int, int, int, int,
                      const std::string&>(),
             nb::kw_only(), "isa"_a, "max_rows"_a, "max_samples"_a, "max_sequences"_a, "max_context"_a, "vocab"_a,
             "num_layers"_a, "num_heads"_a, "threads"_a, "num_blocks"_a, "block_size"_a, "num_kv_heads"_a, "head_dim"_a,
             "cache_type"_a)
        .def("add_weight", &NativeProgram::add_weight, "parts"_a, "features"_a, "format"_a)
        .def("add_vector", &NativeProgram::add_vector, "values"_a)
        .def("add_buffer", &NativeProgram::add_buffer, "width"_a, "per_sample"_a)
        .def("embed", &NativeProgram::embed, "type"_a, "table"_a, "width"_a, "out"_a)
        .def("rms_norm", &NativeProgram::rms_norm, "input"_a, "out"_a, "weight"_a, "eps"_a)
        .def("linear", &NativeProgram::linear, "input"_a, "out"_a, "column"_a, "weight"_a, "bias"_a, "residual"_a)
        .def("rope_and_cache", &NativeProgram::rope_and_cache, "qkv"_a, "out"_a, "layer"_a, "cos_sin"_a, "rotary_dim"_a,
             "interleaved"_a)
        .def("attention", &NativeProgram::attention, "query"_a, "out"_a, "layer"_a, "scale"_a)
        .def("silu_mul", &NativeProgram::silu_mul, "input"_a, "out"_a)
        .def("add", &NativeProgram::add, "a"_a, "b"_a, "out"_a)
        .def("gather", &NativeProgram::gather, "input"_a, "out"_a)
        .def("seal", &NativeProgram::seal, "logits"_a)
        .def("step", &NativeProgram::step, "token_ids"_a, "positions"_a, "row_starts"_a, "block_tables"_a,
             "sample_rows"_a, "params"_a, "bias_ids"_a, "bias_values"_a, "banned_ids"_a, "history"_a, "masks"_a,
             "results"_a, "top_ids"_a, "top_logprobs"_a)
        .def("logits", &NativeProgram::logits, "token_ids"_a, "positions"_a, "row_starts"_a, "block_tables"_a,
             "sample_rows"_a, "out"_a)
        .def("last_times", &NativeProgram::last_times)
        .def_prop_ro("weight_bytes", &NativeProgram::weight_bytes)
        .def_prop_ro("buffer_bytes", &NativeProgram::buffer_bytes)
        .def_prop_ro("cache_bytes", &NativeProgram::cache_bytes);
}
