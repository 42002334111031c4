"""Quire's version, from the installed package. On the package index that is quire-llm: quire is another project."""

from importlib import metadata

try:
    VERSION = metadata.version("quire-llm")
except metadata.PackageNotFoundError:
    VERSION = "unknown"
