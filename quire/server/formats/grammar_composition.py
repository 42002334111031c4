from __future__ import annotations

import json

from quire.engine.common.request_params import Grammar
from quire.engine.text.tokenizer import Tokenizer
from quire.server.formats.content_delimiters import ContentDelimiters
from quire.server.formats.reasoning_parser import ReasoningFormat


def add_thinking_grammar(
    grammar: Grammar, reasoning: ReasoningFormat, starts_in_thinking: bool | None, tokenizer: Tokenizer
) -> Grammar:
    """If `starts_in_thinking` is None, the model decides, so thinking is optional."""
    if starts_in_thinking is False:
        return grammar
    begin, lead = (
        _lark_leading_space_and_literal(reasoning.begin, tokenizer),
        _lark_leading_space_and_literal(reasoning.generation_prompt, tokenizer),
    )
    if reasoning.begin_space:
        begin = f"( {json.dumps(reasoning.begin_space)} )? {begin}"
    first, *rest = tokenizer.split_at_special_tokens(reasoning.end)
    end = " ".join(lark_literal_with_special_tokens(part, tokenizer) for part, _ in rest)
    thinking = (
        f"FREE {lark_literal_with_special_tokens(first[0], tokenizer)} {end}"
        if first[1] is not None
        else f"thought {end}"
    )
    rules = [
        "start: thinking gap body" if starts_in_thinking else f"start: ( {begin} thinking gap )? body",
        f"thinking: {thinking}",
        f"gap: /\\n{{0,2}}/ {lead}",
        f"body: {_lark_rule_body(grammar)}",
        "FREE: /(?s:.*)/" if first[1] is not None else f"thought[suffix={json.dumps(first[0])}]: /(?s:.*)/",
    ]
    return Grammar("lark", "\n".join(rules))


def add_content_delimiters(grammar: Grammar, delimiters: ContentDelimiters | None, tokenizer: Tokenizer) -> Grammar:
    if delimiters is None:
        return grammar
    begin, close = (
        _lark_leading_space_and_literal(delimiters.begin, tokenizer),
        _lark_leading_space_and_literal(delimiters.close, tokenizer),
    )
    end = f"( {close} )?" if close else ""
    return Grammar("lark", f"start: {begin} content {end}\ncontent: {_lark_rule_body(grammar)}")


def lark_literal_with_special_tokens(text: str, tokenizer: Tokenizer) -> str:
    parts = tokenizer.split_at_special_tokens(text)
    return " ".join(json.dumps(part) if token_id is None else f"<[{token_id}]>" for part, token_id in parts)


def either_grammar(one: Grammar, other: Grammar) -> Grammar:
    return Grammar("lark", f"start: one | other\none: {_lark_rule_body(one)}\nother: {_lark_rule_body(other)}")


def _lark_rule_body(grammar: Grammar) -> str:
    if grammar.kind == "json":
        return f"%json {grammar.text}"
    if grammar.kind == "lark":
        return f"%lark {{\n{grammar.text}\n}}"
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(grammar.text)}/"


def _lark_leading_space_and_literal(text: str, tokenizer: Tokenizer) -> str:
    """Leading whitespace is a separate word: see LarkRules.split_literal."""
    space = text[: len(text) - len(text.lstrip())]
    return " ".join(
        [*([json.dumps(space)] if space else []), lark_literal_with_special_tokens(text.lstrip(), tokenizer)]
    )
