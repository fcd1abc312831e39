"""The Triton kernels.  Nothing below imports JAX or PyTorch: a framework launches them through a `Launcher`."""
