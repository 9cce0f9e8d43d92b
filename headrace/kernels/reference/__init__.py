"""The reference kernels: plain torch, any device, the oracle of every other implementation."""

from headrace.kernels.reference.kernels import ReferenceKernels

__all__ = ["ReferenceKernels"]
