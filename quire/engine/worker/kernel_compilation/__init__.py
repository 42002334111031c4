"""Compiles all variants of Triton kernels before the first step, in several processes."""
