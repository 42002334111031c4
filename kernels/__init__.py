"""Tensors in, tensors out. This package knows no request. Importing it loads neither torch nor compiled code."""
