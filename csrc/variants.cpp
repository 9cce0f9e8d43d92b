// Which variants this CPU can run, best first.
#include "variants.h"

#include <cstring>

namespace headrace {

namespace {

bool runs(const char* name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (std::strcmp(name, "avx2") == 0) return avx2;
  if (std::strcmp(name, "avx512") == 0) return avx512;
  if (std::strcmp(name, "avx512_bf16") == 0)
    return avx512 && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
#endif
  return std::strcmp(name, "portable") == 0;
}

}  // namespace

const Kernels* variant(int index) {
  const Kernels* const all[] = {
#if defined(__x86_64__)
      avx512_bf16_kernels(), avx512_kernels(), avx2_kernels(),
#endif
      portable_kernels()};
  for (const Kernels* kernels : all)
    if (kernels != nullptr && runs(kernels->name) && index-- == 0) return kernels;
  return nullptr;
}

}  // namespace headrace
