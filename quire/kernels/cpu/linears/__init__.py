"""Choice of the CPU's linear kernels."""
