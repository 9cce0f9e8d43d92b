"""The operations of a CPU in C++ (csrc/), recorded once for a model and replayed with one call a step."""

from headrace.kernels.native.kernels import NativeKernels
from headrace.kernels.native.library import LibraryMissing, variants

__all__ = ["LibraryMissing", "NativeKernels", "variants"]
