from __future__ import annotations

import math
from collections.abc import Callable

from quire.engine.common import clock
from quire.engine.common.errors import RateLimited

SECONDS_PER_MINUTE = 60.0


class TokenBucket:
    """Fills continuously, up to the amount of one minute. If a withdrawal exceeds the level, the bucket is in debt."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._filled_at = clock()

    @property
    def level(self) -> float:
        now = self._clock()
        grown = (now - self._filled_at) * self.per_minute / SECONDS_PER_MINUTE
        self._level, self._filled_at = min(self.per_minute, self._level + grown), now
        return self._level

    def withdraw(self, amount: float) -> None:
        """Never fails: the level may become negative. A negative `amount` is put back."""
        self._level = min(self.per_minute, self.level - amount)

    def seconds_until(self, amount: float) -> float:
        return max(0.0, amount - self.level) * SECONDS_PER_MINUTE / self.per_minute


class TokenReservation:
    def __init__(self, bucket: TokenBucket | None, tokens: int) -> None:
        self._bucket = bucket
        self._tokens = tokens

    def settle_usage(self, used_tokens: int) -> None:
        """Only the first call has an effect."""
        bucket, self._bucket = self._bucket, None
        if bucket is not None:
            bucket.withdraw(used_tokens - self._tokens)


class RateLimits:
    def __init__(
        self,
        requests_per_minute: int | None,
        tokens_per_minute: int | None,
        clock: Callable[[], float] = lambda: clock.monotonic(),
    ) -> None:
        self._clock = clock
        self._request_bucket = None if requests_per_minute is None else TokenBucket(requests_per_minute, clock)
        self._token_bucket = None if tokens_per_minute is None else TokenBucket(tokens_per_minute, clock)
        self.has_limits = self._request_bucket is not None or self._token_bucket is not None

    def with_full_buckets(self) -> RateLimits:
        limits = [
            None if bucket is None else bucket.per_minute for bucket in (self._request_bucket, self._token_bucket)
        ]
        return RateLimits(limits[0], limits[1], clock=self._clock)

    def count_request(self) -> None:
        """Call this before the body is read. Raises RateLimited also while the token bucket is in debt."""
        if self._token_bucket is not None:
            self._require_amount("tokens", self._token_bucket, 0)
        if self._request_bucket is not None:
            self._require_amount("requests", self._request_bucket, 1)
            self._request_bucket.withdraw(1)

    def reserve_tokens(self, tokens: int) -> TokenReservation:
        """`tokens` is the most that the request can use, including its prompt. Raises RateLimited also if it exceeds a
        minute's amount.
        """
        if self._token_bucket is not None:
            limit = self._token_bucket.per_minute
            if tokens > limit:
                message = f"The request is too large: it may take {tokens} tokens, the limit is {limit} per minute"
                raise RateLimited(message, headers={**self.ratelimit_headers(), "x-should-retry": "false"})
            self._require_amount("tokens", self._token_bucket, tokens)
            self._token_bucket.withdraw(tokens)
        return TokenReservation(self._token_bucket, tokens)

    def ratelimit_headers(self) -> dict[str, str]:
        values = {}
        for name, bucket in (("requests", self._request_bucket), ("tokens", self._token_bucket)):
            if bucket is not None:
                values[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
                values[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.level)))
                values[f"x-ratelimit-reset-{name}"] = format_duration(bucket.seconds_until(bucket.per_minute))
        return values

    def _require_amount(self, name: str, bucket: TokenBucket, amount: int) -> None:
        seconds = bucket.seconds_until(amount)
        if seconds > 0:
            remaining = max(0, math.floor(bucket.level))
            needed = f", {amount} are needed" if name == "tokens" and amount else ""
            message = (
                f"Rate limit reached: {bucket.per_minute} {name} per minute, {remaining} left{needed}. "
                f"Please try again in {format_duration(seconds)}"
            )
            retry_headers = {"Retry-After": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(seconds * 1000))}
            raise RateLimited(message, headers={**self.ratelimit_headers(), **retry_headers})


def format_duration(seconds: float) -> str:
    """Formats as OpenAI does, rounded up: 120ms, 7.7s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    if seconds < SECONDS_PER_MINUTE:
        return f"{math.ceil(seconds * 10) / 10:g}s"
    return f"{math.ceil(seconds) // 60}m{math.ceil(seconds) % 60}s"
