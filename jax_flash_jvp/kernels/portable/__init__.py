"""Pointer kernels in plain Triton: any GPU that Triton compiles for, every feature."""
