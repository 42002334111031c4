"""Kernels on tensors. Importing loads neither torch nor compiled code."""

# transformers tries `import kernels`, another project's package, and finds this folder if a program runs at the
# repository root.
