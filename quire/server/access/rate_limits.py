"""Limits a tenant's requests and tokens per minute, and reports them in OpenAI's x-ratelimit headers."""

from __future__ import annotations

import math
from collections.abc import Callable

from quire.engine import clock
from quire.engine.errors import RateLimited

SECONDS_PER_MINUTE = 60.0


class Bucket:
    """A token bucket: it fills evenly, and holds at most a minute's amount. Taking more than it holds leaves a debt."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._filled = clock()

    @property
    def level(self) -> float:
        now = self._clock()
        grown = (now - self._filled) * self.per_minute / SECONDS_PER_MINUTE
        self._level, self._filled = min(self.per_minute, self._level + grown), now
        return self._level

    def take(self, amount: float) -> None:
        """Take `amount` out; a negative amount is put back."""
        self._level = min(self.per_minute, self.level - amount)

    def seconds_until(self, amount: float) -> float:
        """Seconds until it holds `amount`; 0 when it does now."""
        return max(0.0, amount - self.level) * SECONDS_PER_MINUTE / self.per_minute


class Reservation:
    """The tokens taken from a bucket for a request that is running; `settle` corrects them when it has ended."""

    def __init__(self, bucket: Bucket | None, tokens: int) -> None:
        self._bucket = bucket
        self._tokens = tokens

    def settle(self, used: int) -> None:
        """Charge the tokens that were actually used. Only the first call counts."""
        bucket, self._bucket = self._bucket, None
        if bucket is not None:
            bucket.take(used - self._tokens)


class RateLimits:
    """The limits of one tenant; None means no limit. Methods raise RateLimited when a limit is exceeded."""

    def __init__(
        self,
        requests_per_minute: int | None,
        tokens_per_minute: int | None,
        clock: Callable[[], float] = lambda: clock.monotonic(),
    ) -> None:
        self._requests = None if requests_per_minute is None else Bucket(requests_per_minute, clock)
        self._tokens = None if tokens_per_minute is None else Bucket(tokens_per_minute, clock)

    def like_new(self) -> RateLimits:
        """The same limits with full buckets."""
        limits = [None if bucket is None else bucket.per_minute for bucket in (self._requests, self._tokens)]
        return RateLimits(limits[0], limits[1])

    @property
    def limited(self) -> bool:
        return self._requests is not None or self._tokens is not None

    def count_request(self) -> None:
        """Count a request, before it is read. A tenant whose token bucket is in debt is refused, too."""
        if self._tokens is not None:
            self._require("tokens", self._tokens, 0)
        if self._requests is not None:
            self._require("requests", self._requests, 1)
            self._requests.take(1)

    def reserve(self, tokens: int) -> Reservation:
        """Reserve the most tokens that a request can take, its prompt included."""
        if self._tokens is not None:
            limit = self._tokens.per_minute
            if tokens > limit:
                message = f"The request is too large: it may take {tokens} tokens, the limit is {limit} per minute"
                raise RateLimited(message, headers={**self.headers(), "x-should-retry": "false"})
            self._require("tokens", self._tokens, tokens)
            self._tokens.take(tokens)
        return Reservation(self._tokens, tokens)

    def headers(self) -> dict[str, str]:
        """OpenAI's x-ratelimit-* headers for the current state."""
        found = {}
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                found[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
                found[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.level)))
                found[f"x-ratelimit-reset-{name}"] = duration(bucket.seconds_until(bucket.per_minute))
        return found

    def _require(self, name: str, bucket: Bucket, amount: int) -> None:
        """Raise RateLimited, with headers that say when to retry, unless the bucket holds `amount`."""
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
    """A duration as OpenAI writes it, rounded up: 120ms, 7.7s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    if seconds < SECONDS_PER_MINUTE:
        return f"{math.ceil(seconds * 10) / 10:g}s"
    return f"{math.ceil(seconds) // 60}m{math.ceil(seconds) % 60}s"
