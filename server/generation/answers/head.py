"""The fields that all chunks of an answer have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire.server.encoding import DATA, encode_json


@dataclass(frozen=True, slots=True)
class Head:
    """The identity of one answer."""

    id: str
    model: str
    fingerprint: str
    created: int

    def fields(self, kind: str) -> dict[str, object]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def opening(self, kind: str, extra: Mapping[str, object] | None = None) -> bytes:
        """An event up to the value of `choices`, which the caller adds."""
        return DATA + encode_json({**self.fields(kind), **(extra or {})})[:-1] + b',"choices":'
