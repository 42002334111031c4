"""Quire's version, from the installed package."""

from importlib import metadata

try:
    VERSION = metadata.version("quire")
except metadata.PackageNotFoundError:
    VERSION = "unknown"
