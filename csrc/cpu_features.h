// What this processor and operating system can run, found at run time.
#pragma once

namespace shoal {

bool cpu_has_avx2();  // AVX2, FMA, F16C
bool cpu_has_avx512();
bool cpu_has_amx();  // asks the system for it, too  // AVX-512 F BW DQ VL VNNI BF16

}  // namespace shoal
