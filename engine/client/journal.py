"""The open requests and the tokens that were handed out for each: what another engine needs to go on with them."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from quire.engine.types import Request, RequestOutput


@dataclass(slots=True)
class _Entry:
    """One open request and the tokens that were handed out for it."""

    request: Request
    emitted: list[int] = field(default_factory=list)
    cached_tokens: int | None = None
    """How many prompt tokens the first engine that computed it found cached; None before that. Clients are told this
    number also after a replay, which finds a different one."""


class Journal:
    """Told of each request when it opens, of each output, and when it closes."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def open(self, request: Request) -> None:
        self._entries[request.id] = _Entry(request)

    def close(self, request_id: str) -> bool:
        """Returns whether it was open."""
        return self._entries.pop(request_id, None) is not None

    def move(self, request_id: str, other: Journal) -> None:
        """Let another keep an open request, with what was handed out for it."""
        other._entries[request_id] = self._entries.pop(request_id)

    def take(self, output: RequestOutput) -> RequestOutput:
        """Record an output; returns it as the client is to see it, with the first engine's cached_tokens. One with a
        finish_reason closes nothing: that is the caller's."""
        entry = self._entries.get(output.id)
        if entry is None:
            return output
        if output.finish_reason is None:
            entry.emitted += output.new_ids
        if entry.cached_tokens is None:
            entry.cached_tokens = output.cached_tokens
        elif entry.cached_tokens != output.cached_tokens:
            output = msgspec.structs.replace(output, cached_tokens=entry.cached_tokens)
        return output

    def request(self, request_id: str) -> Request:
        """An open request with the tokens that it already has."""
        entry = self._entries[request_id]
        return msgspec.structs.replace(entry.request, emitted_ids=list(entry.emitted))

    def requests(self) -> list[Request]:
        """All open requests, in the order in which they came, each with the tokens that it already has."""
        return [self.request(request_id) for request_id in self._entries]


def merge(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Merge two successive outputs of one request."""
    has_logprobs = first.logprobs is not None or second.logprobs is not None
    return msgspec.structs.replace(
        second,
        new_ids=first.new_ids + second.new_ids,
        logprobs=(first.logprobs or []) + (second.logprobs or []) if has_logprobs else None,
        prompt_logprobs=first.prompt_logprobs if second.prompt_logprobs is None else second.prompt_logprobs,
        cached_tokens=max(first.cached_tokens, second.cached_tokens),
    )
