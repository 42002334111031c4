"""Kernels on tensors, without knowledge of requests. Importing loads neither torch nor compiled code."""

# Unlike quire.server, this may be imported under a bare name: transformers tries `import kernels`, another project's
# package, and finds this folder if a program runs at the repository root.
