"""Writes and compiles grammars that constrain answers, with llguidance (https://github.com/guidance-ai/llguidance).

A hostile grammar can crash the process that compiles it (a chain of 3,000 references overflows the native stack) or
keep it busy for hours (`multipleOf: 99999999`), so callers' grammars are checked in a worker process of the server's
before an engine gets them. llguidance is imported when the first grammar arrives, because the import takes a fifth of a
second.
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
"""Processor time that a check may take. The engine later does the same work, and computes nothing else meanwhile."""
MAX_CHECK_MEMORY_BYTES = 1 << 30
"""Bytes of memory that a check may use."""
SMALL_LEXER_STATES, LARGE_LEXER_STATES = 4096, 50_000
"""Limits of a lexer, which makes its states as it meets text, and keeps them: half a KB each. A schema of 30 fields
needs 800, 2,000 characters of any kind as many, `\\p{L}{1,300}` 7,000."""
_MAX_LARGE_LEXERS = 16
"""Lexers with more than SMALL_LEXER_STATES at a time: 330 MB where all are full."""
MAX_COMPILED_BYTES = 1 << 30
"""Of all grammars that answers follow or the cache has, as they are compiled: 0.15 MB for a schema of five fields, 10
for one of 130 KB, 15 for ten numbers with large `multipleOf`. Lexers grow beside that."""
MAX_COMPILED_BYTES_PER_GRAMMAR = 128 << 20
_MIN_BYTES_PER_CHARACTER = 16
"""A compiled grammar is taken for at least so many times its text, where nobody says how large it is."""
MAX_FORCED_BYTES = 16 * 1024
"""Text about which a grammar may leave no choice at a time. Half a KB is kept for each byte of it, and it is divided
into tokens again with each token: a text of 256 KB would cost each answer 130 MB, and 0.1 s a token."""
CHECK_STACK_BYTES = 4 << 20
"""Half of the engine's stack, so a grammar that passes the check does not overflow the engine's."""
_LONG_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(?s:.))")
_MAX_CACHED_GRAMMARS = 32
_CHECK_TOKENS = 3
"""Tokens that a check advances the matcher by."""
_COMPACT_WHITESPACE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""At most one space after a comma or a colon and no other whitespace: JSON as models write it on one line. With free
whitespace a model could write spaces for ever."""
_USUAL_WHITESPACE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The same as nearly all models write it."""
_INDENTED_WHITESPACE = {"whitespace_pattern": "[ \\n]{0,80}"}


def json_grammar(schema: Any) -> Grammar:
    """The grammar of a JSON schema, an object or true. Raises InvalidRequest for anything else."""
    return Grammar("json", _dump_schema(_with_whitespace(schema, _COMPACT_WHITESPACE)))


def lark_json_rule(schema: Any, *, indented: bool = False) -> str:
    """A JSON schema as the body of a Lark grammar's rule: `%json {…}`, with the same whitespace as `json_grammar`, or
    for JSON that is `indented` with line breaks too."""
    return f"%json {_dump_schema(_with_whitespace(schema, _INDENTED_WHITESPACE if indented else _COMPACT_WHITESPACE))}"


def with_usual_whitespace(grammar: Grammar) -> Grammar:
    """The grammar with what JSON it has in the whitespace that models usually write: more of it is forced."""
    flexible, usual = (_dump_schema(each)[1:-1] for each in (_COMPACT_WHITESPACE, _USUAL_WHITESPACE))
    return Grammar(grammar.kind, grammar.text.replace(flexible, usual))


def choice_grammar(choices: Sequence[str]) -> Grammar:
    """The grammar that matches exactly one of these texts."""
    return Grammar("lark", "start: " + " | ".join(map(json.dumps, choices)))


def _with_whitespace(schema: Any, whitespace: Mapping[str, Any]) -> Any:
    schema = {} if schema is True else schema
    if not isinstance(schema, dict):
        raise InvalidRequest("a JSON schema must be an object", param="grammar")
    options = schema.get("x-guidance")  # llguidance reads its options from this key
    return {**schema, "x-guidance": {**(options if isinstance(options, dict) else {}), **whitespace}}


def _dump_schema(schema: Any) -> str:
    try:
        return json.dumps(schema)
    except RecursionError:
        raise InvalidRequest("the JSON schema is nested too deeply", param="grammar") from None


class GrammarVocabulary(msgspec.Struct, frozen=True):
    """What llguidance needs to know about a model's tokens."""

    tokenizer_json: str
    """The content of a tokenizer.json."""
    vocab_size: int
    """Number of token ids."""
    eos_token_ids: tuple[int, ...]


