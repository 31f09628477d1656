#define SHOAL_ISA isa_avx512
#define SHOAL_ISA_NAME "avx512"
#include "simd_avx512.h"
// The lanes must be known before the kernels.
#include "kernels_impl.h"
#include "sampler.cpp"

namespace shoal {
const KernelTable* kernels_avx512() { return &SHOAL_ISA::kTable; }
}  // namespace shoal
