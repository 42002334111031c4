"""Compiles grammars with llguidance (https://github.com/guidance-ai/llguidance), which is imported late because that
takes 0.2 s. A hostile grammar can crash the process (3,000 chained references overflow the native stack) or occupy it
for hours (`multipleOf: 99999999`), so one of the server's workers checks each grammar first.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import msgspec

from quire.engine.common.errors import InvalidRequest, ModelError, Overloaded
from quire.engine.common.request_params import Grammar
from quire.engine.malloc import heap_bytes

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from quire.engine.text.tokenizer import Tokenizer

MAX_GRAMMAR_BYTES = 256 * 1024
MAX_CHECK_CPU_SECONDS = 2.0
"""Low, because the engine compiles the grammar again, and computes nothing else meanwhile."""
MAX_CHECK_MEMORY_BYTES = 1 << 30
SMALL_LEXER_STATES, LARGE_LEXER_STATES = 4096, 50_000
r"""A state takes 0.5 KB. A schema of 30 fields needs 800 states, as do 2,000 characters of any kind; `\p{L}{1,300}`
needs 7,000.
"""
_MAX_LARGE_LEXERS = 16
"""If all are full, they take 330 MB."""
MAX_COMPILED_BYTES = 1 << 30
"""Limit of the memory of all compiled grammars together, without their lexers. A schema of five fields takes 0.15 MB,
one of 130 KB takes 10 MB, and ten numbers with a large `multipleOf` take 15 MB.
"""
MAX_COMPILED_BYTES_PER_GRAMMAR = 128 << 20
_MIN_BYTES_PER_CHARACTER = 16
"""Some C libraries do not report heap bytes."""
MAX_FORCED_BYTES = 16 * 1024
"""Each forced byte takes 0.5 KB, and after each token all are tokenized again: 256 KB would cost 130 MB per answer and
0.1 s per token.
"""
CHECK_STACK_BYTES = 4 << 20
_LONG_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(?s:.))")
_MAX_CACHED_GRAMMARS = 32
_CHECK_TOKENS = 3
_COMPACT_WHITESPACE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""Allows at most one space after a comma or colon, because a model could write spaces forever."""
_USUAL_WHITESPACE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_INDENTED_WHITESPACE = {"whitespace_pattern": "[ \\n]{0,80}"}


def json_grammar(schema: Any) -> Grammar:
    """Raises InvalidRequest for a schema that is neither an object nor `true`."""
    return Grammar("json", _dump_schema(_with_whitespace(schema, _COMPACT_WHITESPACE)))


def lark_json_rule(schema: Any, *, indented: bool = False) -> str:
    """If `indented`, line breaks are allowed."""
    return f"%json {_dump_schema(_with_whitespace(schema, _INDENTED_WHITESPACE if indented else _COMPACT_WHITESPACE))}"


def with_usual_whitespace(grammar: Grammar) -> Grammar:
    """Requires the usual whitespace, so that the grammar forces more text."""
    flexible, usual = (_dump_schema(each)[1:-1] for each in (_COMPACT_WHITESPACE, _USUAL_WHITESPACE))
    return Grammar(grammar.kind, grammar.text.replace(flexible, usual))


def choice_grammar(choices: Sequence[str]) -> Grammar:
    return Grammar("lark", "start: " + " | ".join(map(json.dumps, choices)))


def _with_whitespace(schema: Any, whitespace: Mapping[str, Any]) -> Any:
    schema = {} if schema is True else schema
    if not isinstance(schema, dict):
        raise InvalidRequest("a JSON schema must be an object", param="grammar")
    options = schema.get("x-guidance")
    return {**schema, "x-guidance": {**(options if isinstance(options, dict) else {}), **whitespace}}


def _dump_schema(schema: Any) -> str:
    try:
        return json.dumps(schema)
    except RecursionError:
        raise InvalidRequest("the JSON schema is nested too deeply", param="grammar") from None


class GrammarVocabulary(msgspec.Struct, frozen=True):
    tokenizer_json: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]


