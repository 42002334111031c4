"""Which tokens a grammar allows next: one matcher per slot, and its mask on the logits."""

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
"""How often an answer's lexer is replaced by one that others fill, too. Each time the grammar is compiled."""


@dataclass(frozen=True, slots=True)
class GrammarBitmask:
    """The tokens allowed in some rows of a step's logits; all other rows are free."""

    rows: list[int]
    bitmask_words: np.ndarray
    """[len(rows), words] int32: bit i of word w says whether token 32 w + i is allowed."""


@dataclass(slots=True)
class _SlotGrammar:
    """How far a grammar has followed an answer."""

    grammar: Grammar
    compiled: CompiledGrammar
    matcher: LLMatcher
    tokens: list[int] = field(default_factory=list)
    """Those of the answer that it has followed: with another lexer it begins again."""
    num_restarts: int = 0
    """How often it has begun again."""

    def consume_token(self, token: int) -> bool:
        """Whether the token was allowed, which a worn-out lexer cannot tell."""
        if self.matcher.consume_token(token):
            self.tokens.append(token)
            return True
        return False

    def restart_with_new_lexer(self, compiler: GrammarCompiler) -> None:
        """Follow the same tokens with another lexer. Raises what GrammarCompiler.recompile_with_large_lexer does."""
        while has_lexer_error(self.matcher):
            self.compiled = compiler.recompile_with_large_lexer(
                self.grammar, self.compiled, exclusive=self.num_restarts >= _MAX_SHARED_LEXERS
            )
            self.num_restarts += 1
            self.matcher = self.compiled.new_matcher()
            all(self.matcher.consume_token(token) for token in self.tokens)


class SlotGrammars:
    """The matcher of every slot whose request has a grammar. `load` is called once: for the first grammar, or by
    `start_loading_compiler`."""

    def __init__(self, make_compiler: Callable[[], GrammarCompiler]) -> None:
        self._make_compiler = make_compiler
        self._loading: Future[GrammarCompiler] | None = None
        self._executor: LLExecutor | None = None
        self._requests: dict[int, NewRequestData] = {}
        self._states: dict[int, _SlotGrammar] = {}
        self._failures: dict[int, RequestFailure] = {}

    def start_loading_compiler(self) -> Future[GrammarCompiler]:
        """Load the compiler in a thread: for a vocabulary of 150,000 tokens it takes a second, in which a running
        stream would stand still."""
        if self._loading is None:
            pool = ThreadPoolExecutor(1, "grammars")
            self._loading = pool.submit(self._make_compiler)
            pool.shutdown(wait=False)
        return self._loading

    def admit_request(self, new_request: NewRequestData) -> None:
        """Give a slot to a new owner, whose matcher starts after the tokens generated so far."""
        slot, params = new_request.slot, new_request.params
        grammar = params.grammar if isinstance(params, SamplingParams) else None
        self.release_slot(slot)
        self._requests[slot] = new_request
        if grammar is None:
            return
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
        """Nobody has the slot any more: forget the owner's matcher, whose lexer may be large."""
        for each in (self._requests, self._states, self._failures):
            each.pop(slot, None)

    def fill_bitmask(self, rows_to_sample: Sequence[ScheduledRequest]) -> GrammarBitmask | None:
        """For the picks of a step, of each its row; those of a row with drafts stand side by side, each after one draft
        more. None where all are free."""
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
        """The masks after each of the drafts, behind the first; all of them once more with another lexer where this one
        has an error. Raises InvalidRequest where nothing is allowed, and what
        GrammarCompiler.recompile_with_large_lexer does."""
        from llguidance.numpy import fill_next_token_bitmask

        while has_lexer_error(state.matcher) or not _try_fill_draft_masks(state.matcher, drafts, words):
            state.restart_with_new_lexer(self.start_loading_compiler().result())
            fill_next_token_bitmask(state.matcher, words, 0)
        if state.matcher.is_error() or not words[0].any():
            raise InvalidRequest(error_summary(state.matcher))

    def advance_and_get_failure(
        self, slot: int, new_request: NewRequestData, token_ids: list[int]
    ) -> RequestFailure | None:
        """Advance the matcher by tokens that were picked for `new_request`. Returns why its grammar cannot be followed,
        if it cannot. Does nothing where the slot belongs to another owner by now."""
        if self._requests.get(slot) is not new_request:
            return None
        self._advance_matcher(slot, token_ids)
        return self._failures.get(slot)

    def _advance_matcher(self, slot: int, token_ids: list[int]) -> None:
        """What follows the end of the answer is ignored, as the scheduler does: accepted drafts may go on there."""
        state = self._states.get(slot)
        # One by one, as advance_and_get_failure refuses an end-of-sequence token that consume_token accepts.
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
            self._failures[slot] = RequestFailure(f"the grammar could not be followed: {error.message}", "grammar")
        del self._states[slot]


def _try_fill_draft_masks(matcher: LLMatcher, drafts: Sequence[int], words: np.ndarray) -> bool:
    """The masks after each of the drafts, behind the one of the first pick: [1 + drafts, words]. After one that is not
    allowed all is: it will not be picked, so what is picked after it will be dropped. Returns whether the lexer could
    tell all of it."""
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
        if (
            matcher_copy.is_error() or matcher_copy.is_stopped()
        ):  # where nothing but the end may follow, it has stopped already
            break
    return not has_lexer_error(matcher_copy)
