"""Deprecated alias of `quire.engine.common.types` and `request_params`."""

from __future__ import annotations

import warnings

from quire.engine.common import request_params, types


def __getattr__(name: str) -> object:
    current_name = "EngineCoreRequest" if name == "Request" else name
    module = request_params if hasattr(request_params, current_name) else types
    value: object = getattr(module, current_name)
    message = f"quire.engine.types.{name} is {module.__name__}.{current_name} now"
    warnings.warn(message, FutureWarning, stacklevel=2)
    return value
