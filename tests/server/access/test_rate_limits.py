"""Rate limits allow exactly the configured amount per minute plus the bucket's initial content."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.common.errors import RateLimited
from quire.server.access.rate_limits import RateLimits, TokenBucket, format_duration


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@given(st.integers(1, 1000), st.lists(st.tuples(st.floats(0, 30), st.integers(1, 50)), max_size=100))
def test_token_bucket_never_exceeds_rate(per_minute: int, takes: list[tuple[float, int]]) -> None:
    clock = Clock()
    bucket = TokenBucket(per_minute, clock)
    total = 0
    for pause, amount in takes:
        clock.now += pause
        wait = bucket.seconds_until(amount)
        if amount <= per_minute:
            assert wait <= 60 * amount / per_minute + 1e-6, "an empty bucket fills at its rate"
        if wait == 0:
            bucket.withdraw(amount)
            total += amount
        assert total <= per_minute * (1 + (clock.now - 1000) / 60) + 1e-6
        assert bucket.level <= per_minute


def test_request_over_requests_per_minute_is_rejected_with_retry_after() -> None:
    clock = Clock()
    limits = RateLimits(3, None, clock)
    for left in (2, 1, 0):
        limits.count_request()
        assert limits.ratelimit_headers()["x-ratelimit-remaining-requests"] == str(left)
    with pytest.raises(RateLimited, match="3 requests per minute, 0 left") as error:
        limits.count_request()
    assert error.value.headers == {
        "x-ratelimit-limit-requests": "3",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "1m0s",
        "Retry-After": "20",
        "retry-after-ms": "20000",
    }
    clock.now += 20
    limits.count_request()


def test_settled_usage_adjusts_reserved_tokens() -> None:
    clock = Clock()
    limits = RateLimits(None, 100, clock)
    first = limits.reserve_tokens(80)
    with pytest.raises(RateLimited, match="100 tokens per minute, 20 left, 30 are needed"):
        limits.reserve_tokens(30)
    first.settle_usage(10)
    first.settle_usage(0)
    assert limits.ratelimit_headers()["x-ratelimit-remaining-tokens"] == "90"
    second = limits.reserve_tokens(30)
    second.settle_usage(150)
    with pytest.raises(RateLimited) as error:
        limits.count_request()
    assert error.value.headers["Retry-After"] == "36", "the bucket must first make up for 60 tokens of debt"
    clock.now += 36.1
    limits.count_request()


def test_request_over_token_limit_is_rejected_without_retry() -> None:
    with pytest.raises(RateLimited, match="101 tokens, the limit is 100") as error:
        RateLimits(None, 100).reserve_tokens(101)
    assert error.value.headers["x-should-retry"] == "false"
    assert "Retry-After" not in error.value.headers


def test_unlimited_rate_limits_send_no_headers() -> None:
    limits = RateLimits(None, None)
    limits.count_request()
    limits.reserve_tokens(10**9).settle_usage(10**9)
    assert limits.ratelimit_headers() == {}


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0ms"), (0.12, "120ms"), (1.0, "1s"), (7.66, "7.7s"), (59.99, "60s"), (360.0, "6m0s")]
)
def test_format_duration_returns_rounded_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@given(st.floats(0, 10_000))
def test_format_duration_never_rounds_down(seconds: float) -> None:
    text = format_duration(seconds)
    if text.endswith("ms"):
        assert int(text[:-2]) >= math.floor(seconds * 1000)
    elif "m" in text:
        minutes, rest = text[:-1].split("m")
        assert int(minutes) * 60 + int(rest) >= seconds
    else:
        assert float(text[:-1]) >= seconds - 1e-6
