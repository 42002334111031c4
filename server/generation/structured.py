"""Structured outputs: the grammar that a request asks for in one of many ways, tried out before it is queued."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict
from typing import Any

import msgspec

from quire.engine.errors import EngineError, InvalidRequest
from quire.engine.text.grammar import MAX_GRAMMAR_BYTES, choice_grammar, json_grammar, vocabulary_of
from quire.engine.text.tokenizer import Tokenizer
from quire.engine.types import Grammar
from quire.server.generation.reasoning import ReasoningFormat
from quire.server.generation.sampling_params import check_text
from quire.server.protocol.common import GenerationBody

MAX_CHOICES = 10_000
_KEPT_VERDICTS = 64
_WAYS = ("json", "json_object", "regex", "choice", "grammar")
_HARMLESS = {"disable_fallback", "disable_any_whitespace", "backend"}
"""Keys of structured_outputs that change nothing here: no backend but one, and no whitespace beyond one space."""


def asked_grammar(body: GenerationBody) -> tuple[str, Grammar] | None:
    """The parameter that asks, and the grammar it asks for. Raises InvalidRequest naming the parameter."""
    found: list[tuple[str, str, Any]] = []
    if body.response_format is not None:
        found += [("response_format", *one) for one in _response_format(body.response_format)]
    if body.structured_outputs is not None:
        found += [("structured_outputs", *one) for one in _structured_outputs(body.structured_outputs)]
    for way in _WAYS:
        param = f"guided_{way}"
        value = getattr(body, param, None)
        if value is not None:
            found.append((param, way, value))
    if not found:
        return None
    if len(found) > 1:
        all_asked = " and ".join(f"{param} ({way})" for param, way, _ in found)
        raise InvalidRequest(f"Only one structured output can be asked for, got {all_asked}", param=found[1][0])
    param, way, value = found[0]
    try:
        grammar = _grammar(way, value)
    except InvalidRequest as error:
        raise InvalidRequest(f"{param}: {error.message}", param=param) from error
    check_text(grammar.text, param)
    return param, grammar


def _response_format(given: dict[str, Any]) -> list[tuple[str, Any]]:
    kind = given.get("type")
    if kind == "text":
        return []
    if kind == "json_object":  # with a schema as llama.cpp's clients send it, or TGI's (huggingface_hub)
        schema = given.get("schema", given.get("value"))
        return [("json_object", True) if schema is None else ("json", schema)]
    if kind == "json_schema":
        inner = given.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, dict) else None
        if schema is None:
            raise InvalidRequest("response_format.json_schema.schema is missing", param="response_format")
        return [("json", schema)]
    raise InvalidRequest(
        f"response_format.type must be text, json_object or json_schema, got {kind!r}", param="response_format"
    )


def _structured_outputs(given: dict[str, Any]) -> list[tuple[str, Any]]:
    given = {name: value for name, value in given.items() if value is not None and value is not False}
    for name in given:
        if name not in _WAYS and name not in _HARMLESS:
            raise InvalidRequest(f"structured_outputs.{name} is not supported", param="structured_outputs")
    found = [(way, given[way]) for way in _WAYS if way in given]
    if not found:
        raise InvalidRequest(f"structured_outputs needs one of {', '.join(_WAYS)}", param="structured_outputs")
    return found


def _grammar(way: str, value: Any) -> Grammar:
    if way == "json_object":
        if value is not True:
            raise InvalidRequest("json_object must be true or false")
        return json_grammar({"type": "object"})
    if way == "json":
        return json_grammar(_parsed(value) if isinstance(value, str) else value)
    if way == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
            raise InvalidRequest("choice must be a list of strings, at least one")
        if len(value) > MAX_CHOICES:
            raise InvalidRequest(f"choice takes at most {MAX_CHOICES} strings, got {len(value)}")
        return choice_grammar(value)
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{way} must be a string, and not empty")
    return Grammar("regex" if way == "regex" else "lark", value)


def _parsed(schema: str) -> Any:
    try:
        return json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the schema is not JSON: {error}") from None


def after_thinking(grammar: Grammar, reasoning: ReasoningFormat, begun: bool | None, tokenizer: Tokenizer) -> Grammar:
    """The same grammar for what follows the thinking. `begun` is ReasoningFormat.begun of the prompt.

    Where the model decides whether it thinks, both are allowed.
    """
    if begun is False:
        return grammar

    def special(mark: str) -> str | None:
        token_id = tokenizer.backend.token_to_id(mark)
        return f"<[{token_id}]>" if token_id in tokenizer.special_ids else None

    begin, end = special(reasoning.begin) or json.dumps(reasoning.begin), special(reasoning.end)
    rules = [
        "start: thinking gap body" if begun else f"start: ( {begin} thinking gap )? body",
        f"thinking[suffix={json.dumps(reasoning.end)}]: /(?s:.*)/" if end is None else f"thinking: FREE {end}",
        "FREE: /(?s:.*)/",
        "gap: /\\n{0,2}/",
        f"body: {_as_rule(grammar)}",
    ]
    return Grammar("lark", "\n".join(rules))


def either(one: Grammar, other: Grammar) -> Grammar:
    """Whatever one of them matches."""
    return Grammar("lark", f"start: one | other\none: {_as_rule(one)}\nother: {_as_rule(other)}")


def _as_rule(grammar: Grammar) -> str:
    if grammar.kind == "json":
        return f"%json {grammar.text}"
    if grammar.kind == "lark":
        return f"%lark {{\n{grammar.text}\n}}"
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(grammar.text)}/"


class GrammarChecker:
    """Tries grammars out in a process of its own, which may crash or never end: see engine/text/grammar.py.

    The process starts with the first grammar. Checks stand in line; what was found is kept for a while.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        vocabulary = vocabulary_of(tokenizer, vocab_size, tokenizer.eos_token_ids)
        # Now, while the engine starts: for 150,000 tokens it takes a quarter of a second, in which no stream moves.
        self._vocabulary = msgspec.json.encode(vocabulary) + b"\n"
        self._process: Process | None = None
        self._turn = asyncio.Lock()
        self._verdicts: OrderedDict[Grammar, str | None] = OrderedDict()

    async def checked(self, asked: tuple[str, Grammar] | None) -> Grammar | None:
        """The grammar of a parameter. Raises InvalidRequest, naming the parameter, for one that is wrong, not supported
        or too complex."""
        if asked is None:
            return None
        param, grammar = asked
        if len(grammar.text.encode()) > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(f"{param} is longer than {MAX_GRAMMAR_BYTES} bytes", param=param)
        if grammar not in self._verdicts:  # what is known waits for nobody's check
            async with self._turn:
                if grammar not in self._verdicts:
                    self._verdicts[grammar] = await self._try(grammar)
                if len(self._verdicts) > _KEPT_VERDICTS:
                    self._verdicts.popitem(last=False)
        self._verdicts.move_to_end(grammar)
        wrong = self._verdicts[grammar]
        if wrong is not None:
            raise InvalidRequest(f"{param}: {wrong}", param=param)
        return grammar

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _try(self, grammar: Grammar) -> str | None:
        """What is wrong with it; None: nothing."""
        if self._process is None:
            self._process = await self._start()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        answer = b""
        try:
            with contextlib.suppress(ConnectionError):
                self._process.stdin.write(msgspec.json.encode(grammar) + b"\n")
                await self._process.stdin.drain()
                answer = await self._process.stdout.readline()
        finally:
            if not answer.endswith(b"\n"):  # it died, or we are cancelled and its answer would be taken for another's
                await self.close()
        return msgspec.json.decode(answer, type=str | None) if answer else "too complex to be compiled"

    async def _start(self) -> Process:
        process = await asyncio.create_subprocess_exec(  # -P: see engine/client/process.py
            sys.executable, "-P", "-m", "quire.engine.text.grammar", stdin=PIPE, stdout=PIPE, stderr=DEVNULL
        )
        assert process.stdin is not None
        try:
            process.stdin.write(self._vocabulary)
            await process.stdin.drain()
        except ConnectionError as error:
            raise EngineError("the process that checks grammars cannot be started") from error
        return process
