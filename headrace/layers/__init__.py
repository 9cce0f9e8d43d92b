"""Parts of a decoder as functions over handles of the kernels."""
