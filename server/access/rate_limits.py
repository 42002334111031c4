"""Limits of a tenant: requests and tokens per minute, with OpenAI's headers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from quire.engine.errors import RateLimited

SECONDS = 60.0


class Bucket:
    """A token bucket. It holds a minute's amount at most and fills evenly; taking too much puts it in debt."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._filled = clock()

    @property
    def level(self) -> float:
        now = self._clock()
        grown = (now - self._filled) * self.per_minute / SECONDS
        self._level, self._filled = min(self.per_minute, self._level + grown), now
        return self._level

    def take(self, amount: float) -> None:
        """Take an amount; a negative one is given back."""
        self._level = min(self.per_minute, self.level - amount)

    def seconds_until(self, amount: float) -> float:
        """Seconds until it holds `amount`; 0 when it does now."""
        return max(0.0, amount - self.level) * SECONDS / self.per_minute


class Reservation:
    """Tokens taken for an answer in advance. Settle it with the number used in the end."""

    def __init__(self, bucket: Bucket | None, tokens: int) -> None:
        self._bucket = bucket
        self._tokens = tokens

    def settle(self, used: int) -> None:
        """Only the first call counts."""
        bucket, self._bucket = self._bucket, None
        if bucket is not None:
            bucket.take(used - self._tokens)


class RateLimits:
    """The limits of one tenant; None: no limit. The methods raise RateLimited for a limit that is exceeded."""

    def __init__(
        self,
        requests_per_minute: int | None,
        tokens_per_minute: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._requests = None if requests_per_minute is None else Bucket(requests_per_minute, clock)
        self._tokens = None if tokens_per_minute is None else Bucket(tokens_per_minute, clock)

    def count_request(self) -> None:
        """Count a request, of which nothing is known yet. A tenant that owes tokens must wait too."""
        if self._tokens is not None:
            self._wait("tokens", self._tokens, 0)
        if self._requests is not None:
            self._wait("requests", self._requests, 1)
            self._requests.take(1)

    def reserve(self, tokens: int) -> Reservation:
        """Reserve the most tokens that a prompt and its answer may have."""
        if self._tokens is not None:
            limit = self._tokens.per_minute
            if tokens > limit:
                message = f"The request is too large: it may take {tokens} tokens, the limit is {limit} per minute"
                raise RateLimited(message, headers={**self.headers(), "x-should-retry": "false"})
            self._wait("tokens", self._tokens, tokens)
            self._tokens.take(tokens)
        return Reservation(self._tokens, tokens)

    def headers(self) -> dict[str, str]:
        """OpenAI's x-ratelimit-* headers, as of now."""
        found = {}
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                found[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
                found[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.level)))
                found[f"x-ratelimit-reset-{name}"] = duration(bucket.seconds_until(bucket.per_minute))
        return found

    def _wait(self, name: str, bucket: Bucket, amount: int) -> None:
        seconds = bucket.seconds_until(amount)
        if seconds > 0:
            left = max(0, math.floor(bucket.level))
            needed = f", {amount} are needed" if name == "tokens" and amount else ""
            message = (
                f"Rate limit reached: {bucket.per_minute} {name} per minute, {left} left{needed}. "
                f"Please try again in {duration(seconds)}"
            )
            again = {"Retry-After": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(seconds * 1000))}
            raise RateLimited(message, headers={**self.headers(), **again})


def duration(seconds: float) -> str:
    """A duration as OpenAI writes it: 120ms, 7.7s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    if seconds < SECONDS:
        return f"{math.ceil(seconds * 10) / 10:g}s"
    return f"{math.ceil(seconds) // 60}m{math.ceil(seconds) % 60}s"
