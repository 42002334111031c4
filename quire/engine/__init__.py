"""The engine. VERSION comes from the installed package quire-llm; `quire` on PyPI is another package."""

from importlib import metadata

if __name__ != "quire.engine":
    raise ImportError(
        f"import it as quire.engine: `{__name__}` is this folder's name, not the package's", name=__name__
    )

try:
    VERSION = metadata.version("quire-llm")
except metadata.PackageNotFoundError:
    VERSION = "unknown"
