"""Tensors in, tensors out. This package knows no request. Importing it loads neither torch nor compiled code."""

if __name__ != "quire.kernels":
    raise ImportError(
        f"import it as quire.kernels: `{__name__}` is this folder's name, not the package's", name=__name__
    )
