from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.engine.common.errors import QuireError
from quire.engine.core.drafter import (
    KIND_FORCED,
    KIND_FORCED_TEXT,
    Draft,
    Drafter,
    RequestsToDraft,
    draft_acceptance_kinds,
    request_grammar,
)
from quire.engine.core.request import Request
from quire.engine.text.grammar_compiler import MAX_FORCED_BYTES, GrammarCompiler, with_usual_whitespace

if TYPE_CHECKING:
    from llguidance import LLMatcher


_MAX_FORCED_TEXT_BYTES = 256


@dataclass(slots=True)
class _GrammarState:
    matcher: LLMatcher | None
    """None if the grammar's matcher cannot follow the answer."""
    num_consumed: int = 0
    forced_run: list[int] = field(default_factory=list)
    """Tokens that the grammar forces next; there may be thousands."""
    num_matched: int = 0
    num_from_source: int = 0

    def consume_answer(self, answer: list[int], compiler: Callable[[], GrammarCompiler]) -> None:
        self.num_consumed += len(answer)
        for token in answer:
            if self.forced_run[self.num_matched : self.num_matched + 1] == [token]:
                self.num_matched += 1
            else:
                self.forced_run, self.num_matched = [], 0
            if self.matcher is not None and not _consume_token(self.matcher, token, compiler):
                self.matcher = None
        if self.matcher is not None and len(self.matcher.compute_ff_bytes()) > MAX_FORCED_BYTES:
            self.matcher = None

    def next_forced_tokens(self, max_tokens: int) -> list[int]:
        if self.num_matched == len(self.forced_run) and self.matcher is not None:
            self.forced_run, self.num_matched = self.matcher.compute_ff_tokens(), 0
        return self.forced_run[self.num_matched : self.num_matched + max_tokens]


class GrammarDrafter(Drafter):
    """Cuts another drafter's drafts where the grammar forbids them, and adds tokens that the grammar forces. Assumes a
    space after JSON's commas and colons.
    """

    def __init__(self, drafter: Drafter, compiler: Callable[[], GrammarCompiler]) -> None:
        self.needs_grammar = drafter.needs_grammar
        self._drafter = drafter
        self._compiler = compiler
        self._states: dict[str, _GrammarState] = {}

    def propose(self, draft_requests: RequestsToDraft, num_step_tokens: int) -> list[Draft]:
        drafts = self._drafter.propose(draft_requests, num_step_tokens)
        return [
            self._add_forced_tokens(request, draft, max_drafts)
            for (request, max_drafts), draft in zip(draft_requests, drafts, strict=True)
        ]

    def record_acceptance(self, request: Request, drafts: int, accepted: int) -> None:
        state = self._states.get(request.engine_request.id)
        if state is not None and state.matcher is not None:
            drafts = min(drafts, state.num_from_source)
        if drafts:
            self._drafter.record_acceptance(request, drafts, min(accepted, drafts))

    def forget_request(self, request: Request) -> None:
        self._states.pop(request.engine_request.id, None)
        self._drafter.forget_request(request)

    def _add_forced_tokens(self, request: Request, draft: Draft, max_drafts: int) -> Draft:
        state = self._advance_grammar(request)
        if state is None or state.matcher is None:
            return draft
        completed_draft = merge_draft_with_forced_tokens(
            state.matcher, state.next_forced_tokens(max_drafts), draft, max_drafts, self._compiler()
        )
        state.num_from_source = 0
        while (
            draft.token_ids[state.num_from_source : state.num_from_source + 1]
            == completed_draft.token_ids[state.num_from_source :][:1]
            != []
        ):
            state.num_from_source += 1
        return completed_draft

    def _advance_grammar(self, request: Request) -> _GrammarState | None:
        if (grammar := request_grammar(request.engine_request)) is None:
            return None
        if (state := self._states.get(request.engine_request.id)) is None:
            try:
                state = _GrammarState(self._compiler().new_matcher(with_usual_whitespace(grammar)))
            except QuireError:  # the answer itself reports the error
                state = _GrammarState(None)
            self._states[request.engine_request.id] = state
        state.consume_answer(request.token_ids[request.num_prompt_tokens + state.num_consumed :], self._compiler)
        return state


def merge_draft_with_forced_tokens(
    matcher: LLMatcher, forced_tokens: list[int], draft: Draft, max_drafts: int, compiler: GrammarCompiler
) -> Draft:
    """Join forced tokens, then allowed draft tokens, then tokens that are forced after those."""
    lookahead = matcher.deep_copy()
    token_ids = list[int]()
    kinds = list[int]()
    draft_kinds = draft_acceptance_kinds(draft)
    next_tokens, kind = forced_tokens, KIND_FORCED
    while len(token_ids) < max_drafts and not lookahead.is_stopped():
        if not next_tokens:
            next_tokens, kind = lookahead.compute_ff_tokens()[: max_drafts - len(token_ids)], KIND_FORCED
        if not next_tokens:
            next_tokens, kind = (
                _valid_forced_text_tokens(lookahead, compiler)[: max_drafts - len(token_ids)],
                KIND_FORCED_TEXT,
            )
        if next_tokens:
            added = [kind] * len(next_tokens)
        else:
            next_tokens = _valid_continuation(lookahead, token_ids, draft.token_ids[:max_drafts])
            added = draft_kinds[len(token_ids) : len(token_ids) + len(next_tokens)]
        if not next_tokens or not lookahead.consume_tokens(next_tokens):
            break
        token_ids = token_ids + next_tokens
        kinds = kinds + added
        next_tokens = []
    return Draft(token_ids, kinds)


def _valid_forced_text_tokens(matcher: LLMatcher, compiler: GrammarCompiler) -> list[int]:
    """The tokens are not certain, because a longer token may extend beyond the forced text."""
    text = matcher.compute_ff_bytes()[:_MAX_FORCED_TEXT_BYTES]
    tokens = compiler.tokenize_bytes(text) if text else []
    return tokens[: matcher.validate_tokens(tokens)] if tokens else []


def _valid_continuation(matcher: LLMatcher, token_ids: list[int], draft_tokens: list[int]) -> list[int]:
    rest = draft_tokens[len(token_ids) :] if draft_tokens[: len(token_ids)] == token_ids else []
    return rest[: matcher.validate_tokens(rest)] if rest else []


def _consume_token(matcher: LLMatcher, token: int, compiler: Callable[[], GrammarCompiler]) -> bool:
    """The token may lack spaces that the grammar forces. If it is not allowed, the matcher becomes unusable."""
    if matcher.try_consume_tokens([token]):
        return True
    for byte in compiler().bytes_of_token(token):
        tokens = compiler().tokenize_bytes(bytes([byte]))
        if not matcher.validate_tokens(tokens):
            if not matcher.compute_ff_bytes().startswith(b" "):
                return False
            tokens = [*compiler().tokenize_bytes(b" "), *tokens]
        if not matcher.consume_tokens(tokens):
            return False
    return True
