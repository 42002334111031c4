"""Which tokens a grammar allows next: one matcher per slot, and its mask on the logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from quire.engine.core.scheduler_output import Failure, NewRequestData, ScheduledRequest
from quire.engine.errors import InvalidRequest, Overloaded, QuireError
from quire.engine.text.grammar import Compiled, GrammarCompiler, first_line, refuse_long_text, worn_out
from quire.engine.types import Grammar, SamplingParams

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher


_TOGETHER = 3
"""How often an answer's lexer is replaced by one that others fill, too. Each time the grammar is compiled."""


@dataclass(frozen=True, slots=True)
class GrammarMask:
    """The tokens allowed in some rows of a step's logits; all other rows are free."""

    rows: list[int]
    words: np.ndarray
    """[len(rows), words] int32: bit i of word w says whether token 32 w + i is allowed."""


@dataclass(slots=True)
class _Followed:
    """How far a grammar has followed an answer."""

    grammar: Grammar
    compiled: Compiled
    matcher: LLMatcher
    tokens: list[int] = field(default_factory=list)
    """Those of the answer that it has followed: with another lexer it begins again."""
    begun: int = 0
    """How often it has begun again."""

    def consume(self, token: int) -> bool:
        """Whether the token was allowed, which a worn-out lexer cannot tell."""
        if self.matcher.consume_token(token):
            self.tokens.append(token)
            return True
        return False

    def begin_again(self, compiler: GrammarCompiler) -> None:
        """Follow the same tokens with another lexer. Raises what GrammarCompiler.instead does."""
        while worn_out(self.matcher):
            self.compiled = compiler.instead(self.grammar, self.compiled, alone=self.begun >= _TOGETHER)
            self.begun += 1
            self.matcher = self.compiled.matcher()
            all(self.matcher.consume_token(token) for token in self.tokens)