def make_grammar_vocabulary(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> GrammarVocabulary:
    """The tokenizer's vocabulary. vocab_size: the model's, which may be larger or smaller than the tokenizer's."""
    size = max(vocab_size, tokenizer.max_token_id + 1)
    return GrammarVocabulary(tokenizer.backend.to_str(), size, tuple(eos_token_ids))


@dataclass(eq=False, slots=True, weakref_slot=True)
class CompiledGrammar:
    """A compiled grammar. Its matchers share one lexer, with all states that any of them has made; where the lexer has
    an error, they all have it."""

    _initial_matcher: LLMatcher
    max_lexer_states: int
    """Limit of its lexer."""
    size_bytes: int
    """Bytes that it took to compile, about."""
    is_exclusive: bool = False
    """Whether it is one answer's."""

    def new_matcher(self) -> LLMatcher:
        """A new one, at the beginning."""
        return self._initial_matcher.deep_copy()


class GrammarCompiler:
    """Compiles grammars to matchers: parsers that know which tokens may follow.

    Raises ModelError for a tokenizer that llguidance cannot read, and InvalidRequest for a model without an
    end-of-sequence token.
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
        """The grammars compiled last, the least recently used one first."""
        self._live_grammars: WeakSet[CompiledGrammar] = WeakSet()
        """Those that somebody uses or the cache has."""

    def new_matcher(self, grammar: Grammar) -> LLMatcher:
        """A new matcher for the grammar. Raises InvalidRequest for a grammar that is wrong or not supported."""
        return self.get_compiled(grammar).new_matcher()

    def get_compiled(self, grammar: Grammar) -> CompiledGrammar:
        """The grammar for a new answer. Raises InvalidRequest as `new_matcher`, and Overloaded where the others take
        all memory that is set aside for them."""
        cached = self._cache.pop(grammar, None) or self._compile_and_evict_to_fit(grammar, SMALL_LEXER_STATES)
        self._cache_grammar(grammar, cached)
        return cached

    def recompile_with_large_lexer(
        self, grammar: Grammar, exhausted: CompiledGrammar, *, exclusive: bool
    ) -> CompiledGrammar:
        """The grammar for an answer that cannot be followed with `exhausted` any more, as its lexer has an error: with
        a large lexer, `exclusive`: of its own. Nobody else is given `exhausted` again.

        Raises InvalidRequest where the answer had a lexer of its own, and Overloaded where too many are large, and as
        `get_compiled`.
        """
        cached = self._cache.get(grammar)
        if cached is exhausted:
            del self._cache[grammar]
        elif (
            cached is not None and cached.max_lexer_states == LARGE_LEXER_STATES and not exclusive
        ):  # another answer was here before
            return cached
        if exhausted.is_exclusive:
            raise InvalidRequest(
                f"too complex: this answer alone needs more than a lexer of {LARGE_LEXER_STATES} states"
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
        # At most what `check_grammar` lets through: what another thread took meanwhile is not this grammar's.
        compiled = CompiledGrammar(matcher, max_lexer_states, min(size, MAX_COMPILED_BYTES_PER_GRAMMAR), exclusive)
        self._live_grammars.add(compiled)
        for cached in list(self._cache):  # one that the cache alone has ends with its place there
            if self._live_grammar_bytes <= MAX_COMPILED_BYTES:
                break
            del self._cache[cached]
        if self._live_grammar_bytes > MAX_COMPILED_BYTES:
            raise Overloaded("Other answers follow grammars as large as this one. Please try again later")
        return compiled

    @property
    def _live_grammar_bytes(self) -> int:
        return sum(each.size_bytes for each in self._live_grammars)

    @property
    def _num_live_large_lexers(self) -> int:
        return sum(each.max_lexer_states == LARGE_LEXER_STATES for each in self._live_grammars)

    def _make_room_for_large_lexer(self) -> None:
        """For a large lexer. One that the cache alone has ends with its place there."""
        for grammar, states in [(each, compiled.max_lexer_states) for each, compiled in self._cache.items()]:
            if self._num_live_large_lexers < _MAX_LARGE_LEXERS:
                return
            if states == LARGE_LEXER_STATES:
                del self._cache[grammar]
        if self._num_live_large_lexers >= _MAX_LARGE_LEXERS:
            raise Overloaded(
                f"{_MAX_LARGE_LEXERS} answers follow grammars as complex as this one. Please try again later"
            )

    def tokenize_bytes(self, text: bytes) -> list[int]:
        """The text as tokens, none of them special."""
        return self._tokenizer.tokenize_bytes(text)

    def bytes_of_token(self, token: int) -> bytes:
        """The token's text."""
        return self._tokenizer.decode_bytes([token])

    def check_grammar(self, grammar: Grammar) -> None:
        """Compile the grammar and follow it for a few tokens.

        Raises InvalidRequest as `new_matcher` does, and for a grammar that no text matches. A hostile grammar can crash
        the process or compute for ever; the caller sees to the limits above."""
        import numpy as np

        matcher, size = self._compile_matcher(grammar, LARGE_LEXER_STATES)
        if size > MAX_COMPILED_BYTES_PER_GRAMMAR:
            taken, most = size >> 20, MAX_COMPILED_BYTES_PER_GRAMMAR >> 20
            raise InvalidRequest(f"too complex: compiled it takes {taken} MiB, at most {most}", param="grammar")
        for _ in range(_CHECK_TOKENS):
            allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little").nonzero()[0]
            if matcher.is_error() or not len(allowed):
                raise InvalidRequest(f"no text matches, or too complex: {error_summary(matcher)}", param="grammar")
            if matcher.is_stopped():
                return
            check_forced_text_length(matcher)
            matcher.consume_token(int(allowed[-1]))

    def _compile_matcher(self, grammar: Grammar, max_lexer_states: int) -> tuple[LLMatcher, int]:
        """A matcher, and the bytes that it takes, about."""
        from llguidance import LLMatcher

        if len(grammar.text.encode()) > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(f"longer than {MAX_GRAMMAR_BYTES} bytes", param="grammar")
        before = heap_bytes()
        if grammar.kind == "json":
            source = LLMatcher.grammar_from_json_schema(grammar.text)
        elif grammar.kind == "regex":
            source = LLMatcher.grammar_from_regex(grammar.text)
        else:
            source = LLMatcher.grammar_from_lark(_to_lark(grammar.text))
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits[max_lexer_states])
        if matcher.is_error():
            raise InvalidRequest(matcher.get_error()[:1000].strip(), param="grammar")
        size = max(heap_bytes() - before, _MIN_BYTES_PER_CHARACTER * len(grammar.text))
        return matcher, size


