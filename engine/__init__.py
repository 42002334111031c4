"""The engine. VERSION is Quire's, from the installed package: quire-llm on the index, where quire is another one."""

from importlib import metadata

try:
    VERSION = metadata.version("quire-llm")
except metadata.PackageNotFoundError:
    VERSION = "unknown"
