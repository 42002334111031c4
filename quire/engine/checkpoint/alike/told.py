"""Errors that name a field as config.json does, where the file calls it otherwise than Llama's."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

from quire.engine.checkpoint.alike.fields import OTHER_NAMES
from quire.engine.errors import ModelError

_T = TypeVar("_T")


def names_in_file(raw: Mapping[str, Any]) -> dict[str, str]:
    """By the names that Quire reads, those that stand in a config.json or would stand there, of fields that its family
    calls otherwise."""
    part = raw.get("text_config")
    given = {**raw, **part} if isinstance(part, Mapping) else raw
    found: dict[str, str] = {}
    for other, name in OTHER_NAMES.get(str(given.get("model_type")), {}).items():
        if given.get(other) is not None or (name not in found and name not in given):
            found[name] = other
    return found


@contextmanager
def told_as_in_file(names: Mapping[str, str]) -> Iterator[None]:
    """In its context a ModelError names fields by `names`."""
    try:
        yield
    except ModelError as error:
        said = error.message
        for name, other in names.items():
            said = re.sub(rf"(?<![\w.]){re.escape(name)}(?!\w)", other, said)
        if said == error.message:
            raise
        raise ModelError(said) from error


def told_by_file(read: Callable[[Mapping[str, Any]], _T]) -> Callable[[Mapping[str, Any]], _T]:
    """A function of a config.json's content whose errors do."""

    @wraps(read)
    def reading(raw: Mapping[str, Any]) -> _T:
        with told_as_in_file(names_in_file(raw)):
            return read(raw)

    return reading
