"""Which tokens a grammar allows next: one matcher per slot, and its mask on the logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quire.engine.batch import Admission, Row
from quire.engine.errors import QuireError
from quire.engine.text.grammar import GrammarCompiler, first_line
from quire.engine.types import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher


@dataclass(frozen=True, slots=True)
class GrammarMask:
    """The tokens allowed in some rows of a step's logits; all other rows are free."""

    rows: list[int]
    words: np.ndarray
    """[len(rows), words] int32: bit i of word w says whether token 32 w + i is allowed."""


class SlotGrammars:
    """The matcher of every slot whose request has a grammar. `load` is called once: for the first grammar, or by
    `prepare`."""

    def __init__(self, load: Callable[[], GrammarCompiler]) -> None:
        self._load = load
        self._loading: Future[GrammarCompiler] | None = None
        self._executor: LLExecutor | None = None
        self._owners: dict[int, Admission] = {}
        self._matchers: dict[int, LLMatcher] = {}
        self._unusable: dict[int, str] = {}

    def prepare(self) -> Future[GrammarCompiler]:
        """Load the compiler in a thread: for a vocabulary of 150,000 tokens it takes a second, in which a running
        stream would stand still."""
        if self._loading is None:
            pool = ThreadPoolExecutor(1, "grammars")
            self._loading = pool.submit(self._load)
            pool.shutdown(wait=False)
        return self._loading

    def admit(self, admission: Admission) -> None:
        """Give a slot to a new owner, whose matcher starts after the tokens generated so far."""
        slot, params = admission.slot, admission.params
        grammar = params.grammar if isinstance(params, SamplingParams) else None
        self._owners[slot] = admission
        self._matchers.pop(slot, None)
        self._unusable.pop(slot, None)
        if grammar is None:
            return
        try:
            self._matchers[slot] = self.prepare().result().matcher(grammar)
        except QuireError as error:
            self._unusable[slot] = error.message
        else:
            self._consume(slot, admission.token_ids[admission.num_prompt :])

    def mask(self, picks: Sequence[Row]) -> GrammarMask | None:
        """For the picks of a step, of each its row; those of a row with drafts stand side by side, each after one draft
        more. None where all are free."""
        places = [index for index, row in enumerate(picks) if row.slot in self._matchers]
        if not places:
            return None
        from llguidance import LLExecutor
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

        self._executor = self._executor or LLExecutor()
        words = allocate_token_bitmask(len(places), self.prepare().result().vocab_size)
        firsts = [at for at, index in enumerate(places) if not at or picks[places[at - 1]] is not picks[index]]
        slots = [picks[places[at]].slot for at in firsts]
        matchers = [self._matchers[slot] for slot in slots]
        fill_next_token_bitmask_par(self._executor, list(zip(matchers, firsts, strict=True)), words)
        for at, slot, matcher in zip(firsts, slots, matchers, strict=True):
            if matcher.is_error() or not words[at].any():
                self._fail(slot, matcher)
                words[at : at + 1 + len(picks[places[at]].draft_ids)] = -1
            elif drafts := picks[places[at]].draft_ids:
                _fill_after(matcher, drafts, words[at + 1 : at + 1 + len(drafts)])
        return GrammarMask(places, words)

    def consume(self, slot: int, owner: Admission, token_ids: list[int]) -> str | None:
        """Advance the matcher by tokens that were picked for `owner`. Returns why its grammar cannot be followed, if it
        cannot. Does nothing where the slot belongs to another owner by now.
        """
        if self._owners.get(slot) is not owner:
            return None
        self._consume(slot, token_ids)
        return self._unusable.get(slot)

    def _consume(self, slot: int, token_ids: list[int]) -> None:
        """What follows the end of the answer is ignored, as the scheduler does: accepted drafts may go on there."""
        matcher = self._matchers.get(slot)
        # One by one, as consume_tokens refuses an end-of-sequence token that consume_token accepts.
        for token in token_ids:
            if matcher is None or matcher.is_stopped():
                return
            if not matcher.consume_token(token):
                self._fail(slot, matcher)
                return

    def _fail(self, slot: int, matcher: LLMatcher) -> None:
        self._unusable[slot] = f"the grammar could not be followed: {first_line(matcher)}"
        del self._matchers[slot]


def _fill_after(matcher: LLMatcher, drafts: Sequence[int], words: np.ndarray) -> None:
    """The masks [drafts, words] after each of the drafts. After one that is not allowed all is: it will not be picked,
    so what is picked after it will be dropped."""
    from llguidance.numpy import fill_next_token_bitmask

    ahead = matcher.deep_copy()  # so that nothing that is found ahead can spoil the matcher itself
    words[:] = -1
    for place in range(ahead.validate_tokens(list(drafts))):
        ahead.consume_token(drafts[place])
        fill_next_token_bitmask(ahead, words, place)
        if ahead.is_error() or not words[place].any():
            words[place] = -1
        if ahead.is_error() or ahead.is_stopped():  # where nothing but the end may follow, it has stopped already
            break


def constrain(adjusted: Tensor, unmodified: Tensor, allowed: Tensor) -> Tensor:
    """Logits [R, vocab] with -inf where allowed [R, vocab] is false.

    Where the request's own bans (min_tokens, allowed_token_ids, bad words) leave nothing that the grammar allows, the
    grammar wins: that row takes its unmodified logits.
    """
    found = torch.where(allowed, adjusted, -torch.inf)
    stuck = found.amax(-1, keepdim=True) == -torch.inf
    if found.device.type == "cpu" and not bool(stuck.any()):  # on a GPU the host would have to wait for this
        return found
    return torch.where(stuck & allowed, unmodified, found)
