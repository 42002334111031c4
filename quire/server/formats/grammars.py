"""Combines the grammars of thinking, of tool calls and of a requested format."""

from __future__ import annotations

import json

from quire.engine.text.tokenizer import Tokenizer
from quire.engine.types import Grammar
from quire.server.formats.frame import ContentFrame
from quire.server.formats.reasoning import ReasoningFormat


def after_thinking(grammar: Grammar, reasoning: ReasoningFormat, begun: bool | None, tokenizer: Tokenizer) -> Grammar:
    """A grammar of thinking followed by what this grammar matches. `begun` is ReasoningFormat.begun of the prompt.

    Where the model decides whether it thinks, answers with and without thinking are allowed.
    """
    if begun is False:
        return grammar
    begin, lead = _words(reasoning.begin, tokenizer), _words(reasoning.lead, tokenizer)
    if reasoning.space:
        begin = f"( {json.dumps(reasoning.space)} )? {begin}"
    first, *rest = tokenizer.special_parts(reasoning.end)
    end = " ".join(literal(part, tokenizer) for part, _ in rest)
    thinking = f"FREE {literal(first[0], tokenizer)} {end}" if first[1] is not None else f"thought {end}"
    rules = [
        "start: thinking gap body" if begun else f"start: ( {begin} thinking gap )? body",
        f"thinking: {thinking}",
        f"gap: /\\n{{0,2}}/ {lead}",
        f"body: {_as_rule(grammar)}",
        "FREE: /(?s:.*)/" if first[1] is not None else f"thought[suffix={json.dumps(first[0])}]: /(?s:.*)/",
    ]
    return Grammar("lark", "\n".join(rules))


def framed(grammar: Grammar, frame: ContentFrame | None, tokenizer: Tokenizer) -> Grammar:
    """The grammar of content, with what the model writes around it."""
    if frame is None:
        return grammar
    begin, close = _words(frame.begin, tokenizer), _words(frame.close, tokenizer)
    end = f"( {close} )?" if close else ""
    return Grammar("lark", f"start: {begin} content {end}\ncontent: {_as_rule(grammar)}")


def literal(text: str, tokenizer: Tokenizer) -> str:
    """A text as Lark writes it: its special tokens as tokens, the rest as text."""
    parts = tokenizer.special_parts(text)
    return " ".join(json.dumps(part) if token_id is None else f"<[{token_id}]>" for part, token_id in parts)


def either(one: Grammar, other: Grammar) -> Grammar:
    """A grammar that matches what at least one of the two matches."""
    return Grammar("lark", f"start: one | other\none: {_as_rule(one)}\nother: {_as_rule(other)}")


def _as_rule(grammar: Grammar) -> str:
    if grammar.kind == "json":
        return f"%json {grammar.text}"
    if grammar.kind == "lark":
        return f"%lark {{\n{grammar.text}\n}}"
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(grammar.text)}/"


def _words(text: str, tokenizer: Tokenizer) -> str:
    """The same with white space in front as a word of its own: see Rules.pieces."""
    space = text[: len(text) - len(text.lstrip())]
    return " ".join([*([json.dumps(space)] if space else []), literal(text.lstrip(), tokenizer)])
