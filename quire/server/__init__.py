"""The server: text in, text out. It never imports torch."""

if __name__ != "quire.server":
    raise ImportError(
        f"import it as quire.server: `{__name__}` is this folder's name, not the package's", name=__name__
    )