def make_grammar_vocabulary(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> GrammarVocabulary:
    size = max(vocab_size, tokenizer.max_token_id + 1)
    return GrammarVocabulary(tokenizer.backend.to_str(), size, tuple(eos_token_ids))


@dataclass(eq=False, slots=True, weakref_slot=True)
class CompiledGrammar:
    """Matchers of a grammar share a lexer, with its states and errors."""

    _initial_matcher: LLMatcher
    max_lexer_states: int
    size_bytes: int
    """Approximate, because it is the growth of the C heap while compiling."""
    is_exclusive: bool = False

    def new_matcher(self) -> LLMatcher:
        return self._initial_matcher.deep_copy()


class GrammarCompiler:
    """The constructor raises ModelError if llguidance cannot read the tokenizer, and InvalidRequest if there is no EOS
    token.
    """

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        from llguidance import LLParserLimits, LLTokenizer

        if not vocabulary.eos_token_ids:
            raise InvalidRequest("this model has no end-of-sequence token, so no grammar can end an answer")
        self.vocab_size = vocabulary.vocab_size
        try:
            self._tokenizer = LLTokenizer(
                vocabulary.tokenizer_json, n_vocab=vocabulary.vocab_size, eos_token=list(vocabulary.eos_token_ids)
            )
        except ValueError as error:
            raise ModelError(f"grammars are not available with this model's tokenizer: {error}") from error
        self._limits = {
            states: LLParserLimits(max_lexer_states=states, verbose_errors=False)
            for states in (SMALL_LEXER_STATES, LARGE_LEXER_STATES)
        }
        self._cache: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._live_grammars: WeakSet[CompiledGrammar] = WeakSet()

    def new_matcher(self, grammar: Grammar) -> LLMatcher:
        """Raises get_compiled's errors."""
        return self.get_compiled(grammar).new_matcher()

    def get_compiled(self, grammar: Grammar) -> CompiledGrammar:
        """Raises InvalidRequest for an invalid or unsupported grammar, Overloaded if other grammars use all memory."""
        cached = self._cache.pop(grammar, None) or self._compile_and_evict_to_fit(grammar, SMALL_LEXER_STATES)
        self._cache_grammar(grammar, cached)
        return cached

    def recompile_with_large_lexer(
        self, grammar: Grammar, exhausted: CompiledGrammar, *, exclusive: bool
    ) -> CompiledGrammar:
        """Replaces `exhausted`, whose lexer is full. Raises InvalidRequest if it was exclusive, Overloaded for too many
        large lexers, and get_compiled's errors.
        """
        cached = self._cache.get(grammar)
        if cached is exhausted:
            del self._cache[grammar]
        elif cached is not None and cached.max_lexer_states == LARGE_LEXER_STATES and not exclusive:
            return cached
        if exhausted.is_exclusive:
            raise InvalidRequest(
                f"too complex: a single answer needs more than a lexer with {LARGE_LEXER_STATES} states"
            )
        self._make_room_for_large_lexer()
        compiled = self._compile_and_evict_to_fit(grammar, LARGE_LEXER_STATES, exclusive=exclusive)
        if not exclusive:
            self._cache_grammar(grammar, compiled)
        return compiled

    def _cache_grammar(self, grammar: Grammar, compiled: CompiledGrammar) -> None:
        self._cache[grammar] = compiled
        if len(self._cache) > _MAX_CACHED_GRAMMARS:
            self._cache.popitem(last=False)

    def _compile_and_evict_to_fit(
        self, grammar: Grammar, max_lexer_states: int, *, exclusive: bool = False
    ) -> CompiledGrammar:
        matcher, size = self._compile_matcher(grammar, max_lexer_states)
        # Limited, because other threads may have allocated memory meanwhile.
        compiled = CompiledGrammar(matcher, max_lexer_states, min(size, MAX_COMPILED_BYTES_PER_GRAMMAR), exclusive)
        self._live_grammars.add(compiled)
        for cached in list(self._cache):  # frees grammars that only the cache references
            if self._live_grammar_bytes <= MAX_COMPILED_BYTES:
                break
            del self._cache[cached]
        if self._live_grammar_bytes > MAX_COMPILED_BYTES:
            raise Overloaded("Other requests use grammars as large as this one. Please try again later")
        return compiled

    @property
    def _live_grammar_bytes(self) -> int:
        return sum(each.size_bytes for each in self._live_grammars)

    @property
    def _num_live_large_lexers(self) -> int:
        return sum(each.max_lexer_states == LARGE_LEXER_STATES for each in self._live_grammars)

    def _make_room_for_large_lexer(self) -> None:
        for grammar, states in [(each, compiled.max_lexer_states) for each, compiled in self._cache.items()]:
            if self._num_live_large_lexers < _MAX_LARGE_LEXERS:
                return
            if states == LARGE_LEXER_STATES:
                del self._cache[grammar]
        if self._num_live_large_lexers >= _MAX_LARGE_LEXERS:
            raise Overloaded(
                f"{_MAX_LARGE_LEXERS} requests use grammars as complex as this one. Please try again later"
            )

    def tokenize_bytes(self, text: bytes) -> list[int]:
        return self._tokenizer.tokenize_bytes(text)

    def bytes_of_token(self, token: int) -> bytes:
        return self._tokenizer.decode_bytes([token])

    def check_grammar(self, grammar: Grammar) -> None:
        """Callers must limit time and memory. Raises InvalidRequest if the grammar is invalid or unsupported."""
        import numpy as np

        matcher, size = self._compile_matcher(grammar, LARGE_LEXER_STATES)
        if size > MAX_COMPILED_BYTES_PER_GRAMMAR:
            taken, most = size >> 20, MAX_COMPILED_BYTES_PER_GRAMMAR >> 20
            raise InvalidRequest(f"too complex: it compiles to {taken} MiB, at most {most}", param="grammar")
        for _ in range(_CHECK_TOKENS):
            allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little").nonzero()[0]
            if matcher.is_error() or not len(allowed):
                raise InvalidRequest(f"no text matches, or too complex: {error_summary(matcher)}", param="grammar")
            if matcher.is_stopped():
                return
            check_forced_text_length(matcher)
            matcher.consume_token(int(allowed[-1]))

    def _compile_matcher(self, grammar: Grammar, max_lexer_states: int) -> tuple[LLMatcher, int]:
        """Returns the matcher, and its approximate size in bytes."""
        from llguidance import LLMatcher

        if len(grammar.text.encode()) > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(f"longer than {MAX_GRAMMAR_BYTES} bytes", param="grammar")
        before = heap_bytes()
        if grammar.kind == "json":
            source = LLMatcher.grammar_from_json_schema(grammar.text)
        elif grammar.kind == "regex":
            source = LLMatcher.grammar_from_regex(grammar.text)
        else:
            source = LLMatcher.grammar_from_lark(to_lark(grammar.text))
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits[max_lexer_states])
        if matcher.is_error():
            raise InvalidRequest(_explain_grammar_error(matcher.get_error()[:1000].strip()), param="grammar")
        size = max(heap_bytes() - before, _MIN_BYTES_PER_CHARACTER * len(grammar.text))
        return matcher, size


