"""Pointer kernels in plain Triton: NVIDIA GPUs from sm_80 on, every feature."""
