"""Values written as elements, as MiniMax M3 writes them: <key>…</key> for an object's, <item>…</item> for a list's.

The text between does not tell types apart, so the schema does where it can.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quire.server.formats.tools import strict_json


def value(written: str, before: str, item: str, schema: Any) -> Any:
    """The value of a text. `before`: what stands before a key, such as "<"; `item`: the name of a list's elements."""
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    children = _children(written, before)
    if kinds == "string":
        return written
    if children is not None and (kinds == "array" or (kinds != "object" and all(key == item for key, _ in children))):
        inner = schema.get("items", {}) if isinstance(schema, Mapping) else {}
        return [value(text, before, item, inner) for _, text in children]
    if children is not None:
        known = (schema.get("properties") or {}) if isinstance(schema, Mapping) else {}
        rest = schema.get("additionalProperties", {}) if isinstance(schema, Mapping) else {}
        return {key: value(text, before, item, known.get(key, rest)) for key, text in children}
    if not written.strip() and kinds in ("array", "object"):
        return [] if kinds == "array" else {}
    try:
        return strict_json.parse(written)
    except ValueError:
        return written


def _children(written: str, before: str) -> list[tuple[str, str]] | None:
    """The elements that a text is made of; None when it is made of something else."""
    begin = re.compile(rf"\s*{re.escape(before)}([^<>/\s]+)>")
    found: list[tuple[str, str]] = []
    place = 0
    while match := begin.match(written, place):
        key = match[1]
        close = f"{before}/{key}>"
        end = _matching(written, f"{before}{key}>", close, match.end())
        if end < 0:
            return None
        found.append((key, written[match.end() : end]))
        place = end + len(close)
    return found if found and not written[place:].strip() else None


def _matching(written: str, begin: str, close: str, start: int) -> int:
    """Where the element that was opened before `start` is closed; -1 if nowhere."""
    depth, place = 1, start
    while True:
        end = written.find(close, place)
        if end < 0:
            return -1
        depth += written.count(begin, place, end) - 1
        if depth == 0:
            return end
        place = end + len(close)
