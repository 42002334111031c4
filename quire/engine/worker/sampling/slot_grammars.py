from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from quire.engine.common.errors import InvalidRequest, Overloaded, QuireError
from quire.engine.common.request_params import Grammar, SamplingParams
from quire.engine.common.scheduler_output import NewRequestData, RequestFailure, ScheduledRequest
from quire.engine.text.grammar_compiler import (
    CompiledGrammar,
    GrammarCompiler,
    check_forced_text_length,
    error_summary,
    has_lexer_error,
)

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher


_MAX_SHARED_LEXERS = 3
"""If more lexers of a request fail, the grammar is compiled anew for each replacement, which other requests do not
share.
"""


@dataclass(frozen=True, slots=True)
class GrammarBitmask:
    rows: list[int]
    bitmask_words: np.ndarray
    """[len(rows), words] int32: bit i of word w allows token 32 w + i."""


@dataclass(slots=True)
class _SlotGrammar:
    grammar: Grammar
    compiled: CompiledGrammar
    matcher: LLMatcher
    tokens: list[int] = field(default_factory=list)
    num_restarts: int = 0

    def consume_token(self, token: int) -> bool:
        if self.matcher.consume_token(token):
            self.tokens.append(token)
            return True
        return False

    def restart_with_new_lexer(self, compiler: GrammarCompiler) -> None:
        """Raises the errors of GrammarCompiler.recompile_with_large_lexer."""
        while has_lexer_error(self.matcher):
            self.compiled = compiler.recompile_with_large_lexer(
                self.grammar, self.compiled, exclusive=self.num_restarts >= _MAX_SHARED_LEXERS
            )
            self.num_restarts += 1
            self.matcher = self.compiled.new_matcher()
            all(self.matcher.consume_token(token) for token in self.tokens)


