if __name__ != "quire.engine":
    raise ImportError(
        f"import it as quire.engine: `{__name__}` is this folder's name, not the package's", name=__name__
    )

VERSION = "0.1.0"
