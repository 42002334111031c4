"""Deprecated alias of `quire.engine.common.config`."""

from __future__ import annotations

import warnings

from quire.engine.common import config


def __getattr__(name: str) -> object:
    value: object = getattr(config, name)
    message = f"quire.engine.config.{name} is quire.engine.common.config.{name} now"
    warnings.warn(message, FutureWarning, stacklevel=2)
    return value
