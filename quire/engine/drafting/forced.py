"""Drafts of what a grammar leaves no choice about: the keys of a JSON schema, the marks of a tool call. No model is
needed, and another drafter's guesses are cut off where the grammar forbids them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.engine.core.drafter import FORCED, FORCED_TEXT, Draft, Drafter, DraftRequests, grammar_of, kinds_of
from quire.engine.core.request import Request
from quire.engine.errors import QuireError
from quire.engine.text.grammar import MAX_FORCED_BYTES, GrammarCompiler, usual_form
from quire.engine.types import EngineCoreRequest

if TYPE_CHECKING:
    from llguidance import LLMatcher


_LONGEST_TEXT = 256
"""Bytes of forced text that are divided into tokens in one step."""


@dataclass(slots=True)
class _Following:
    """How far a grammar has followed an answer."""

    matcher: LLMatcher | None
    """None: it cannot follow it any more, or never could."""
    done: int = 0
    """Tokens of the answer that it has followed."""
    run: list[int] = field(default_factory=list)
    """Tokens that are forced, computed once: there may be thousands,"""
    passed: int = 0
    """of which the answer has so many already."""
    taken: int = 0
    """How many of the other drafter's tokens the guess under way begins with."""

    def follow(self, answer: list[int], compiler: Callable[[], GrammarCompiler]) -> None:
        """Take in more tokens of the answer."""
        self.done += len(answer)
        for token in answer:
            if self.run[self.passed : self.passed + 1] == [token]:
                self.passed += 1
            else:
                self.run, self.passed = [], 0
            if self.matcher is not None and not _consumed(self.matcher, token, compiler):
                self.matcher = None
        if self.matcher is not None and len(self.matcher.compute_ff_bytes()) > MAX_FORCED_BYTES:
            self.matcher = None

    def forced(self, most: int) -> list[int]:
        """Up to so many tokens that must come now."""
        if self.passed == len(self.run) and self.matcher is not None:
            self.run, self.passed = self.matcher.compute_ff_tokens(), 0
        return self.run[self.passed : self.passed + most]


class ForcedTokens(Drafter):
    """Adds to another drafter's guesses. JSON is guessed in its usual form, with one space after a comma or a colon,
    though the answer may lack some."""

    def __init__(self, drafter: Drafter, compiler: Callable[[], GrammarCompiler]) -> None:
        self._drafter = drafter
        self._compiler = compiler
        self._following: dict[str, _Following] = {}
        """By request id, of requests with a grammar."""

    def can_draft(self, request: EngineCoreRequest) -> bool:
        return grammar_of(request) is not None or self._drafter.can_draft(request)

    def propose(self, asked: DraftRequests, tokens: int) -> list[Draft]:
        guesses = self._drafter.propose(asked, tokens)
        return [self._with_forced(request, guess, most) for (request, most), guess in zip(asked, guesses, strict=True)]

    def record_acceptance(self, request: Request, drafts: int, accepted: int) -> None:
        following = self._following.get(request.engine_request.id)
        if following is not None and following.matcher is not None:
            drafts = min(drafts, following.taken)
        if drafts:
            self._drafter.record_acceptance(request, drafts, min(accepted, drafts))

    def on_finished(self, request: Request) -> None:
        self._following.pop(request.engine_request.id, None)
        self._drafter.on_finished(request)

    def _with_forced(self, request: Request, guess: Draft, most: int) -> Draft:
        following = self._follow(request)
        if following is None or following.matcher is None:
            return guess
        found = completed(following.matcher, following.forced(most), guess, most, self._compiler())
        following.taken = 0
        while guess.token_ids[following.taken : following.taken + 1] == found.token_ids[following.taken :][:1] != []:
            following.taken += 1
        return found

    def _follow(self, request: Request) -> _Following | None:
        """The grammar after all of the sequence's tokens; None where it has none."""
        if (grammar := grammar_of(request.engine_request)) is None:
            return None
        if (following := self._following.get(request.engine_request.id)) is None:
            try:
                following = _Following(self._compiler().matcher(usual_form(grammar)))
            except QuireError:  # its answer will say so
                following = _Following(None)
            self._following[request.engine_request.id] = following
        following.follow(request.token_ids[request.num_prompt_tokens + following.done :], self._compiler)
        return following


def completed(matcher: LLMatcher, forced: list[int], guess: Draft, most: int, compiler: GrammarCompiler) -> Draft:
    """Up to so many tokens: the forced ones, then of the guess what agrees with these and is allowed, and what is
    forced behind it."""
    ahead, found, kinds, own = matcher.deep_copy(), list[int](), list[int](), kinds_of(guess)
    following, kind = forced, FORCED
    while len(found) < most and not ahead.is_stopped():
        if not following:
            following, kind = ahead.compute_ff_tokens()[: most - len(found)], FORCED
        if not following:
            following, kind = _forced_text(ahead, compiler)[: most - len(found)], FORCED_TEXT
        if following:
            added = [kind] * len(following)
        else:
            following = _agreeing(ahead, found, guess.token_ids[:most])
            added = own[len(found) : len(found) + len(following)]
        if not following or not ahead.consume_tokens(following):
            break
        found, kinds, following = found + following, kinds + added, []
    return Draft(found, kinds)


def _forced_text(matcher: LLMatcher, compiler: GrammarCompiler) -> list[int]:
    """The tokens of text that is forced, though its last token might be one that goes on."""
    text = matcher.compute_ff_bytes()[:_LONGEST_TEXT]
    tokens = compiler.encode(text) if text else []
    return tokens[: matcher.validate_tokens(tokens)] if tokens else []


def _agreeing(matcher: LLMatcher, found: list[int], guess: list[int]) -> list[int]:
    """What of a guess may follow the tokens that were found, if it begins with them."""
    rest = guess[len(found) :] if guess[: len(found)] == found else []
    return rest[: matcher.validate_tokens(rest)] if rest else []


def _consumed(matcher: LLMatcher, token: int, compiler: Callable[[], GrammarCompiler]) -> bool:
    """Take in a token, perhaps without a space that the usual form has before what the token says. Whether that was
    possible; else the matcher is of no use any more."""
    if matcher.try_consume_tokens([token]):
        return True
    for byte in compiler().decode(token):
        tokens = compiler().encode(bytes([byte]))
        if not matcher.validate_tokens(tokens):
            if not matcher.compute_ff_bytes().startswith(b" "):
                return False
            tokens = [*compiler().encode(b" "), *tokens]
        if not matcher.consume_tokens(tokens):
            return False
    return True
