#define SHOAL_ISA isa_avx2
#define SHOAL_ISA_NAME "avx2"
#include "simd_avx2.h"
// The lanes must be known before the kernels.
#include "kernels_impl.h"
#include "sampler.cpp"

namespace shoal {
const KernelTable* kernels_avx2() { return &SHOAL_ISA::kTable; }
}  // namespace shoal
