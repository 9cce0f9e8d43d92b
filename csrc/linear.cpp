// Memory of packed matrices: one mapping each, in huge pages where the system has them.
#include "linear.h"

#include <sys/mman.h>

namespace headrace {

namespace {

constexpr size_t kAlignment = 64;

size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

bool allocate_packed(PackedMatrix* matrix) {
  size_t values = aligned(static_cast<size_t>(matrix->panels) * matrix->panel_bytes);
  size_t numbers = static_cast<size_t>(matrix->panels * matrix->groups * kPanel);
  size_t scales = aligned(numbers * (matrix->half_scales ? 2 : 4));
  size_t offsets = matrix->offset_kind == Offsets::kHeld ? aligned(numbers * (matrix->half_offsets ? 2 : 4)) : 0;
  size_t bytes = values + scales + offsets;
  if (bytes > 0) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return false;
#ifdef MADV_HUGEPAGE
    madvise(memory, bytes, MADV_HUGEPAGE);
#endif
    matrix->values = static_cast<uint8_t*>(memory);
    matrix->scales = matrix->values + values;
    matrix->offsets = matrix->values + values + scales;
  }
  matrix->mapped_bytes = bytes;
  return true;
}

size_t packed_bytes(const PackedMatrix* matrix) { return matrix->mapped_bytes; }

void free_packed(PackedMatrix* matrix) {
  if (matrix == nullptr) return;
  if (matrix->mapped_bytes > 0) munmap(matrix->values, matrix->mapped_bytes);
  delete matrix;
}

}  // namespace headrace