class SlotGrammars:
    """The matcher of every slot whose request has a grammar. `load` is called once: for the first grammar, or by
    `prepare`."""

    def __init__(self, load: Callable[[], GrammarCompiler]) -> None:
        self._load = load
        self._loading: Future[GrammarCompiler] | None = None
        self._executor: LLExecutor | None = None
        self._owners: dict[int, NewRequestData] = {}
        self._followed: dict[int, _Followed] = {}
        self._unusable: dict[int, Failure] = {}

    def prepare(self) -> Future[GrammarCompiler]:
        """Load the compiler in a thread: for a vocabulary of 150,000 tokens it takes a second, in which a running
        stream would stand still."""
        if self._loading is None:
            pool = ThreadPoolExecutor(1, "grammars")
            self._loading = pool.submit(self._load)
            pool.shutdown(wait=False)
        return self._loading

    def admit(self, admission: NewRequestData) -> None:
        """Give a slot to a new owner, whose matcher starts after the tokens generated so far."""
        slot, params = admission.slot, admission.params
        grammar = params.grammar if isinstance(params, SamplingParams) else None
        self.leave(slot)
        self._owners[slot] = admission
        if grammar is None:
            return
        try:
            compiled = self.prepare().result().compiled(grammar)
            followed = _Followed(grammar, compiled, compiled.matcher())
            refuse_long_text(followed.matcher)
        except QuireError as error:
            self._unusable[slot] = Failure(error.message, "busy" if isinstance(error, Overloaded) else "engine")
        else:
            self._followed[slot] = followed
            self._consume(slot, admission.token_ids[admission.num_prompt :])

    def leave(self, slot: int) -> None:
        """Nobody has the slot any more: forget the owner's matcher, whose lexer may be large."""
        for each in (self._owners, self._followed, self._unusable):
            each.pop(slot, None)

    def mask(self, picks: Sequence[ScheduledRequest]) -> GrammarMask | None:
        """For the picks of a step, of each its row; those of a row with drafts stand side by side, each after one draft
        more. None where all are free."""
        places = [index for index, row in enumerate(picks) if row.slot in self._followed]
        if not places:
            return None
        from llguidance import LLExecutor
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

        self._executor = self._executor or LLExecutor()
        words = allocate_token_bitmask(len(places), self.prepare().result().vocab_size)
        firsts = [at for at, index in enumerate(places) if not at or picks[places[at - 1]] is not picks[index]]
        rows = [picks[places[at]] for at in firsts]
        matchers = [self._followed[row.slot].matcher for row in rows]
        fill_next_token_bitmask_par(self._executor, list(zip(matchers, firsts, strict=True)), words)
        for at, row in zip(firsts, rows, strict=True):
            own = words[at : at + 1 + len(row.draft_token_ids)]
            try:
                self._complete(self._followed[row.slot], row.draft_token_ids, own)
            except QuireError as error:
                self._fail(row.slot, error)
                own[:] = -1
        return GrammarMask(places, words)

    def _complete(self, followed: _Followed, drafts: Sequence[int], words: np.ndarray) -> None:
        """The masks after each of the drafts, behind the first; all of them once more with another lexer where this one
        has an error. Raises InvalidRequest where nothing is allowed, and what GrammarCompiler.instead does."""
        from llguidance.numpy import fill_next_token_bitmask

        while worn_out(followed.matcher) or not _fill_after(followed.matcher, drafts, words):
            followed.begin_again(self.prepare().result())
            fill_next_token_bitmask(followed.matcher, words, 0)
        if followed.matcher.is_error() or not words[0].any():
            raise InvalidRequest(first_line(followed.matcher))

    def consume(self, slot: int, owner: NewRequestData, token_ids: list[int]) -> Failure | None:
        """Advance the matcher by tokens that were picked for `owner`. Returns why its grammar cannot be followed, if it
        cannot. Does nothing where the slot belongs to another owner by now.
        """
        if self._owners.get(slot) is not owner:
            return None
        self._consume(slot, token_ids)
        return self._unusable.get(slot)

    def _consume(self, slot: int, token_ids: list[int]) -> None:
        """What follows the end of the answer is ignored, as the scheduler does: accepted drafts may go on there."""
        followed = self._followed.get(slot)
        # One by one, as consume_tokens refuses an end-of-sequence token that consume_token accepts.
        for token in token_ids:
            if followed is None or followed.matcher.is_stopped():
                return
            try:
                while not followed.consume(token):
                    if not worn_out(followed.matcher):
                        raise InvalidRequest(first_line(followed.matcher))
                    followed.begin_again(self.prepare().result())
                refuse_long_text(followed.matcher)
            except QuireError as error:
                return self._fail(slot, error)

    def _fail(self, slot: int, error: QuireError) -> None:
        if isinstance(error, Overloaded):
            self._unusable[slot] = Failure(error.message, "busy")
        else:
            self._unusable[slot] = Failure(f"the grammar could not be followed: {error.message}", "grammar")
        del self._followed[slot]


def _fill_after(matcher: LLMatcher, drafts: Sequence[int], words: np.ndarray) -> bool:
    """The masks after each of the drafts, behind the one of the first pick: [1 + drafts, words]. After one that is not
    allowed all is: it will not be picked, so what is picked after it will be dropped. Returns whether the lexer could
    tell all of it."""
    from llguidance.numpy import fill_next_token_bitmask

    words[1:] = -1
    if not drafts:
        return True
    ahead = matcher.deep_copy()
    for place, draft in enumerate(drafts):
        allowed = words[place, draft >> 5] >> (draft & 31) & 1
        if not allowed or not ahead.consume_token(draft):
            break
        fill_next_token_bitmask(ahead, words, place + 1)
        if ahead.is_error() or not words[place + 1].any():
            words[place + 1] = -1
        if ahead.is_error() or ahead.is_stopped():  # where nothing but the end may follow, it has stopped already
            break
    return not worn_out(ahead)
