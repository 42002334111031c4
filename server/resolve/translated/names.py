"""Errors about the chat that a body was translated to, in the words of its own API."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from quire.engine.errors import InvalidRequest
from quire.engine.images.decode import head_of
from quire.server.images.asked import NeedsImages
from quire.server.resolve.common import Resolved

Places = dict[str, str]
"""By a chat's name of a field within its messages, the caller's: those of images."""


@contextmanager
def named_by_caller(names: Mapping[str, str]) -> Iterator[Places]:
    """Lets what is raised name the caller's fields; `names` has these by the names that a chat's fields have, and so
    have the places that `placed` notes."""
    places: Places = {}
    try:
        yield places
    except NeedsImages as needed:
        needed.urls = {url: places.get(where, where) for url, where in needed.urls.items()}
        raise
    except InvalidRequest as error:
        where, _, why = error.message.partition(": ")
        if where in places:
            error.message, error.param = f"{places[where]}: {why}", head_of(places[where])
        else:
            error.message = in_words_of_caller(error.message, error.param, names)
            error.param = names.get(error.param or "", error.param)
        error.args = (error.message,)
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
