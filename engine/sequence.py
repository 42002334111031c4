"""One request on its way through the engine. Only the scheduler changes a Sequence."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from enum import Enum

from quire.engine.blocks import block_hash, root_hash
from quire.engine.types import Request, TokenLogprob


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """Tokens, how many of them are computed, and the pages that hold their KV.

    `computed` counts tokens whose KV is in the cache or will be when the steps under way have run. `in_flight` counts
    the most tokens those steps may give, which the device knows before we do. A sequence is caught up, one token
    behind, when computed == known + in_flight - 1: the next step computes that last token and picks another.

    Drafts are tokens that may be taken back: until the scheduler learns from the step that computes them they count as
    computed and in flight, never as known, so they are neither hashed nor shared.
    """

    def __init__(self, request: Request, arrival: int, limit: int, *, drafting: bool = False) -> None:
        """`drafting`: the scheduler has drafts proposed. Sequences with a grammar have none: its matcher takes tokens
        in for good, and would have to be asked after each draft and rolled back. Nor have those with a thinking
        budget."""
        assert request.prompt_ids, "an empty prompt is refused before it comes here"
        self.request = request
        self.arrival = arrival
        self.limit = limit
        """Most tokens it may generate, the context length considered; 0 where a vector is wanted."""
        self.tokens = request.prompt_ids + request.emitted_ids
        self.num_prompt = len(request.prompt_ids)
        self.status = Status.WAITING
        self.computed = 0
        self.in_flight = 0
        self.slot: int | None = None
        self.blocks: list[int] = []
        self.sent_blocks = 0
        """How many of its first pages the device knows."""
        self.known_pieces = 0
        """How many of its first pieces are registered with the pool."""
        self.cached_tokens: int | None = None
        """Prompt tokens found in the prefix cache when it was first admitted."""
        self.charged = 0
        """Prompt tokens that were cached or that its tenant was charged for: nobody is charged for computing them again
        after a preemption."""
        sampling = request.sampling
        asked = sampling is not None and sampling.prompt_logprobs is not None
        self.owes_prompt_logprobs = asked and not request.emitted_ids
        """While this is true every prompt token is computed, even if it is cached."""
        self.prompt_logprobs: list[TokenLogprob | None] = []
        has_grammar = sampling is not None and sampling.grammar is not None
        self.drafts = drafting and sampling is not None and not has_grammar and sampling.thinking is None
        """Whether its rows may carry drafts."""
        self._looks_back = self.drafts or has_grammar
        """Whether its next step can be decided only when every token before is known: for its grammar, or to propose
        drafts."""
        self._digests: list[bytes] = []
        self._root = root_hash(request.cache_salt)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def pending(self) -> int:
        """Tokens to compute before it is caught up; 0 while all that it may generate is under way, and while it must
        wait for a token under way."""
        if self.in_flight and (self._looks_back or self.num_output + self.in_flight >= self.limit):
            return 0
        return len(self.tokens) + self.in_flight - self.computed

    @property
    def rank(self) -> tuple[int, int]:
        """Among running sequences the smallest goes first."""
        return (self.request.priority, self.arrival)

    def digests(self, count: int, size: int) -> SequenceOf[bytes]:
        """Hashes of the first `count` pieces of `size` tokens. Their tokens must be known; `size` is the same in all
        calls."""
        assert count * size <= len(self.tokens), "hashing tokens that are not known yet"
        while len(self._digests) < count:
            begin = len(self._digests) * size
            parent = self._digests[-1] if self._digests else self._root
            self._digests.append(block_hash(parent, self.tokens[begin : begin + size]))
        return self._digests[:count]

    def restart(self) -> None:
        """Back to waiting with nothing computed; tokens under way still arrive."""
        self.status = Status.WAITING
        self.computed = 0
        self.slot = None
        self.blocks = []
        self.sent_blocks = 0
        self.known_pieces = 0
