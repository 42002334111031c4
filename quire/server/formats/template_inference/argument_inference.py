"""Infers the form of arguments that are not a JSON object: tags or literals."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quire.server.formats.call_forms.argument_forms import ArgumentsForm, LiteralArguments
from quire.server.formats.call_forms.lark_rules import LiteralSpelling
from quire.server.formats.call_forms.literal_syntax import LiteralSyntax
from quire.server.formats.call_forms.slots import KEY_SLOT, common_prefix_by_atoms, common_suffix_by_atoms
from quire.server.formats.call_forms.tagged_arguments import TaggedArguments
from quire.server.formats.template_inference.template_prober import (
    PROBE_KEYS,
    PROBE_NAMES,
    PROBE_VALUES,
    ProbeCall,
    TemplateInferenceError,
    TemplateProber,
    parse_json_or_none,
)

SAMPLE_KEY, SAMPLE_STRING = PROBE_KEYS[0], PROBE_VALUES[0]
SAMPLE_VALUES: dict[str, Any] = {
    "number": 70917,
    "boolean": True,
    "null": None,
    "array": ["qitemq", True, None],
    "object": {"qinnerq": False},
}
TRICKY_STRING = "q'a\"b\\n\\c\nd&<e>q"


@dataclass(frozen=True, slots=True)
class ArgumentsRegion:
    before: str
    after: str

    def extract_arguments_text(self, turn: str) -> str:
        """The turn must have one call. Raises TemplateInferenceError."""
        if not turn.startswith(self.before) or not turn.endswith(self.after):
            raise TemplateInferenceError("calls look different with other arguments")
        return turn[len(self.before) : len(turn) - len(self.after)]


@dataclass(frozen=True, slots=True)
class EntryLayout:
    before_key: str
    infixes: dict[str, str]
    ends: dict[str, str]
    separator: str
    spelling: LiteralSpelling
    sort: bool


def find_arguments_region(prober: TemplateProber) -> ArgumentsRegion:
    """Raises TemplateInferenceError if the template omits arguments."""
    empty = prober.render_assistant_turn([ProbeCall(PROBE_NAMES[0], {})])
    full = prober.render_assistant_turn([ProbeCall(PROBE_NAMES[0], dict(zip(PROBE_KEYS, PROBE_VALUES, strict=True)))])
    before = common_prefix_by_atoms(empty, full)
    after = common_suffix_by_atoms(empty[len(before) :], full[len(before) :])
    if any(one not in full[len(before) : len(full) - len(after)] for one in (*PROBE_KEYS, *PROBE_VALUES)):
        raise TemplateInferenceError("it does not render the arguments of calls")
    return ArgumentsRegion(before, after)


def infer_arguments_form(prober: TemplateProber, region: ArgumentsRegion) -> ArgumentsForm:
    """Raises TemplateInferenceError."""
    full = region.extract_arguments_text(
        prober.render_assistant_turn([ProbeCall(PROBE_NAMES[0], dict(zip(PROBE_KEYS, PROBE_VALUES, strict=True)))])
    )
    sort = full.index(PROBE_KEYS[1]) < full.index(PROBE_KEYS[0])
    order = (1, 0) if sort else (0, 1)
    keys, values = [PROBE_KEYS[one] for one in order], [PROBE_VALUES[one] for one in order]
    before_key, infix, middle, after = _texts_around_two_entries(full, keys[0], values[0], keys[1], values[1])
    if not middle.startswith(after) or not middle.endswith(before_key) or len(middle) < len(after + before_key):
        raise TemplateInferenceError("it does not render where a value ends and the next key begins")
    separator = middle[len(after) : len(middle) - len(before_key)]
    infixes = {"string": infix}
    ends = {"string": after}
    written: dict[str, str] = {}
    for kind, sample in SAMPLE_VALUES.items():
        try:
            one = region.extract_arguments_text(
                prober.render_assistant_turn([ProbeCall(PROBE_NAMES[0], {SAMPLE_KEY: sample})])
            )
            infixes[kind], written[kind], ends[kind] = _split_entry_after_key(
                one, before_key, after, kind, sample, infix
            )
        except (TemplateInferenceError, ValueError):
            continue
    if "number" not in infixes:
        raise TemplateInferenceError("it does not render numbers in arguments")
    layout = EntryLayout(before_key, infixes, ends, separator, _infer_literal_spelling(written), sort)
    quote = _infer_quote(infixes, ends)
    if quote is not None:
        return _infer_literal_arguments(prober, region, layout, quote)
    if len(set(ends.values())) > 1:
        raise TemplateInferenceError("values of different types end differently")
    return _infer_tagged_arguments(prober, region, layout)


def _texts_around_two_entries(full: str, key: str, value: str, key2: str, value2: str) -> tuple[str, str, str, str]:
    """Returns the texts before the first key, between key and value, after the first value, and after the second."""
    places = [full.index(one) for one in (key, value, key2, value2)]
    if places != sorted(places):
        raise TemplateInferenceError("its arguments are in no order that is known here")
    before, rest = full.split(key, 1)
    infix, rest = rest.split(value, 1)
    middle, rest = rest.split(key2, 1)
    infix2, after = rest.split(value2, 1)
    if infix2 != infix:
        raise TemplateInferenceError("keys and values are separated differently each time")
    after, middle = after.replace(key2, KEY_SLOT), middle.replace(key, KEY_SLOT)
    return before, infix, middle, after


def _split_entry_after_key(
    arguments_text: str, before_key: str, after: str, kind: str, sample: Any, string_infix: str
) -> tuple[str, str, str]:
    rest = arguments_text.removeprefix(before_key)
    if not rest.startswith(SAMPLE_KEY):
        raise TemplateInferenceError("keys look different with other values")
    rest = rest[len(SAMPLE_KEY) :].replace(SAMPLE_KEY, KEY_SLOT)
    splits = [
        (rest[:place], one, rest[place + len(one) :])
        for one in candidate_value_texts(sample)
        for place in _find_occurrences(rest, one)
    ]
    if splits:
        return next((each for each in splits if each[2] == after), splits[0])
    if rest.startswith(string_infix) and rest.endswith(after):
        return string_infix, rest[len(string_infix) : len(rest) - len(after)], after
    raise TemplateInferenceError(f"it does not render a {kind}")


def _find_occurrences(text: str, part: str) -> list[int]:
    return [place for place in range(len(text)) if text.startswith(part, place)] if part else []


def candidate_value_texts(value: Any) -> Iterator[str]:
    yield json.dumps(value)
    yield json.dumps(value, separators=(",", ":"))
    yield repr(value)
    yield str(value)
    if value is None:
        yield "none"


def _infer_literal_spelling(written: dict[str, str]) -> LiteralSpelling:
    return LiteralSpelling(
        true=written.get("boolean", "true"),
        false="False" if written.get("boolean") == "True" else "false",
        null=written.get("null", "null") or "null",
        json_lists=parse_json_or_none(written.get("array", "")) is not None,
        json_objects=parse_json_or_none(written.get("object", "")) is not None,
    )


def _infer_quote(infixes: dict[str, str], ends: dict[str, str]) -> str | None:
    infix, end = infixes["number"], ends["number"]
    if not infixes["string"].startswith(infix) or not ends["string"].endswith(end):
        return None
    quote = infixes["string"][len(infix) :]
    return quote if quote.strip() and ends["string"] == quote + end else None


def _infer_literal_arguments(
    prober: TemplateProber, region: ArgumentsRegion, layout: EntryLayout, quote: str
) -> ArgumentsForm:
    arguments_text = region.extract_arguments_text(
        prober.render_assistant_turn([ProbeCall(PROBE_NAMES[0], {SAMPLE_KEY: TRICKY_STRING})])
    )
    raw = quote + TRICKY_STRING + quote in arguments_text
    infix = layout.infixes["number"]
    ends_by = r"\s*,\s*[\w.-]+\s*=|\s*\)" if infix.strip() == "=" else r"\s*[,\])}]"
    literals = LiteralSyntax(quote, raw, ends_by)
    return LiteralArguments(
        layout.before_key,
        infix,
        layout.separator,
        literals,
        layout.spelling,
        layout.ends["number"],
        layout.sort,
    )


def _infer_tagged_arguments(prober: TemplateProber, region: ArgumentsRegion, layout: EntryLayout) -> ArgumentsForm:
    try:
        arguments_text = region.extract_arguments_text(
            prober.render_assistant_turn([ProbeCall(PROBE_NAMES[0], {SAMPLE_KEY: TRICKY_STRING})])
        )
    except TemplateInferenceError:
        arguments_text = ""
    element = re.match(r"(.{1,80}?)(\w+)>qitemq", _render_array(prober, region, layout.infixes["string"]))
    return TaggedArguments(
        layout.before_key,
        layout.infixes,
        layout.ends["string"],
        layout.separator,
        layout.spelling,
        layout.sort,
        uses_cdata=f"<![CDATA[{TRICKY_STRING}]]>" in arguments_text,
        has_html_entities=TRICKY_STRING not in arguments_text
        and html.escape(TRICKY_STRING) in arguments_text.replace("&#34;", "&quot;").replace("&#39;", "&#x27;"),
        element_prefix=element[1] if element is not None else "",
        item_name=element[2] if element is not None else "",
    )


def _render_array(prober: TemplateProber, region: ArgumentsRegion, infix: str) -> str:
    try:
        arguments_text = region.extract_arguments_text(
            prober.render_assistant_turn([ProbeCall(PROBE_NAMES[0], {SAMPLE_KEY: ["qitemq"]})])
        )
    except TemplateInferenceError:
        return ""
    return arguments_text.partition(SAMPLE_KEY + infix)[2]
