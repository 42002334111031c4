"""Which cases of a test run with every change: one of each kind. The others are for `make test-nightly`."""

from typing import Any

import pytest


def nightly(*cases: Any) -> list[Any]:
    """Cases for parametrize; a tuple is one case of several arguments."""
    mark = pytest.mark.nightly
    return [
        pytest.param(*case, marks=mark) if isinstance(case, tuple) else pytest.param(case, marks=mark) for case in cases
    ]
