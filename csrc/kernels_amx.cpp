#define SHOAL_ISA isa_amx
#define SHOAL_ISA_NAME "amx"
#define SHOAL_AMX
#include "simd_avx512.h"
// The lanes must be known before the kernels.
#include "kernels_impl.h"
#include "sampler.cpp"

namespace shoal {
const KernelTable* kernels_amx() { return &SHOAL_ISA::kTable; }
}  // namespace shoal