def _explain_grammar_error(message: str) -> str:
    """Rewords llguidance's messages about JSON schemas, also of those inside a Lark grammar, that name its own options
    or parts. Returns others unchanged.
    """
    if keys := re.search(r"Unimplemented keys: \[(.*)\]", message):
        return f"the JSON schema has keywords that cannot be enforced: {keys[1]}; leave them out"
    if "oneOf constraints are not supported" in message:
        return "the JSON schema has a oneOf whose alternatives may overlap, which cannot be enforced: use anyOf"
    if reference := re.search(r"Resource '(.*)' is not present in a registry", message):
        return f"the JSON schema refers to {reference[1]!r}, which is not fetched: copy it into $defs"
    return message


def to_lark(text: str) -> str:
    """Converts llama.cpp's GBNF, which vLLM's users write; returns Lark unchanged. Raises InvalidRequest."""
    from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

    if "::=" not in text or is_lark_syntax(text):
        return text
    try:
        return gbnf_to_lark(_LONG_ESCAPE.sub(_unescape_gbnf, text))
    except Exception as error:
        raise InvalidRequest(f"neither a Lark nor a GBNF grammar: {error}"[:1000], param="grammar") from None


def _unescape_gbnf(escape: re.Match[str]) -> str:
    """llguidance's converter accepts only two-digit escapes."""
    code = int(escape[1] or escape[2] or "0", 16)
    if not (escape[1] or escape[2]) or code > 0x10FFFF or 0xD800 <= code < 0xE000:
        return escape[0]
    return chr(code) if code >= 0x80 else f"\\x{code:02x}"


def check_forced_text_length(matcher: LLMatcher) -> None:
    """Raise InvalidRequest if the grammar forces more than MAX_FORCED_BYTES."""
    if (size := len(matcher.compute_ff_bytes())) > MAX_FORCED_BYTES:
        message = f"forces {size} bytes of text, at most {MAX_FORCED_BYTES}"
        raise InvalidRequest(message, param="grammar")


def has_lexer_error(matcher: LLMatcher) -> bool:
    return matcher.is_error() and matcher.get_error().startswith("lexer error")


def error_summary(matcher: LLMatcher) -> str:
    return matcher.get_error().partition("\n")[0][:300]