def _to_lark(text: str) -> str:
    """The grammar in Lark's notation, also of one in llama.cpp's (GBNF), which vLLM's users write."""
    from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

    if "::=" not in text or is_lark_syntax(text):
        return text
    try:
        return gbnf_to_lark(_LONG_ESCAPE.sub(_unescape_gbnf, text))
    except Exception as error:  # it raises errors of its own, and others for what it did not foresee
        raise InvalidRequest(f"not a grammar of Lark's kind nor of GBNF's: {error}"[:1000], param="grammar") from None


def _unescape_gbnf(escape: re.Match[str]) -> str:
    """What an escape of GBNF's stands for: the translation knows those of two digits alone."""
    code = int(escape[1] or escape[2] or "0", 16)
    if not (escape[1] or escape[2]) or code > 0x10FFFF or 0xD800 <= code < 0xE000:
        return escape[0]
    return chr(code) if code >= 0x80 else f"\\x{code:02x}"


def check_forced_text_length(matcher: LLMatcher) -> None:
    """Raises InvalidRequest where more text than MAX_FORCED_BYTES must come next."""
    if (size := len(matcher.compute_ff_bytes())) > MAX_FORCED_BYTES:
        message = f"leaves no choice about {size} bytes of text, at most {MAX_FORCED_BYTES}"
        raise InvalidRequest(message, param="grammar")


def has_lexer_error(matcher: LLMatcher) -> bool:
    """Whether its lexer has an error, such as too many states: with another lexer the grammar may go on."""
    return matcher.is_error() and matcher.get_error().startswith("lexer error")


def error_summary(matcher: LLMatcher) -> str:
    """The first line of a matcher's error; llguidance adds the parser's state below it."""
    return matcher.get_error().partition("\n")[0][:300]
