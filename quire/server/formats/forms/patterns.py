"""A JSON schema's `pattern` as the terminal of a Lark grammar, for strings that stand in a call as they are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quire.server.formats.regular import escaped

PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()|]|[^\\\[()|]+|.", re.DOTALL)
"""An escape, a class, a bracket or a bar of a regular expression, or what stands between."""
WRITTEN = re.compile(r"\\.|[/\n]", re.DOTALL)


def pattern_of(schema: Any) -> str | None:
    """What a schema wants strings to match, from their beginning to their end."""
    found = schema.get("pattern") if isinstance(schema, Mapping) else None
    return whole(found) if isinstance(found, str) else None


def whole(pattern: str) -> str:
    """An expression that matches all of a text wherever this one, as JSON schema reads it, finds something in it.

    Anchors elsewhere than at the ends of an alternative stay, for the grammar's compiler to refuse.
    """
    alternatives, depth = [""], 0
    for part in PART.findall(pattern):
        depth += (part == "(") - (part == ")")
        if part == "|" and depth == 0:
            alternatives.append("")
        else:
            alternatives[-1] += part
    return "|".join(map(_anchored, alternatives))


def terminal(pattern: str, end: str, stop: str | None) -> str:
    """The body of a terminal: a text all of which the pattern matches, and `end`. A parser takes the first `stop` for
    the end of the text, so that there is none but one that `end` ends with."""
    body = f"/{_lark(f'(?:{pattern}){escaped(end)}')}/"
    if stop is None:
        return body
    more = "+" if end.endswith(stop) else "*"
    return f"{body} & ~/(?s:.*){_lark(escaped(stop))}(?s:.{more})/"


def _anchored(alternative: str) -> str:
    parts = PART.findall(alternative)
    begun = alternative.startswith("^")
    ended = bool(parts) and parts[-1].endswith("$") and not parts[-1].startswith(("\\", "["))
    inner = alternative[begun : len(alternative) - ended]
    return f"{'' if begun else '(?s:.*)'}(?:{inner}){'' if ended else '(?s:.*)'}"


def _lark(expression: str) -> str:
    """As it stands between slashes."""
    return WRITTEN.sub(lambda found: {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(found[0], found[0]), expression)
