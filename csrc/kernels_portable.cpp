#define SHOAL_ISA isa_portable
#define SHOAL_ISA_NAME "portable"
#include "simd_portable.h"
// The lanes must be known before the kernels.
#include "kernels_impl.h"
#include "sampler.cpp"

namespace shoal {
const KernelTable* kernels_portable() { return &SHOAL_ISA::kTable; }
}  // namespace shoal
