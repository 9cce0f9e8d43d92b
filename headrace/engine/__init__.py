"""Policy: which sequence computes which tokens in which blocks. No tensors, no text, no I/O."""
