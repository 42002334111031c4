from __future__ import annotations

from importlib import import_module
from typing import TypeVar

from quire.engine.common.errors import ConfigError

_Base = TypeVar("_Base")


def import_class(setting: str, path: str, base: type[_Base], kind: str) -> type[_Base]:
    """`path`: MODULE:CLASS. Raises ConfigError."""
    module, _, name = path.partition(":")
    try:
        imported = getattr(import_module(module), name)
        if not (isinstance(imported, type) and issubclass(imported, base)):
            raise TypeError(f"it is not a subclass of {base.__module__}.{base.__qualname__}")
    except Exception as error:  # a user's module may raise anything
        problem = f"{path!r} is no {kind}: {type(error).__name__}: {error}"
        raise ConfigError(f"{setting}: {problem}", param=setting) from error
    return imported
