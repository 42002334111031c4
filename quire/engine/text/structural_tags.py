"""Converts structural tags (XGrammar 0.2's format, also accepted by vLLM and SGLang) to a Lark grammar for llguidance.
They describe free text with tagged parts that follow a schema. Free text ends at the first trigger or end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from quire.engine.common.errors import InvalidRequest
from quire.engine.schemas.object_closing import ClosedSchema
from quire.engine.text.grammar_compiler import lark_json_rule, to_lark
from quire.engine.text.tokenizer import Tokenizer

_MAX_DEPTH = 32
_TOO_DEEP = f"structural_tag is nested more than {_MAX_DEPTH} deep"
_KNOWN_FIELDS: Mapping[str, tuple[str, ...]] = {
    "const_string": ("value",),
    "json_schema": ("json_schema", "style"),
    "any_text": ("excludes",),
    "grammar": ("grammar", "syntax"),
    "regex": ("pattern",),
    "sequence": ("elements",),
    "or": ("elements",),
    "tag": ("begin", "content", "end"),
    "triggered_tags": ("triggers", "tags", "at_least_one", "stop_after_first", "excludes"),
    "tags_with_separator": ("tags", "separator", "at_least_one", "stop_after_first"),
    "optional": ("content",),
    "plus": ("content",),
    "star": ("content",),
    "repeat": ("content", "min", "max"),
}
"""Other fields are refused unless they are null, false or []."""
_ANY_TEXT = "/(?s:.*)/"


class StructuralTagGrammar(NamedTuple):
    lark: str
    open_objects: tuple[str, ...]
    """JSON pointers of objects that still allow undeclared properties."""


class _Tag(NamedTuple):
    begin: str
    content: Mapping[str, Any]
    ends: tuple[str, ...]
    """Texts that may end the tag; empty if its content ends by itself."""
    path: str
    """For error messages, such as format.tags[0]."""


def structural_tag_grammar(
    value: Any, tokenizer: Tokenizer | None, close_schema: Callable[[Any], ClosedSchema]
) -> StructuralTagGrammar:
    """`value`: an object or JSON text with `format`, or with `structures` and `triggers` in the older form. Without a
    tokenizer, special tokens are treated as text. Raises InvalidRequest with the path of the invalid part.
    """
    tag = _parse_json(value, "structural_tag") if isinstance(value, str) else value
    if not isinstance(tag, Mapping):
        raise InvalidRequest("structural_tag must be an object or JSON text")
    path = "format" if "format" in tag else "structures"
    writer = _GrammarWriter(tokenizer, close_schema)
    try:
        root = writer.write(tag["format"] if "format" in tag else _convert_older_form(tag), (), path)
    except RecursionError:
        raise InvalidRequest(_TOO_DEEP) from None
    return StructuralTagGrammar("\n".join([f"start: {root}", *writer.rules]), tuple(writer.open_objects))


def _convert_older_form(tag: Mapping[str, Any]) -> dict[str, Any]:
    structures = tag.get("structures")
    if not isinstance(structures, list) or "triggers" not in tag:
        raise InvalidRequest("a structural tag needs format, or structures and triggers")
    tags = []
    for index, structure in enumerate(structures):
        if not isinstance(structure, Mapping) or "schema" not in structure:
            raise InvalidRequest(f"structures[{index}] must be an object with begin, schema and end")
        schema = structure["schema"]
        if isinstance(schema, str):
            schema = _parse_json(schema, f"structures[{index}].schema")
        content = {"type": "json_schema", "json_schema": schema}
        tags.append({"begin": structure.get("begin"), "content": content, "end": structure.get("end")})
    return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}


def _parse_json(text: str, path: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{path} is not JSON: {error}") from None


class _GrammarWriter:
    def __init__(self, tokenizer: Tokenizer | None, close_schema: Callable[[Any], ClosedSchema]) -> None:
        self.rules: list[str] = []
        self.open_objects: list[str] = []
        self._tokenizer = tokenizer
        self._close_schema = close_schema
        self._depth = 0
        self._content_rules: dict[str, str] = {}
        """If these rules were not shared, each level of nesting would double the grammar."""
        self._free_text_writers: Mapping[str, Callable[[Mapping[str, Any], Sequence[str], str], str]] = {
            "any_text": self._write_any_text,
            "sequence": self._write_sequence,
            "or": self._write_or,
            "triggered_tags": self._write_triggered_tags,
            "optional": self._write_optional,
        }
        """Writers of formats that may end in free text. They get the texts that can end the free text."""
        self._self_ending_writers: Mapping[str, Callable[[Mapping[str, Any], str], str]] = {
            "const_string": lambda format, path: self._literal(_read_string(format, "value", path)),
            "json_schema": self._write_json_schema,
            "grammar": self._write_grammar,
            "regex": self._write_regex,
            "tag": lambda format, path: self._write_tag(self._read_tag(format, path)),
            "tags_with_separator": self._write_tags_with_separator,
            "plus": lambda format, path: f"( {self._write_content(format, path)} )+",
            "star": lambda format, path: f"( {self._write_content(format, path)} )*",
            "repeat": self._write_repeat,
        }

    def write(self, format: Any, ends: Sequence[str], path: str) -> str:
        kind = _read_type(format, path)
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise InvalidRequest(_TOO_DEEP)
        if (free_text_writer := self._free_text_writers.get(kind)) is not None:
            expression = free_text_writer(format, ends, path)
        else:
            expression = " ".join(filter(None, (self._self_ending_writers[kind](format, path), self._write_ends(ends))))
        self._depth -= 1
        return expression or '""'

    def _write_self_ending(self, format: Any, path: str) -> str:
        if _can_end_in_free_text(format):
            raise InvalidRequest(f"{path}: free text must be last, or in a tag with an end")
        return self.write(format, (), path)

    def _write_content(self, format: Mapping[str, Any], path: str) -> str:
        return self._write_self_ending(format.get("content"), f"{path}.content")

    def _write_any_text(self, format: Mapping[str, Any], ends: Sequence[str], path: str) -> str:
        return self._text_until(self._text_terminal(format, path), ends)

    def _text_until(self, text: str, ends: Sequence[str]) -> str:
        if not ends:
            return text
        alternatives = []
        for end in ends:
            (first, token), *rest = self._split_at_special_tokens(end)
            if token is not None:
                alternatives.append(f"{text} {self._literal(end)}")
            elif not rest:
                alternatives.append(self._add_rule(text, f"[suffix={json.dumps(end)}]"))
            else:  # free text has no special tokens, so no lazy match is needed
                alternatives.append(
                    f"{self._add_terminal(f'{text} {json.dumps(first)}')} {self._literal(end[len(first) :])}"
                )
        return _alternatives(alternatives)

    def _text_terminal(self, format: Mapping[str, Any], path: str) -> str:
        excluded = _read_strings(format.get("excludes", []), f"{path}.excludes")
        if not excluded:
            return self._add_terminal(_ANY_TEXT)
        with_excluded = self._add_terminal(f"{_ANY_TEXT} {_alternatives(map(json.dumps, excluded))} {_ANY_TEXT}")
        return self._add_terminal(f"{_ANY_TEXT} & ~{with_excluded}")

    def _write_sequence(self, format: Mapping[str, Any], ends: Sequence[str], path: str) -> str:
        elements = _read_list(format, "elements", path)
        last = len(elements) - 1
        written = [self._write_self_ending(each, f"{path}.elements[{i}]") for i, each in enumerate(elements[:last])]
        return " ".join([*written, self.write(elements[last], ends, f"{path}.elements[{last}]")])

    def _write_or(self, format: Mapping[str, Any], ends: Sequence[str], path: str) -> str:
        elements = enumerate(_read_list(format, "elements", path))
        return _alternatives(self.write(each, ends, f"{path}.elements[{i}]") for i, each in elements)

    def _write_optional(self, format: Mapping[str, Any], ends: Sequence[str], path: str) -> str:
        content = self.write(format.get("content"), ends, f"{path}.content")
        return f"( {content} | {self._write_ends(ends)} )" if ends else f"( {content} )?"

    def _write_json_schema(self, format: Mapping[str, Any], path: str) -> str:
        if format.get("style", "json") != "json":
            raise InvalidRequest(f"{path}.style {format['style']!r} is not supported, only json")
        closed = self._close_schema(format.get("json_schema"))
        pointer = "/" + path.replace(".", "/").replace("[", "/").replace("]", "")
        self.open_objects += [f"{pointer}{each}" for each in closed.open_objects]
        try:
            return self._add_rule(lark_json_rule(closed.schema))
        except InvalidRequest as error:
            raise InvalidRequest(f"{path}: {error.message}") from None

    def _write_grammar(self, format: Mapping[str, Any], path: str) -> str:
        if format.get("syntax", "ebnf") not in ("ebnf", "lark"):
            raise InvalidRequest(f"{path}.syntax must be ebnf or lark, got {format['syntax']!r}")
        try:
            return self._add_rule(f"%lark {{\n{to_lark(_read_string(format, 'grammar', path))}\n}}")
        except InvalidRequest as error:
            raise InvalidRequest(f"{path}: {error.message}") from None

    def _write_regex(self, format: Mapping[str, Any], path: str) -> str:
        from llguidance import regex_to_lark

        return self._add_terminal(f"/{regex_to_lark(_read_string(format, 'pattern', path))}/")

    def _write_repeat(self, format: Mapping[str, Any], path: str) -> str:
        low, high = format.get("min"), format.get("max")
        if type(low) is not int or type(high) is not int or low < 0 or not (high == -1 or high >= low):
            raise InvalidRequest(f"{path} needs an integer min of 0 or more, and an integer max of min or more, or -1")
        return f"( {self._write_content(format, path)} ){{{low},{'' if high == -1 else high}}}"

    def _write_tags_with_separator(self, format: Mapping[str, Any], path: str) -> str:
        tags = self._add_rule(_alternatives(map(self._write_tag, self._read_tags(format, path))))
        separator = self._literal(_read_string(format, "separator", path, may_be_empty=True))
        many = tags if _read_flag(format, "stop_after_first", path) else f"{tags} ( {separator} {tags} )*"
        return many if _read_flag(format, "at_least_one", path) else f"( {many} )?"

    def _write_triggered_tags(self, format: Mapping[str, Any], ends: Sequence[str], path: str) -> str:
        tags, triggers = self._read_tags(format, path), _read_strings(format.get("triggers"), f"{path}.triggers")
        if not triggers or not all(triggers):
            raise InvalidRequest(f"{path}.triggers must not be empty or contain an empty string")
        text = self._text_terminal(format, path)
        tags_by_trigger: dict[str, list[_Tag]] = {}
        for tag in tags:
            matching = [each for each in triggers if tag.begin.startswith(each)]
            if len(matching) != 1:
                number = len(matching) or "none"
                raise InvalidRequest(
                    f"{tag.path}.begin must begin with exactly one of the triggers, but begins with {number}"
                )
            tags_by_trigger.setdefault(matching[0], []).append(tag)
        first = _alternatives(map(self._write_tag, tags)) if _read_flag(format, "at_least_one", path) else ""
        if _read_flag(format, "stop_after_first", path):
            if first:
                return f"{first} {self._write_ends(ends)}"
            units = _alternatives(self._write_triggered(text, *each) for each in tags_by_trigger.items())
            return f"( {units} {self._write_ends(ends)} | {self._text_until(text, ends)} )"
        units = _alternatives(self._write_triggered(text, *each) for each in tags_by_trigger.items())
        return f"{first} {units}* {self._text_until(text, ends)}"

    def _write_triggered(self, text: str, trigger: str, tags: Sequence[_Tag]) -> str:
        """Writes free text up to the trigger, then one of the tags."""
        for tag in tags:
            position = 0
            for part, token in self._split_at_special_tokens(tag.begin):
                if token is not None and position < len(trigger) < position + len(part):
                    raise InvalidRequest(f"{tag.path}: the trigger {trigger!r} ends inside the token {part!r}")
                position += len(part)
        rests = _alternatives(self._write_tag(tag, skipped=len(trigger)) for tag in tags)
        return f"{self._text_until(text, (trigger,))} {rests}"

    def _write_tag(self, tag: _Tag, skipped: int = 0) -> str:
        """The first `skipped` characters of `begin` are already written."""
        if (content := self._content_rules.get(tag.path)) is None:
            path = f"{tag.path}.content"
            content = self._content_rules[tag.path] = self._add_rule(
                self.write(tag.content, tag.ends, path) if tag.ends else self._write_self_ending(tag.content, path)
            )
        return f"{self._literal(tag.begin[skipped:])} {content}"

    def _read_tags(self, format: Mapping[str, Any], path: str) -> list[_Tag]:
        tags = []
        for index, each in enumerate(_read_list(format, "tags", path)):
            tag_path = f"{path}.tags[{index}]"
            if isinstance(each, Mapping):
                each = {"type": "tag", **each}
            if _read_type(each, tag_path) != "tag":
                raise InvalidRequest(f"{tag_path}.type must be tag")
            tags.append(self._read_tag(each, tag_path))
        return tags

    def _read_tag(self, format: Mapping[str, Any], path: str) -> _Tag:
        end = format.get("end")
        ends = _read_strings([end] if isinstance(end, str) else end, f"{path}.end")
        begin = _read_string(format, "begin", path, may_be_empty=True)
        return _Tag(begin, format.get("content") or {}, tuple(filter(None, ends)), path)

    def _write_ends(self, ends: Sequence[str]) -> str:
        return _alternatives(map(self._literal, ends)) if ends else ""

    def _split_at_special_tokens(self, text: str) -> list[tuple[str, int | None]]:
        if self._tokenizer is None:
            return [(text, None)]
        parts = self._tokenizer.split_at_special_tokens(text)
        for part, token in parts:
            if token in self._tokenizer.eos_token_ids:
                raise InvalidRequest(f"{part!r} ends an answer, so a structural tag must not contain it")
        return parts

    def _literal(self, text: str) -> str:
        parts = self._split_at_special_tokens(text) if text else []
        return " ".join(json.dumps(part) if token is None else f"<[{token}]>" for part, token in parts)

    def _add_rule(self, body: str, options: str = "") -> str:
        name = f"part_{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name

    def _add_terminal(self, body: str) -> str:
        name = f"PART_{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name


def _read_type(format: Any, path: str) -> str:
    if not isinstance(format, Mapping):
        raise InvalidRequest(f"{path} must be an object with a type")
    kind = format.get("type")
    if not isinstance(kind, str) or kind not in _KNOWN_FIELDS:
        raise InvalidRequest(f"{path}.type {kind!r} is not supported; supported: {', '.join(_KNOWN_FIELDS)}")
    for name, value in format.items():
        if name != "type" and name not in _KNOWN_FIELDS[kind] and value not in (None, False, []):
            raise InvalidRequest(f"{path}.{name} is not supported in a format of type {kind}")
    return kind


def _can_end_in_free_text(format: Any) -> bool:
    """True if only the text after the format shows where the format ends."""
    if not isinstance(format, Mapping):
        return False
    if format.get("type") == "any_text":
        return True
    if format.get("type") == "triggered_tags":
        return not (format.get("at_least_one") and format.get("stop_after_first"))
    elements = format.get("elements")
    if isinstance(elements, list) and elements:
        return any(map(_can_end_in_free_text, elements if format.get("type") == "or" else elements[-1:]))
    return format.get("type") != "tag" and _can_end_in_free_text(format.get("content"))


def _alternatives(expressions: Any) -> str:
    return f"( {' | '.join(expressions)} )"


def _read_string(format: Mapping[str, Any], name: str, path: str, *, may_be_empty: bool = False) -> str:
    value = format.get(name)
    if not isinstance(value, str) or not (value or may_be_empty):
        raise InvalidRequest(f"{path}.{name} must be a {'' if may_be_empty else 'non-empty '}string")
    return value


def _read_strings(value: Any, path: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise InvalidRequest(f"{path} must be a list of strings")
    return value


def _read_list(format: Mapping[str, Any], name: str, path: str) -> list[Any]:
    value = format.get(name)
    if not isinstance(value, list) or not value:
        raise InvalidRequest(f"{path}.{name} must be a non-empty list")
    return value


def _read_flag(format: Mapping[str, Any], name: str, path: str) -> bool:
    value = format.get(name, False)
    if not isinstance(value, bool):
        raise InvalidRequest(f"{path}.{name} must be true or false")
    return value
