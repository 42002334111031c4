"""Grammars that answers must follow, by llguidance (https://github.com/guidance-ai/llguidance): writing and compiling.

`python -m quire.engine.text.grammar` is the process that tries callers' grammars out: a chain of 3,000 references
overflows the native stack, `multipleOf: 99999999` computes for hours. There that ends a child, not the server.
llguidance itself is imported when the first grammar comes; it takes a fifth of a second.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from quire.engine.errors import InvalidRequest, ModelError, QuireError
from quire.engine.types import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from quire.engine.text.tokenizer import Tokenizer

MAX_GRAMMAR_BYTES = 256 * 1024
MAX_CPU_SECONDS = 2.0
"""To compile a grammar and take its first steps; the engine, which does so again, stands still meanwhile."""
MAX_CHECK_MEMORY = 8 << 30
MAX_LEXER_STATES = 50_000
"""Of one matcher, at 1 to 2 KB."""
CHECK_STACK = 4 << 20
"""Bytes; half of what the engine has, so what passes here does not overflow there."""
_KEPT = 32
_STEPS = 3
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""One space after a comma or a colon, or none: JSON as models write it on one line. Free whitespace need never end."""


def json_grammar(schema: Any) -> Grammar:
    """Of a JSON schema: an object or true. Raises InvalidRequest for what is no schema at all."""
    return Grammar("json", _dump(_compact(schema)))


def json_rule(schema: Any) -> str:
    """`%json {…}`: a schema as a rule's body in a Lark grammar, with the whitespace of `json_grammar`."""
    return f"%json {_dump(_compact(schema))}"


def choice_grammar(choices: Sequence[str]) -> Grammar:
    """One of these texts."""
    return Grammar("lark", "start: " + " | ".join(map(json.dumps, choices)))


def _compact(schema: Any) -> Any:
    schema = {} if schema is True else schema
    if not isinstance(schema, dict):
        raise InvalidRequest("a JSON schema must be an object", param="grammar")
    own = schema.get("x-guidance")
    return {**schema, "x-guidance": {**(own if isinstance(own, dict) else {}), **_COMPACT}}


def _dump(schema: Any) -> str:
    try:
        return json.dumps(schema)
    except RecursionError:
        raise InvalidRequest("the JSON schema is nested too deeply", param="grammar") from None


class Vocabulary(msgspec.Struct, frozen=True):
    """The tokens that a grammar's text is made of."""

    tokenizer: str
    """The text of a tokenizer.json."""
    size: int
    eos_token_ids: tuple[int, ...]


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> Vocabulary:
    """vocab_size is the model's, which may have more tokens than the tokenizer, or fewer."""
    highest = max(tokenizer.backend.get_vocab(with_added_tokens=True).values())
    return Vocabulary(tokenizer.backend.to_str(), max(vocab_size, highest + 1), tuple(eos_token_ids))


class GrammarCompiler:
    """Makes matchers: parsers that say which tokens may come next.

    Raises ModelError for a tokenizer that llguidance does not know, or a model without an end-of-sequence token.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        from llguidance import LLParserLimits, LLTokenizer

        if not vocabulary.eos_token_ids:
            raise ModelError("the model has no end-of-sequence token, without which no grammar can end an answer")
        self.vocab_size = vocabulary.size
        try:
            self._tokenizer = LLTokenizer(
                vocabulary.tokenizer, n_vocab=vocabulary.size, eos_token=list(vocabulary.eos_token_ids)
            )
        except ValueError as error:
            raise ModelError(f"grammars are not available with this model's tokenizer: {error}") from error
        self._limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        self._kept: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """At the beginning of the grammar. Raises InvalidRequest for one that is wrong or not supported."""
        kept = self._kept.pop(grammar, None) or self._compile(grammar)
        self._kept[grammar] = kept
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return kept.deep_copy()

    def check(self, grammar: Grammar) -> None:
        """Compile it and take a few steps. Raises InvalidRequest as `matcher` does, and for one that nothing matches.

        It kills the process when the grammar is too much for llguidance, and may take for ever: see `main`.
        """
        import numpy as np

        matcher = self.matcher(grammar)
        for _ in range(_STEPS):
            allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little").nonzero()[0]
            if matcher.is_error() or not len(allowed):
                raise InvalidRequest(f"no text matches, or too complex: {first_line(matcher)}", param="grammar")
            if matcher.is_stopped():
                return
            matcher.consume_token(int(allowed[-1]))

    def _compile(self, grammar: Grammar) -> LLMatcher:
        from llguidance import LLMatcher

        if len(grammar.text.encode()) > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(f"longer than {MAX_GRAMMAR_BYTES} bytes", param="grammar")
        if grammar.kind == "json":
            source = LLMatcher.grammar_from_json_schema(grammar.text)
        elif grammar.kind == "regex":
            source = LLMatcher.grammar_from_regex(grammar.text)
        else:
            source = LLMatcher.grammar_from_lark(grammar.text)
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise InvalidRequest(matcher.get_error()[:1000].strip(), param="grammar")
        return matcher


def first_line(matcher: LLMatcher) -> str:
    """What went wrong; llguidance adds the parser's state below."""
    return matcher.get_error().partition("\n")[0][:300]


def main(stdin: BinaryIO, stdout: BinaryIO) -> None:
    """Read a Vocabulary, then grammars, each a line of JSON; answer each with a line: null, or what is wrong."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_CHECK_MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    vocabulary = msgspec.json.decode(stdin.readline(), type=Vocabulary)
    compiler: GrammarCompiler | None = None
    for line in stdin:
        wrong: str | None = None
        try:
            if compiler is None:
                compiler = GrammarCompiler(vocabulary)
            # The signal's default action ends the process, also inside native code.
            signal.setitimer(signal.ITIMER_PROF, MAX_CPU_SECONDS)
            compiler.check(msgspec.json.decode(line, type=Grammar))
        except QuireError as error:
            wrong = error.message
        signal.setitimer(signal.ITIMER_PROF, 0)
        stdout.write(msgspec.json.encode(wrong) + b"\n")
        stdout.flush()


if __name__ == "__main__":
    threading.stack_size(CHECK_STACK)
    thread = threading.Thread(target=main, args=(sys.stdin.buffer, sys.stdout.buffer))
    thread.start()
    thread.join()
