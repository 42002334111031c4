"""What a call of the Responses API has beside its generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from quire.server.store.store import Item


@dataclass(frozen=True, slots=True)
class ResponseFields:
    repeated: bytes
    """The request's fields that its answer repeats: a JSON object, written once."""
    custom: frozenset[str] = frozenset()
    """Names of the custom tools."""
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """The namespace and the name in it, of the tools that have one."""
    sealed: bool = False
    """Reasoning items carry their text as encrypted_content too."""
    store: bool = False
    background: bool = False
    input: Sequence[Item] = ()
    """The items to store: those of this request alone."""
    previous: str | None = None
    """The id of the response before it."""
    conversation: str | None = None
    """The id of the conversation that this is part of."""
