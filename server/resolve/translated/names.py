"""Errors about the chat that a body was translated to, in the words of its own API."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from quire.engine.errors import InvalidRequest


@contextmanager
def named_by_caller(names: Mapping[str, str]) -> Iterator[None]:
    """Lets what is raised name the caller's fields; `names` has these by the names that a chat's fields have."""
    try:
        yield
    except InvalidRequest as error:
        error.message = in_words_of_caller(error.message, error.param, names)
        error.args = (error.message,)
        error.param = names.get(error.param or "", error.param)
        raise


def in_words_of_caller(message: str, param: str | None, names: Mapping[str, str]) -> str:
    """The message with its parameter's own name, and that of paths, which cannot be words of the text."""
    for name, own in names.items():
        if name == param or "." in name:
            message = re.sub(rf"\b{re.escape(name)}\b", own, message)
    return message
