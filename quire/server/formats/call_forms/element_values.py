"""Values written as elements, like MiniMax M3's: <key>…</key> in objects, <item>…</item> in lists."""

from __future__ import annotations

import re
from typing import Any

from quire.server.formats.call_forms.lark_rules import LiteralSpelling
from quire.server.formats.call_forms.plain_values import value_to_json
from quire.server.formats.schema_node import SchemaNode
from quire.server.formats.tools import strict_json


def parse_element(written: str, before: str, item: str, node: SchemaNode) -> Any:
    kinds = node.variant_types()
    if kinds == {"string"}:
        return written
    children = _child_elements(written, before)
    is_list, is_object = "array" in kinds, "object" in kinds
    if children is not None and all(key == item for key, _ in children):
        is_object = is_object and not is_list
    elif children is not None:
        is_list = is_list and not is_object
    if children is not None and not is_object and (is_list or all(key == item for key, _ in children)):
        return [parse_element(text, before, item, node.item_node(index)) for index, (_, text) in enumerate(children)]
    if children is not None:
        return {key: parse_element(text, before, item, node.property_node(key)) for key, text in children}
    if not written.strip() and kinds <= {"array", "object", "null"}:
        return [] if is_list else {} if is_object else None
    variants = node.variants()
    return strict_json.parse_json(value_to_json(written, variants, LiteralSpelling()))


def _child_elements(written: str, before: str) -> list[tuple[str, str]] | None:
    begin = re.compile(rf"\s*{re.escape(before)}([^<>/\s]+)>")
    children: list[tuple[str, str]] = []
    place = 0
    while match := begin.match(written, place):
        key = match[1]
        close = f"{before}/{key}>"
        end = _find_closing_tag(written, f"{before}{key}>", close, match.end())
        if end < 0:
            return None
        children.append((key, written[match.end() : end]))
        place = end + len(close)
    return children if children and not written[place:].strip() else None


def _find_closing_tag(written: str, begin: str, close: str, start: int) -> int:
    depth, place = 1, start
    while True:
        end = written.find(close, place)
        if end < 0:
            return -1
        depth += written.count(begin, place, end) - 1
        if depth == 0:
            return end
        place = end + len(close)
