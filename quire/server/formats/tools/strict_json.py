"""JSON by the standard: without NaN, and without text that UTF-8 cannot write."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str) -> Any:
    """Raises ValueError for what is not JSON."""
    try:
        return json.loads(text, parse_constant=_reject_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def write_json(value: Any) -> str:
    """JSON that escapes nothing but halves of surrogate pairs. Raises ValueError for values JSON does not have."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if is_encodable(text) else json.dumps(value, allow_nan=False)


def is_encodable(text: str) -> bool:
    """Whether UTF-8 can write the text. An escape in JSON or Python may have spelled half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _reject_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
