"""Tensors in, tensors out. This package knows no request. Importing it loads neither torch nor compiled code."""

# server and engine refuse to be imported without `quire.` before their names. This package does not: transformers tries
# to import `kernels`, another project's package, and finds this folder by that name where a program runs at the root.
