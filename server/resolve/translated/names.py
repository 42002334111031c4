"""Errors about the chat that a body was translated to, in the words of its own API."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from quire.engine.errors import InvalidRequest
from quire.server.resolve.common import Resolved


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


def in_own_words(call: Resolved, names: Mapping[str, str]) -> Resolved:
    """The call, with the caller's names of the fields that its grammars come from."""
    grammars = [(names.get(param, param), grammar) for param, grammar in call.grammars]
    parts = [(in_words_of_caller(place, None, names), grammar) for place, grammar in call.parts]
    return replace(call, grammars=grammars, parts=parts)


def in_words_of_caller(message: str, param: str | None, names: Mapping[str, str]) -> str:
    """The message with its parameter's own name, and that of paths, which cannot be words of the text."""
    for name, own in names.items():
        if name == param or "." in name:
            message = re.sub(rf"\b{re.escape(name)}\b", own, message)
    return message