class SlotGrammars:
    def __init__(self, make_compiler: Callable[[], GrammarCompiler]) -> None:
        self._make_compiler = make_compiler
        self._loading: Future[GrammarCompiler] | None = None
        self._executor: LLExecutor | None = None
        self.requests: dict[int, NewRequestData] = {}
        """Requests with a grammar, by slot. If there are none, no method needs to be called."""
        self._states: dict[int, _SlotGrammar] = {}
        self._failures: dict[int, RequestFailure] = {}
        self._slots_with_unread_token: set[int] = set()
        """Slots whose last sampled token the host has not read yet."""

    def start_loading_compiler(self) -> Future[GrammarCompiler]:
        """Loads in a thread, because loading takes a second for 32,000 tokens and would stall streams."""
        if self._loading is None:
            pool = ThreadPoolExecutor(1, "grammars")
            self._loading = pool.submit(self._make_compiler)
            pool.shutdown(wait=False)
        return self._loading

    def admit_request(self, new_request: NewRequestData) -> None:
        """Start the matcher after the tokens generated so far."""
        slot, params = new_request.slot, new_request.params
        grammar = params.grammar if isinstance(params, SamplingParams) else None
        self.release_slot(slot)
        if grammar is None:
            return
        self.requests[slot] = new_request
        try:
            compiled = self.start_loading_compiler().result().get_compiled(grammar)
            state = _SlotGrammar(grammar, compiled, compiled.new_matcher())
            check_forced_text_length(state.matcher)
        except QuireError as error:
            self._failures[slot] = RequestFailure(error.message, "busy" if isinstance(error, Overloaded) else "engine")
        else:
            self._states[slot] = state
            self._advance_matcher(slot, new_request.token_ids[new_request.num_prompt_tokens :])

    def release_slot(self, slot: int) -> None:
        """Frees memory, because a matcher's lexer may be large."""
        for each in (self.requests, self._states, self._failures):
            each.pop(slot, None)
        self._slots_with_unread_token.discard(slot)

    def lacks_tokens(self, rows_to_sample: Sequence[ScheduledRequest]) -> bool:
        """True if the host must read a token before `fill_bitmask` can tell what these rows allow."""
        return not self._slots_with_unread_token.isdisjoint(row.slot for row in rows_to_sample)

    def mark_sampled(self, rows: Sequence[ScheduledRequest]) -> None:
        """The host has not read the token that these rows sampled. `advance_and_get_failure` ends this."""
        self._slots_with_unread_token.update(row.slot for row in rows if row.slot in self.requests)

    def fill_bitmask(self, rows_to_sample: Sequence[ScheduledRequest]) -> GrammarBitmask | None:
        """In `rows_to_sample`, a row with draft tokens occurs once for each of its positions, in adjacent items."""
        constrained = [index for index, row in enumerate(rows_to_sample) if row.slot in self._states]
        if not constrained:
            return None
        from llguidance import LLExecutor
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

        self._executor = self._executor or LLExecutor()
        words = allocate_token_bitmask(len(constrained), self.start_loading_compiler().result().vocab_size)
        firsts = [
            at
            for at, index in enumerate(constrained)
            if not at or rows_to_sample[constrained[at - 1]] is not rows_to_sample[index]
        ]
        rows = [rows_to_sample[constrained[at]] for at in firsts]
        matchers = [self._states[row.slot].matcher for row in rows]
        fill_next_token_bitmask_par(self._executor, list(zip(matchers, firsts, strict=True)), words)
        for at, row in zip(firsts, rows, strict=True):
            row_words = words[at : at + 1 + len(row.draft_token_ids)]
            try:
                self._fill_draft_masks(self._states[row.slot], row.draft_token_ids, row_words)
            except QuireError as error:
                self._record_failure(row.slot, error)
                row_words[:] = -1
        return GrammarBitmask(constrained, words)

    def _fill_draft_masks(self, state: _SlotGrammar, drafts: Sequence[int], words: np.ndarray) -> None:
        """Retries with a new lexer if a lexer fails. Raises InvalidRequest if no token is allowed, and the errors of
        GrammarCompiler.recompile_with_large_lexer.
        """
        from llguidance.numpy import fill_next_token_bitmask

        while has_lexer_error(state.matcher) or not _try_fill_draft_masks(state.matcher, drafts, words):
            state.restart_with_new_lexer(self.start_loading_compiler().result())
            fill_next_token_bitmask(state.matcher, words, 0)
        if state.matcher.is_error() or not words[0].any():
            raise InvalidRequest(error_summary(state.matcher))

    def advance_and_get_failure(
        self, slot: int, new_request: NewRequestData, token_ids: list[int]
    ) -> RequestFailure | None:
        """Does nothing if the slot has another request by now, or if the request has no grammar."""
        if self.requests.get(slot) is not new_request:
            return None
        self._slots_with_unread_token.discard(slot)
        self._advance_matcher(slot, token_ids)
        return self._failures.get(slot)

    def _advance_matcher(self, slot: int, token_ids: list[int]) -> None:
        """Ignores tokens after the end of the answer, because accepted draft tokens may go beyond it."""
        state = self._states.get(slot)
        # Consume tokens one by one, because consume_tokens refuses the end-of-sequence token, which consume_token
        # accepts.
        for token in token_ids:
            if state is None or state.matcher.is_stopped():
                return
            try:
                while not state.consume_token(token):
                    if not has_lexer_error(state.matcher):
                        raise InvalidRequest(error_summary(state.matcher))
                    state.restart_with_new_lexer(self.start_loading_compiler().result())
                check_forced_text_length(state.matcher)
            except QuireError as error:
                return self._record_failure(slot, error)

    def _record_failure(self, slot: int, error: QuireError) -> None:
        if isinstance(error, Overloaded):
            self._failures[slot] = RequestFailure(error.message, "busy")
        else:
            self._failures[slot] = RequestFailure(f"the grammar could not be applied: {error.message}", "grammar")
        del self._states[slot]


def _try_fill_draft_masks(matcher: LLMatcher, drafts: Sequence[int], words: np.ndarray) -> bool:
    """Fill `words` [1 + drafts, words] from row 1 on. Return False on a lexer error. After a disallowed draft token,
    everything is allowed, because later tokens are dropped.
    """
    from llguidance.numpy import fill_next_token_bitmask

    words[1:] = -1
    if not drafts:
        return True
    matcher_copy = matcher.deep_copy()
    for place, draft in enumerate(drafts):
        allowed = words[place, draft >> 5] >> (draft & 31) & 1
        if not allowed or not matcher_copy.consume_token(draft):
            break
        fill_next_token_bitmask(matcher_copy, words, place + 1)
        if matcher_copy.is_error() or not words[place + 1].any():
            words[place + 1] = -1
        if matcher_copy.is_error() or matcher_copy.is_stopped():  # the matcher stops once only the end may follow
            break
    return not has_lexer_error(matcher_copy)
