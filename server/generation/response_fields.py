"""What a call of the Responses API has beside its generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ResponseFields:
    repeated: Mapping[str, Any]
    """The request's fields that its answer repeats."""
    custom: frozenset[str] = frozenset()
    """Names of the custom tools."""
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """The namespace and the name in it, of the tools that have one."""
    sealed: bool = False
    """Reasoning items carry their text as encrypted_content too."""
    store: bool = False
    background: bool = False
    input: Sequence[Mapping[str, Any]] = ()
    """The items to store: those of this request alone."""
    previous: str | None = None
    """The id of the response before it."""
    conversation: str | None = None
    """The id of the conversation that this is part of."""
