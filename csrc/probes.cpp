#include "probes.h"

#include <atomic>
#include <chrono>
#include <new>
#include <thread>

#include "cpu_features.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace shoal {
namespace {

double now_seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// A block of work: does `rounds` rounds and says whether the result is right.
using Block = bool (*)(int64_t rounds);

struct Path {
    const char* name;
    bool (*usable)();
    Block block;
    double ops_per_round;
};

// Rounds of one block: long against reading the clock, short against the probe's duration, and few enough that no
// accumulator below leaves the range in which its sums are exact.
constexpr int64_t kRounds = 1 << 12;

bool always() { return true; }

template <typename T> bool all_equal(const T* values, int count, T expected) {
    bool equal = true;
    for (int i = 0; i < count; ++i) equal &= values[i] == expected;
    return equal;
}

// The portable paths are what a compiler makes of plain loops. The barrier keeps it from foreseeing the result.
template <typename T> void keep(T& value) { asm volatile("" : : "g"(&value) : "memory"); }

bool block_fp32_portable(int64_t rounds) {
    float sums[64] = {}, factors[64];
    for (float& factor : factors) factor = 0.5f;
    keep(factors);
    for (int64_t round = 0; round < rounds; ++round) {
        for (int i = 0; i < 64; ++i) sums[i] += factors[i] * factors[i];
        keep(sums);
    }
    return all_equal(sums, 64, 0.25f * static_cast<float>(rounds));
}

bool block_int8_portable(int64_t rounds) {
    constexpr int kCount = 256;
    int8_t a[kCount], b[kCount];
    for (int i = 0; i < kCount; ++i) a[i] = 2, b[i] = 3;
    int64_t total = 0;
    for (int64_t round = 0; round < rounds; ++round) {
        keep(a);
        keep(b);
        int32_t sum = 0;
        for (int i = 0; i < kCount; ++i) sum += int16_t(a[i]) * int16_t(b[i]);
        total += sum;
    }
    return total == rounds * kCount * 6;
}

#if defined(SHOAL_X86)

constexpr uint32_t kHalf = 0x3f000000;        // float 0.5
constexpr uint32_t kBf16Halves = 0x3f003f00;  // two bfloat16 0.5
constexpr uint32_t kTwos = 0x02020202, kThrees = 0x03030303;

#define SHOAL_TARGET_AVX2 __attribute__((target("avx2,fma")))
#define SHOAL_TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni,avx512bf16")))

// 16 accumulators of 512 bits: more than latency times issue width of any of the instructions.
#define SHOAL_EACH16(DO) \
    DO("0")              \
    DO("1")              \
    DO("2")              \
    DO("3") DO("4") DO("5") DO("6") DO("7") DO("8") DO("9") DO("10") DO("11") DO("12") DO("13") DO("14") DO("15")
#define SHOAL_CLEAR512(N) "vpxord %%zmm" N ", %%zmm" N ", %%zmm" N "\n\t"
#define SHOAL_STORE512(N) "vmovdqu64 %%zmm" N ", 64*" N "(%[out])\n\t"
#define SHOAL_CLOBBER16                                                                                        \
    "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", \
        "xmm13", "xmm14", "xmm15"

#define SHOAL_BLOCK512(NAME, INSTRUCTION, TYPE, A, B, EXPECTED)                                                             \
    SHOAL_TARGET_AVX512 bool NAME(int64_t rounds) {                                                                         \
        alignas(64) TYPE out[16 * 16];                                                                                      \
        int64_t left = rounds;                                                                                              \
        asm volatile(                                                                                                       \
            "vpbroadcastd %[a], %%zmm30\n\tvpbroadcastd %[b], %%zmm31\n\t" SHOAL_EACH16(                                    \
                SHOAL_CLEAR512) "1:\n\t" SHOAL_EACH16(INSTRUCTION) "dec %[left]\n\tjnz 1b\n\t" SHOAL_EACH16(SHOAL_STORE512) \
            : [left] "+r"(left)                                                                                             \
            : [a] "r"(A), [b] "r"(B), [out] "r"(out)                                                                        \
            : SHOAL_CLOBBER16, "xmm30", "xmm31", "memory", "cc");                                                           \
        return all_equal(out, 16 * 16, static_cast<TYPE>(EXPECTED));                                                        \
    }

#define SHOAL_FMA512(N) "vfmadd231ps %%zmm30, %%zmm31, %%zmm" N "\n\t"
#define SHOAL_VNNI512(N) "vpdpbusd %%zmm31, %%zmm30, %%zmm" N "\n\t"
#define SHOAL_BF16_512(N) "vdpbf16ps %%zmm31, %%zmm30, %%zmm" N "\n\t"
SHOAL_BLOCK512(block_fp32_avx512, SHOAL_FMA512, float, kHalf, kHalf, 0.25f * static_cast<float>(rounds))
SHOAL_BLOCK512(block_int8_vnni, SHOAL_VNNI512, int32_t, kTwos, kThrees, 24 * rounds)
SHOAL_BLOCK512(block_bf16_avx512, SHOAL_BF16_512, float, kBf16Halves, kBf16Halves, 0.5f * static_cast<float>(rounds))

// 12 accumulators of 256 bits, the rest for operands.
#define SHOAL_EACH12(DO) \
    DO("0") DO("1") DO("2") DO("3") DO("4") DO("5") DO("6") DO("7") DO("8") DO("9") DO("10") DO("11")
#define SHOAL_CLEAR256(N) "vpxor %%ymm" N ", %%ymm" N ", %%ymm" N "\n\t"
#define SHOAL_STORE256(N) "vmovdqu %%ymm" N ", 32*" N "(%[out])\n\t"

#define SHOAL_BLOCK256(NAME, INSTRUCTION, TYPE, A, B, EXPECTED)                                        \
    SHOAL_TARGET_AVX2 bool NAME(int64_t rounds) {                                                      \
        alignas(32) TYPE out[12 * 8];                                                                  \
        int64_t left = rounds;                                                                         \
        asm volatile(                                                                                  \
            "vmovd %[a], %%xmm14\n\tvpbroadcastd %%xmm14, %%ymm14\n\tvmovd %[b], %%xmm15\n\t"          \
            "vpbroadcastd %%xmm15, %%ymm15\n\tvpcmpeqw %%ymm13, %%ymm13, %%ymm13\n\t"                  \
            "vpsrlw $15, %%ymm13, %%ymm13\n\t" SHOAL_EACH12(SHOAL_CLEAR256) "1:\n\t" SHOAL_EACH12(     \
                INSTRUCTION) "dec %[left]\n\tjnz 1b\n\t" SHOAL_EACH12(SHOAL_STORE256) "vzeroupper\n\t" \
            : [left] "+r"(left)                                                                        \
            : [a] "r"(A), [b] "r"(B), [out] "r"(out)                                                   \
            : SHOAL_CLOBBER16, "memory", "cc");                                                        \
        return all_equal(out, 12 * 8, static_cast<TYPE>(EXPECTED));                                    \
    }

#define SHOAL_FMA256(N) "vfmadd231ps %%ymm14, %%ymm15, %%ymm" N "\n\t"
// What stands for a dot product of bytes without VNNI: pairs to 16 bits, those to 32 (ymm13 holds ones), a sum.
#define SHOAL_MADD256(N)                       \
    "vpmaddubsw %%ymm15, %%ymm14, %%ymm12\n\t" \
    "vpmaddwd %%ymm13, %%ymm12, %%ymm12\n\t"   \
    "vpaddd %%ymm12, %%ymm" N ", %%ymm" N "\n\t"
SHOAL_BLOCK256(block_fp32_avx2, SHOAL_FMA256, float, kHalf, kHalf, 0.25f * static_cast<float>(rounds))
SHOAL_BLOCK256(block_int8_avx2, SHOAL_MADD256, int32_t, kTwos, kThrees, 24 * rounds)

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t column_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

#define SHOAL_TARGET_AMX __attribute__((target("amx-tile,amx-int8,amx-bf16")))
#define SHOAL_EACH6(DO) DO("0") DO("1") DO("2") DO("3") DO("4") DO("5")
#define SHOAL_CLEAR_TILE(N) "tilezero %%tmm" N "\n\t"
#define SHOAL_STORE_TILE(N) "tilestored %%tmm" N ", 1024*" N "(%[out],%[stride],1)\n\t"

// Six accumulator tiles, one tile of each operand.
#define SHOAL_BLOCK_AMX(NAME, INSTRUCTION, TYPE, A, B, EXPECTED)                                           \
    SHOAL_TARGET_AMX bool NAME(int64_t rounds) {                                                           \
        alignas(64) TYPE out[6 * 256];                                                                     \
        alignas(64) uint32_t a[256], b[256];                                                               \
        for (int i = 0; i < 256; ++i) a[i] = A, b[i] = B;                                                  \
        const TileConfig config;                                                                           \
        int64_t left = rounds;                                                                             \
        const int64_t stride = 64;                                                                         \
        asm volatile(                                                                                      \
            "ldtilecfg %[config]\n\ttileloadd (%[a],%[stride],1), %%tmm6\n\t"                              \
            "tileloadd (%[b],%[stride],1), %%tmm7\n\t" SHOAL_EACH6(SHOAL_CLEAR_TILE) "1:\n\t" SHOAL_EACH6( \
                INSTRUCTION) "dec %[left]\n\tjnz 1b\n\t" SHOAL_EACH6(SHOAL_STORE_TILE) "tilerelease\n\t"   \
            : [left] "+r"(left)                                                                            \
            : [config] "m"(config), [a] "r"(a), [b] "r"(b), [out] "r"(out), [stride] "r"(stride)           \
            : "memory", "cc");                                                                             \
        return all_equal(out, 6 * 256, static_cast<TYPE>(EXPECTED));                                       \
    }

#define SHOAL_AMX_INT8(N) "tdpbusd %%tmm7, %%tmm6, %%tmm" N "\n\t"
#define SHOAL_AMX_BF16(N) "tdpbf16ps %%tmm7, %%tmm6, %%tmm" N "\n\t"
// 64 products of bytes, or 32 of bfloat16, per element of a tile.
SHOAL_BLOCK_AMX(block_int8_amx, SHOAL_AMX_INT8, int32_t, kTwos, kThrees, 384 * rounds)
SHOAL_BLOCK_AMX(block_bf16_amx, SHOAL_AMX_BF16, float, kBf16Halves, kBf16Halves, 8.0f * static_cast<float>(rounds))
#endif  // SHOAL_X86

constexpr Path kPaths[] = {
#if defined(SHOAL_X86)
    {"fp32_avx512", cpu_has_avx512, block_fp32_avx512, 16 * 16 * 2},
    {"int8_vnni", cpu_has_avx512, block_int8_vnni, 16 * 64 * 2},
    {"bf16_avx512", cpu_has_avx512, block_bf16_avx512, 16 * 32 * 2},
    {"fp32_avx2", cpu_has_avx2, block_fp32_avx2, 12 * 8 * 2},
    {"int8_avx2", cpu_has_avx2, block_int8_avx2, 12 * 32 * 2},
    {"int8_amx", cpu_has_amx, block_int8_amx, 6 * 16 * 16 * 64 * 2},
    {"bf16_amx", cpu_has_amx, block_bf16_amx, 6 * 16 * 16 * 32 * 2},
#endif
    {"fp32_portable", always, block_fp32_portable, 64 * 2},
    {"int8_portable", always, block_int8_portable, 256 * 2},
};

// Runs `work(thread)` on all threads at once until the time is up; it does some work and says how much, negative if
// the result was wrong. The rate, or a negative number.
template <typename Work> double measure(int threads, double seconds, const Work& work) {
    std::atomic<int> ready{0};
    std::atomic<double> begin{0.0};
    std::vector<double> rates(static_cast<size_t>(threads), 0.0);
    const auto body = [&](int thread) {
        work(thread);  // warm: pages touched, clocks up
        ready.fetch_add(1);
        while (begin.load() == 0.0) std::this_thread::yield();
        const double start = begin.load();
        double done = 0.0, now = start;
        while (now - start < seconds) {
            const double amount = work(thread);
            if (amount < 0.0) {
                done = -1.0;
                break;
            }
            done += amount;
            now = now_seconds();
        }
        rates[static_cast<size_t>(thread)] = done < 0.0 ? -1.0 : done / (now - start);
    };
    std::vector<std::thread> others;
    for (int thread = 1; thread < threads; ++thread) others.emplace_back(body, thread);
    std::thread last([&] {
        while (ready.load() < threads) std::this_thread::yield();
        begin.store(now_seconds());
    });
    body(0);
    last.join();
    for (std::thread& other : others) other.join();
    double sum = 0.0;
    for (double rate : rates) {
        if (rate < 0.0) return -1.0;
        sum += rate;
    }
    return sum;
}

std::string check(int threads, double seconds, int repetitions) {
    if (threads < 1 || threads > 1024) return "threads must be in [1, 1024]";
    if (!(seconds > 0.0) || seconds > 60.0) return "seconds must be in (0, 60]";
    if (repetitions < 1 || repetitions > 1000) return "repetitions must be in [1, 1000]";
    return {};
}

// The sum of a stretch of memory. Sixteen sums, so that loads are all there is to wait for.
inline __attribute__((always_inline)) uint64_t sum_of(const uint64_t* words, int64_t count) {
    uint64_t sums[16] = {};
    for (int64_t i = 0; i + 16 <= count; i += 16) {
        for (int j = 0; j < 16; ++j) sums[j] += words[i + j];
    }
    uint64_t sum = 0;
    for (uint64_t part : sums) sum += part;
    return sum;
}

using SumWords = uint64_t (*)(const uint64_t*, int64_t);
uint64_t sum_portable(const uint64_t* words, int64_t count) { return sum_of(words, count); }
#if defined(SHOAL_X86)
SHOAL_TARGET_AVX2 uint64_t sum_avx2(const uint64_t* words, int64_t count) { return sum_of(words, count); }
SumWords choose_sum() { return cpu_has_avx2() ? sum_avx2 : sum_portable; }
#else
SumWords choose_sum() { return sum_portable; }
#endif

// Memory of its own, on huge pages where there are any, as the weights are.
class Pages {
  public:
    explicit Pages(int64_t bytes) : bytes_(static_cast<size_t>(bytes)) {
#if defined(__linux__)
        void* found = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (found == MAP_FAILED) return;
        madvise(found, bytes_, MADV_HUGEPAGE);
        data_ = static_cast<uint64_t*>(found);
#else
        data_ = new (std::nothrow) uint64_t[bytes_ / sizeof(uint64_t)];
#endif
    }
    ~Pages() {
        if (!data_) return;
#if defined(__linux__)
        munmap(data_, bytes_);
#else
        delete[] data_;
#endif
    }
    Pages(const Pages&) = delete;
    Pages& operator=(const Pages&) = delete;
    uint64_t* data() const { return data_; }

