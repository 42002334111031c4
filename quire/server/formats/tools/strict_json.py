"""Standard JSON, without NaN and without text that UTF-8 cannot encode."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str) -> Any:
    """Raises ValueError."""
    try:
        return json.loads(text, parse_constant=_reject_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def write_json(value: Any) -> str:
    """Raises ValueError for values that JSON lacks."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if is_encodable(text) else json.dumps(value, allow_nan=False)


def is_encodable(text: str) -> bool:
    """False for an unpaired surrogate, which an escape may spell."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _reject_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
