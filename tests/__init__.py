"""Tests, by what they need: unit, kernels, parity, api and faults run with pip packages alone."""
