"""How fast this machine is, measured by the kernels that serve."""
