"""Infers how a template writes arguments that are no JSON object: keys and values between tags or as literals."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quire.server.formats.derived.probes import KEYS, NAMES, VALUES, Call, NotDerived, Prober, parsed
from quire.server.formats.forms.arguments import Arguments, LiteralArguments
from quire.server.formats.forms.literal_rules import Words
from quire.server.formats.forms.literals import Literals
from quire.server.formats.forms.slots import KEY, common_prefix, common_suffix
from quire.server.formats.forms.tagged import TaggedArguments

KEY_NAME, STRING = KEYS[0], VALUES[0]
SAMPLES: dict[str, Any] = {
    "number": 70917,
    "boolean": True,
    "null": None,
    "array": ["qitemq", True, None],
    "object": {"qinnerq": False},
}
TRICKY = "q'a\"b\\n\\c\nd&<e>q"


@dataclass(frozen=True, slots=True)
class Region:
    """Where arguments stand in a turn."""

    before: str
    after: str

    def inside(self, turn: str) -> str:
        """The arguments in a turn that has one call. Raises NotDerived."""
        if not turn.startswith(self.before) or not turn.endswith(self.after):
            raise NotDerived("calls look different with other arguments")
        return turn[len(self.before) : len(turn) - len(self.after)]


def region_of(prober: Prober) -> Region:
    """What stands around the arguments of a call: what a call without any has in common with one that has two."""
    empty = prober.turn([Call(NAMES[0], {})])
    full = prober.turn([Call(NAMES[0], dict(zip(KEYS, VALUES, strict=True)))])
    before = common_prefix(empty, full)
    after = common_suffix(empty[len(before) :], full[len(before) :])
    if any(one not in full[len(before) : len(full) - len(after)] for one in (*KEYS, *VALUES)):
        raise NotDerived("it does not show the arguments of calls")
    return Region(before, after)


def infer_arguments(prober: Prober, region: Region) -> Arguments:
    """Raises NotDerived."""
    full = region.inside(prober.turn([Call(NAMES[0], dict(zip(KEYS, VALUES, strict=True)))]))
    sort = full.index(KEYS[1]) < full.index(KEYS[0])
    order = (1, 0) if sort else (0, 1)
    keys, values = [KEYS[one] for one in order], [VALUES[one] for one in order]
    before_key, infix, middle, after = _around(full, keys[0], values[0], keys[1], values[1])
    if not middle.startswith(after) or not middle.endswith(before_key) or len(middle) < len(after + before_key):
        raise NotDerived("it does not show where a value ends and the next key begins")
    separator = middle[len(after) : len(middle) - len(before_key)]
    infixes, ends, written = {"string": infix}, {"string": after}, {}
    for kind, sample in SAMPLES.items():
        try:
            one = region.inside(prober.turn([Call(NAMES[0], {KEY_NAME: sample})]))
            infixes[kind], written[kind], ends[kind] = _value(one, before_key, after, kind, sample, infix)
        except (NotDerived, ValueError):
            continue
    if "number" not in infixes:
        raise NotDerived("it does not show numbers in arguments")
    words = _words(written)
    if (quote := _quote(infixes, ends)) is not None:
        return _literal(prober, region, before_key, infixes, ends, separator, quote, words, sort=sort)
    if len(set(ends.values())) > 1:
        raise NotDerived("values of different types end differently")
    return _tagged(prober, region, before_key, infixes, after, separator, words, sort=sort)


def _around(full: str, key: str, value: str, key2: str, value2: str) -> tuple[str, str, str, str]:
    """What stands before the first key, between a key and its value, behind the first value, and behind the second."""
    places = [full.index(one) for one in (key, value, key2, value2)]
    if places != sorted(places):
        raise NotDerived("its arguments are in no order that is known here")
    before, rest = full.split(key, 1)
    infix, rest = rest.split(value, 1)
    middle, rest = rest.split(key2, 1)
    infix2, after = rest.split(value2, 1)
    if infix2 != infix:
        raise NotDerived("keys and values are separated differently each time")
    after, middle = after.replace(key2, KEY), middle.replace(key, KEY)
    return before, infix, middle, after


def _value(inside: str, before_key: str, after: str, kind: str, sample: Any, string_infix: str) -> tuple[str, str, str]:
    """What stands between key and value, the value as written, and what follows it."""
    rest = inside.removeprefix(before_key)
    if not rest.startswith(KEY_NAME):
        raise NotDerived("keys look different with other values")
    rest = rest[len(KEY_NAME) :].replace(KEY_NAME, KEY)
    found = [
        (rest[:place], one, rest[place + len(one) :]) for one in written_forms(sample) for place in _places(rest, one)
    ]
    if found:
        return next((each for each in found if each[2] == after), found[0])
    if rest.startswith(string_infix) and rest.endswith(after):
        return string_infix, rest[len(string_infix) : len(rest) - len(after)], after
    raise NotDerived(f"it does not show a {kind}")


def _places(text: str, part: str) -> list[int]:
    return [place for place in range(len(text)) if text.startswith(part, place)] if part else []


def written_forms(value: Any) -> Iterator[str]:
    """How templates write a value that is no string."""
    yield json.dumps(value)
    yield json.dumps(value, separators=(",", ":"))
    yield repr(value)
    yield str(value)
    if value is None:
        yield "none"


def _words(written: dict[str, str]) -> Words:
    return Words(
        true=written.get("boolean", "true"),
        false="False" if written.get("boolean") == "True" else "false",
        null=written.get("null", "null") or "null",
        json_lists=parsed(written.get("array", "")) is not None,
        json_objects=parsed(written.get("object", "")) is not None,
    )


def _quote(infixes: dict[str, str], ends: dict[str, str]) -> str | None:
    """What stands around strings, if values end by themselves: it is what a string has more than a number."""
    infix, end = infixes["number"], ends["number"]
    if not infixes["string"].startswith(infix) or not ends["string"].endswith(end):
        return None
    quote = infixes["string"][len(infix) :]
    return quote if quote.strip() and ends["string"] == quote + end else None


def _literal(
    prober: Prober,
    region: Region,
    before_key: str,
    infixes: dict[str, str],
    ends: dict[str, str],
    separator: str,
    quote: str,
    words: Words,
    *,
    sort: bool,
) -> Arguments:
    inside = region.inside(prober.turn([Call(NAMES[0], {KEY_NAME: TRICKY})]))
    raw = quote + TRICKY + quote in inside
    ends_by = r"\s*,\s*[\w.-]+\s*=|\s*\)" if infixes["number"].strip() == "=" else r"\s*[,\])}]"
    literals = Literals(quote, raw, ends_by)
    return LiteralArguments(before_key, infixes["number"], separator, literals, words, ends["number"], sort)


def _tagged(
    prober: Prober,
    region: Region,
    before_key: str,
    infixes: dict[str, str],
    end: str,
    separator: str,
    words: Words,
    *,
    sort: bool,
) -> Arguments:
    try:
        inside = region.inside(prober.turn([Call(NAMES[0], {KEY_NAME: TRICKY})]))
    except NotDerived:
        inside = ""
    element = re.match(r"(.{1,80}?)(\w+)>qitemq", _array(prober, region, infixes["string"]))
    return TaggedArguments(
        before_key,
        infixes,
        end,
        separator,
        words,
        sort,
        cdata=f"<![CDATA[{TRICKY}]]>" in inside,
        html=TRICKY not in inside
        and html.escape(TRICKY) in inside.replace("&#34;", "&quot;").replace("&#39;", "&#x27;"),
        element=element[1] if element is not None else "",
        item=element[2] if element is not None else "",
    )


def _array(prober: Prober, region: Region, infix: str) -> str:
    """A list as it is written, and what follows."""
    try:
        inside = region.inside(prober.turn([Call(NAMES[0], {KEY_NAME: ["qitemq"]})]))
    except NotDerived:
        return ""
    return inside.partition(KEY_NAME + infix)[2]
