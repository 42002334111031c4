"""The former place of `quire.engine.common.types`, from which schedulers and programs of users import."""

from __future__ import annotations

import warnings

from quire.engine.common import types


def __getattr__(name: str) -> object:
    current_name = "EngineCoreRequest" if name == "Request" else name
    value: object = getattr(types, current_name)
    message = f"quire.engine.types.{name} is quire.engine.common.types.{current_name} now"
    warnings.warn(message, FutureWarning, stacklevel=2)
    return value
