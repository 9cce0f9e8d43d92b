// All operations for the Vec in scope, and the table of them. HR_VARIANT is the function that gives it.
#include "ops.h"

#include "math.h"

#include "linear.inl"

#include "rows.inl"

#include "attention.inl"

#include "encoder.inl"

#include "sample.inl"

namespace headrace {

const Kernels* HR_VARIANT() {
  static const Kernels kernels = {
      HR_VARIANT_NAME,
      HR_ISA::pack, HR_ISA::quantise, HR_ISA::linear, HR_ISA::gather,
      HR_ISA::norm, HR_ISA::rope, HR_ISA::silu_mul, HR_ISA::gelu_mul, HR_ISA::scale, HR_ISA::add, HR_ISA::pick,
      HR_ISA::experts, HR_ISA::attention,
      HR_ISA::layer_norm, HR_ISA::gelu, HR_ISA::tanh, HR_ISA::encoder_attention, HR_ISA::sample,
  };
  return &kernels;
}

}  // namespace headrace
