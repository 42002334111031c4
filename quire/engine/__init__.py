"""The engine. VERSION is Quire's, from the installed package: quire-llm on the index, where quire is another one."""

from importlib import metadata

if __name__ != "quire.engine":
    raise ImportError(
        f"import it as quire.engine: `{__name__}` is this folder's name, not the package's", name=__name__
    )

try:
    VERSION = metadata.version("quire-llm")
except metadata.PackageNotFoundError:
    VERSION = "unknown"
