"""Tensors in, tensors out. This package knows no request. Importing it loads neither torch nor compiled code."""

# server and engine refuse to be imported by a name without `quire.`. This does not: transformers tries to import `kernels`,
# which is another project's package on the index, and a program that runs at the root finds this folder by that name.
