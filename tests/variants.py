"""Which cases of a test run with every change: one of each kind. The others are for `make test-nightly`."""

import os
from typing import Any

import pytest

NIGHT = os.environ.get("TEST_EXAMPLES") == "all"
"""As `make test-nightly` sets it."""


def examples(count: int) -> int:
    """For hypothesis' `max_examples`: all of them at night, a sixth with every change."""
    return count if NIGHT else max(count // 6, 8)


def nightly(*cases: Any) -> list[Any]:
    """Cases for parametrize; a tuple is one case of several arguments. Where any few will do: `pytest.mark.few`."""
    mark = pytest.mark.nightly
    return [
        pytest.param(*case, marks=mark) if isinstance(case, tuple) else pytest.param(case, marks=mark) for case in cases
    ]
