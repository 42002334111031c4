"""Combines the grammars of thinking, of tool calls and of a requested format, and checks that a grammar compiles."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict

import msgspec

from quire.engine.errors import EngineError, InvalidRequest
from quire.engine.text.grammar import MAX_GRAMMAR_BYTES, vocabulary_of
from quire.engine.text.tokenizer import Tokenizer
from quire.engine.types import Grammar
from quire.server.formats.reasoning import ReasoningFormat

_KEPT_VERDICTS = 64


def after_thinking(grammar: Grammar, reasoning: ReasoningFormat, begun: bool | None, tokenizer: Tokenizer) -> Grammar:
    """A grammar of thinking followed by what this grammar matches. `begun` is ReasoningFormat.begun of the prompt.

    Where the model decides whether it thinks, answers with and without thinking are allowed.
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
    """A grammar that matches what at least one of the two matches."""
    return Grammar("lark", f"start: one | other\none: {_as_rule(one)}\nother: {_as_rule(other)}")


def _as_rule(grammar: Grammar) -> str:
    if grammar.kind == "json":
        return f"%json {grammar.text}"
    if grammar.kind == "lark":
        return f"%lark {{\n{grammar.text}\n}}"
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(grammar.text)}/"


class GrammarChecker:
    """Compiles grammars in a process of its own, because that may crash or never end: see engine/text/grammar.py.

    The process starts with the first grammar and checks one at a time. The last _KEPT_VERDICTS results are kept.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        vocabulary = vocabulary_of(tokenizer, vocab_size, tokenizer.eos_token_ids)
        # Encoded while the engine starts: 150,000 tokens take a quarter of a second, in which no stream would move.
        self._vocabulary = msgspec.json.encode(vocabulary) + b"\n"
        self._process: Process | None = None
        self._turn = asyncio.Lock()
        self._verdicts: OrderedDict[Grammar, str | None] = OrderedDict()

    async def checked(self, asked: tuple[str, Grammar] | None) -> Grammar | None:
        """The grammar of `asked`, which is a parameter's name and its grammar. Raises InvalidRequest, naming the
        parameter, for a grammar that is wrong, not supported or too complex."""
        if asked is None:
            return None
        param, grammar = asked
        if len(grammar.text.encode()) > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(f"{param} is longer than {MAX_GRAMMAR_BYTES} bytes", param=param)
        if grammar not in self._verdicts:  # a known verdict does not wait for other checks
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
        """What is wrong with the grammar; None: nothing."""
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
            if not answer.endswith(b"\n"):  # it died, or we were cancelled and the next check would read our answer
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
