from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quire.server.formats.lark_to_regex import escape_regex

REGEX_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()|]|[^\\\[()|]+|.", re.DOTALL)
LARK_SPECIAL = re.compile(r"\\.|[/\n]", re.DOTALL)


def schema_pattern(schema: Any) -> str | None:
    pattern = schema.get("pattern") if isinstance(schema, Mapping) else None
    return full_match_pattern(pattern) if isinstance(pattern, str) else None


def full_match_pattern(pattern: str) -> str:
    """A JSON schema's pattern may match anywhere. Anchors inside an alternative stay, and the grammar compiler refuses
    them.
    """
    alternatives, depth = [""], 0
    for part in REGEX_PART.findall(pattern):
        depth += (part == "(") - (part == ")")
        if part == "|" and depth == 0:
            alternatives.append("")
        else:
            alternatives[-1] += part
    return "|".join(map(_anchor_alternative, alternatives))


def pattern_then_end_terminal(pattern: str, end: str, stop: str | None) -> str:
    """The text may not contain `stop`, because parsers end the text there."""
    body = f"/{_escape_for_lark(f'(?:{pattern}){escape_regex(end)}')}/"
    if stop is None:
        return body
    more = "+" if end.endswith(stop) else "*"
    return f"{body} & ~/(?s:.*){_escape_for_lark(escape_regex(stop))}(?s:.{more})/"


def _anchor_alternative(alternative: str) -> str:
    parts = REGEX_PART.findall(alternative)
    has_start_anchor = alternative.startswith("^")
    has_end_anchor = bool(parts) and parts[-1].endswith("$") and not parts[-1].startswith(("\\", "["))
    inner = alternative[has_start_anchor : len(alternative) - has_end_anchor]
    return f"{'' if has_start_anchor else '(?s:.*)'}(?:{inner}){'' if has_end_anchor else '(?s:.*)'}"


def _escape_for_lark(expression: str) -> str:
    return LARK_SPECIAL.sub(lambda match: {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(match[0], match[0]), expression)
