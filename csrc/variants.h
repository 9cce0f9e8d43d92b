// Which variants this CPU can run, best first.
#pragma once

#include "ops.h"

namespace headrace {

// The index-th best; null beyond the last.
const Kernels* variant(int index);

}  // namespace headrace