  private:
    size_t bytes_;
    uint64_t* data_ = nullptr;
};

}  // namespace

std::vector<std::string> probe_paths() {
    std::vector<std::string> names;
    for (const Path& path : kPaths) {
        if (path.usable()) names.emplace_back(path.name);
    }
    return names;
}

std::string probe_compute(const std::string& name, int threads, double seconds, int repetitions,
                          std::vector<double>* rates) {
    if (std::string error = check(threads, seconds, repetitions); !error.empty()) return error;
    for (const Path& path : kPaths) {
        if (name != path.name) continue;
        if (!path.usable()) return "this processor cannot run the path " + name;
        for (int repetition = 0; repetition < repetitions; ++repetition) {
            const double rate = measure(threads, seconds, [&](int) {
                return path.block(kRounds) ? path.ops_per_round * static_cast<double>(kRounds) : -1.0;
            });
            if (rate < 0.0) return "the path " + name + " computed a wrong result";
            rates->push_back(rate);
        }
        return {};
    }
    return "there is no path " + name;
}

std::string probe_read(int64_t bytes, int threads, double seconds, int repetitions, std::vector<double>* rates) {
    if (std::string error = check(threads, seconds, repetitions); !error.empty()) return error;
    constexpr int64_t kChunk = 1 << 20, kMost = int64_t(1) << 36;
    const int64_t part = bytes / threads / kChunk * kChunk;
    if (part < kChunk || bytes > kMost) return "bytes must be at least 1 MiB a thread and at most 64 GiB";
    const Pages memory(part * threads);
    if (!memory.data()) return "out of memory";
    struct alignas(64) Place {
        int64_t next = 0;
        bool filled = false;
    };
    std::vector<Place> places(static_cast<size_t>(threads));
    constexpr int64_t kWords = kChunk / static_cast<int64_t>(sizeof(uint64_t));
    const SumWords sum_words = choose_sum();
    const int64_t words = part / static_cast<int64_t>(sizeof(uint64_t));
    // Word i of a thread's part holds i + 1, so the sum of a chunk is known.
    const auto read_chunk = [&](int thread) {
        Place& place = places[static_cast<size_t>(thread)];
        uint64_t* own = memory.data() + thread * words;
        if (!place.filled) {  // by the thread that will read it
            for (int64_t i = 0; i < words; ++i) own[i] = static_cast<uint64_t>(i + 1);
            place.filled = true;
        }
        const auto first = static_cast<uint64_t>(place.next + 1), last = static_cast<uint64_t>(place.next + kWords);
        const bool right = sum_words(own + place.next, kWords) == (first + last) * (kWords / 2);
        place.next = place.next + kWords == words ? 0 : place.next + kWords;
        return right ? static_cast<double>(kChunk) : -1.0;
    };
    for (int repetition = 0; repetition < repetitions; ++repetition) {
        const double rate = measure(threads, seconds, read_chunk);
        if (rate < 0.0) return "memory holds something else than was written";
        rates->push_back(rate);
    }
    return {};
}

}  // namespace shoal
