"""Triton kernels that move and sum tensors between the GPUs of one host, in memory that all of them can address."""
