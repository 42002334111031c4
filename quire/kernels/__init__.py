"""Kernels on tensors; nothing here knows requests. Importing the package loads neither torch nor compiled code."""

# quire.server and quire.engine refuse to be imported under a bare name. This package does not: transformers tries
# `import kernels`, which is another project's package and finds this folder if a program runs at the repository root.
