"""Which tokens a grammar allows next: one matcher per slot, and its mask on the logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quire.engine.batch import Admission
from quire.engine.errors import QuireError
from quire.engine.text.grammar import GrammarCompiler, first_line
from quire.engine.types import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher


@dataclass(frozen=True, slots=True)
class GrammarMask:
    """The tokens allowed in some rows of a step's logits; all other rows are free."""

    rows: list[int]
    allowed: Tensor  # [len(rows), >= vocab] bool, on the host


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

    def mask(self, slots: Sequence[int]) -> GrammarMask | None:
        """For the rows of these slots; None where all are free."""
        rows = [row for row, slot in enumerate(slots) if slot in self._matchers]
        if not rows:
            return None
        from llguidance import LLExecutor
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

        self._executor = self._executor or LLExecutor()
        words = allocate_token_bitmask(len(rows), self.prepare().result().vocab_size)
        matchers = [self._matchers[slots[row]] for row in rows]
        fill_next_token_bitmask_par(self._executor, [(matcher, i) for i, matcher in enumerate(matchers)], words)
        for i, (row, matcher) in enumerate(zip(rows, matchers, strict=True)):
            if matcher.is_error() or not words[i].any():
                self._fail(slots[row], matcher)
                words[i] = -1
        # On one core NumPy unpacks bits twenty times as fast as shifts in PyTorch do.
        allowed = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
        return GrammarMask(rows, torch.from_numpy(allowed).view(torch.bool))

    def consume(self, slot: int, owner: Admission, token_ids: list[int]) -> str | None:
        """Advance the matcher by tokens that were picked for `owner`. Returns why its grammar cannot be followed, if it
        cannot. Does nothing where the slot belongs to another owner by now.
        """
        if self._owners.get(slot) is not owner:
            return None
        self._consume(slot, token_ids)
        return self._unusable.get(slot)

    def _consume(self, slot: int, token_ids: list[int]) -> None:
        matcher = self._matchers.get(slot)
        # One by one, as consume_tokens refuses an end-of-sequence token that consume_token accepts.
        if matcher is not None and not all(map(matcher.consume_token, token_ids)):
            self._fail(slot, matcher)

    def _fail(self, slot: int, matcher: LLMatcher) -> None:
        self._unusable[slot] = f"the grammar could not be followed: {first_line(matcher)}"
        del self._matchers[slot]


def constrain(adjusted: Tensor, unmodified: Tensor, allowed: Tensor) -> Tensor:
    """Logits [R, vocab] with -inf where allowed [R, >= vocab] is false.

    Where the request's own bans (min_tokens, allowed_token_ids, bad words) leave nothing that the grammar allows, the
    grammar wins: that row takes its unmodified logits.
    """
    allowed = allowed[:, : adjusted.shape[1]].to(adjusted.device, non_blocking=True)
    found = torch.where(allowed, adjusted, -torch.inf)
    stuck = found.amax(-1, keepdim=True) == -torch.inf
    if found.device.type == "cpu" and not bool(stuck.any()):  # on a GPU the host would have to wait for this
        return found
    return torch.where(stuck & allowed, unmodified, found)
