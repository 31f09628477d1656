// What this machine can do at best, measured: reading memory, and each arithmetic path that the kernels use.
//
// A probe keeps all its threads busy from one common start until the time is up and counts the work that got done, so
// a thread that had to wait for a core shows. Arithmetic is written in assembly over distinct registers, because a
// compiler may merge equal accumulators and then a peak is measured that is none; after every block of instructions
// the accumulators are compared with what they must hold.
//
// No function throws. Errors are messages, empty on success.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace shoal {

// Names of the arithmetic paths this processor can run.
std::vector<std::string> probe_paths();

// Operations per second of a path, one value per repetition; a multiply and an add are two operations.
std::string probe_compute(const std::string& path, int threads, double seconds, int repetitions,
                          std::vector<double>* rates);

// Bytes per second of reading `bytes` of memory over and over, each thread its own part from end to end.
std::string probe_read(int64_t bytes, int threads, double seconds, int repetitions, std::vector<double>* rates);

}  // namespace shoal
