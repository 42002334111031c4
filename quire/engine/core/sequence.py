"""One request on its way through the engine. Only the scheduler changes a Sequence."""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from enum import Enum

from quire.engine.core.batch import Look
from quire.engine.core.blocks import block_hash, contents_between, root_hash
from quire.engine.types import FinishReason, Request, SamplingParams, Span, TokenLogprob


@dataclass(frozen=True, slots=True)
class Share:
    """What of a sequence a step takes."""

    count: int
    """Of its next tokens."""
    weight: int
    """All that it takes of the step's budget."""
    looks: SequenceOf[Look] = ()

    def __bool__(self) -> bool:
        return self.count > 0 or bool(self.looks)


class Status(Enum):
    WAITING = "waiting"
    LOADING = "loading"
    """Pages of its prefix are on their way from a tier; nobody else waits for them."""
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

    def __init__(
        self,
        request: Request,
        arrival: int,
        limit: int,
        *,
        drafting: bool = False,
        pools_all: bool = False,
        looks_back: bool = False,
    ) -> None:
        """`drafting`: somebody may guess its tokens. `looks_back`: whatever it asks for. `pools_all`: a vector takes
        the hidden states of all tokens, which no cache keeps."""
        assert request.prompt_ids, "an empty prompt is refused before it comes here"
        self.request = request
        self.arrival = arrival
        self.place = (0.0, arrival)
        """Among those of its priority and tenant the smallest goes first."""
        self.rank = (request.priority, *self.place)
        """Among running sequences the smallest goes first."""
        self.limit = limit
        """Most tokens it may generate, the context length considered; 0 where a vector is wanted."""
        self.tokens = request.prompt_ids + request.emitted_ids
        self.num_prompt = len(request.prompt_ids)
        self.status = Status.WAITING
        self.computed = 0
        self.in_flight = 0
        self.slot: int | None = None
        self.blocks: list[int] = []
        """As PageTables (engine/core/page_tables.py) keeps them."""
        self.trimmed = 0
        """Pages that the token at this position does not see are given back."""
        self.sent_blocks = 0
        """How many of its first pages the device knows."""
        self.known_pieces = 0
        """How many of its first pieces are registered with the pool."""
        self.snapshot = 0
        """Tokens up to its last snapshot (engine/core/state_snapshots.py), or up to the one that it began with."""
        self.cached_tokens: int | None = None
        """Prompt tokens found in the prefix cache when it was first admitted."""
        self.charged = 0
        """Prompt tokens that were cached or that its tenant was charged for: nobody is charged for computing them again
        after a preemption."""
        sampling = request.sampling
        asked = sampling is not None and sampling.prompt_logprobs is not None
        self.owes_prompt_logprobs = asked and not request.emitted_ids
        self._pools_all = pools_all and sampling is None
        self.prompt_logprobs: list[TokenLogprob | None] = []
        has_grammar = sampling is not None and sampling.grammar is not None
        self.drafts = drafting and sampling is not None
        """Whether its rows may carry drafts."""
        self.looks_back = looks_back or self.drafts or has_grammar
        """Whether its next step can be decided only when every token before is known: for its grammar, or to propose
        drafts."""
        self._read: set[bytes] = set()
        """The images that were read."""
        self._reading: Look | None = None
        """How far the last one is."""
        self._digests: list[bytes] = []
        self._root = root_hash(request.cache_salt, "" if request.adapter is None else request.adapter.digest)

    def put(self, place: Callable[[Request], float]) -> str | None:
        """Before it waits. `place`: where a request stands before its arrival counts; a user's class may have it.
        Returns why that is no number, where it is none."""
        try:
            found = place(self.request)
            wrong = None if isinstance(found, int | float) and found == found else f"gave {found!r}, which is no number"
        except Exception as error:  # whatever a user's method raises
            wrong = f"raised {type(error).__name__}: {error}"
        if wrong is not None:
            return f"scheduler_cls: {place.__qualname__} {wrong}"
        self.place = (found, self.arrival)
        self.rank = (self.request.priority, *self.place)
        return None

    @property
    def needs_every_token(self) -> bool:
        """Whether every token must be computed, even if it is cached."""
        return self.owes_prompt_logprobs or self._pools_all

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def pending(self) -> int:
        """Tokens to compute before it is caught up; 0 while all that it may generate is under way, and while it must
        wait for a token under way."""
        if self.in_flight and (self.looks_back or self.num_output + self.in_flight >= self.limit):
            return 0
        return len(self.tokens) + self.in_flight - self.computed

    def share(self, count: int, room: int) -> Share:
        """What of it a step takes that has `room`, in tokens: its next tokens, at most `count`, and the reading of the
        images that they stand for, so far as that is not done. So a large image is read in several steps, as a long
        prompt is computed. A whole span is left to the next step where it does not fit, and exceeds the count where
        it comes first and is read."""
        if self.computed >= self.num_prompt or count <= 0 or not self.request.spans:
            return Share(count, count)
        end, weight, looks = self.computed + min(count, room), 0, list[Look]()
        last: Span | None = None
        for span in self.request.spans:
            if span.start >= end:
                break
            if span.start + span.count <= self.computed:
                continue
            begin = max(span.start, self.computed)
            if span.digest not in self._read and all(span.digest != each.digest for each in looks):
                work = next(each.work for each in self.request.images if each.digest == span.digest)
                done = self._looked(span.digest)
                until = min(work, done + room - weight - (begin - self.computed))
                if until > done:
                    looks.append(Look(span.digest, until, work))
                    weight += until - done
                if until < work:
                    end = begin
                    break
                end = min(end, self.computed + room - weight)
            last = span
        if last is not None and last.whole and last.start < end < (behind := last.start + last.count):
            end = last.start if last.start > self.computed or looks else behind
        count = max(end - self.computed, 0)
        return Share(count, count + weight, looks)

    def _looked(self, digest: bytes) -> int:
        """How far an image is read whose reading is not over."""
        return self._reading.until if self._reading is not None and self._reading.digest == digest else 0

    def take(self, looks: SequenceOf[Look]) -> None:
        """Count these as done."""
        self._read.update(each.digest for each in looks if each.ends)
        self._reading = looks[-1] if looks else self._reading

    def digests(self, count: int, size: int) -> SequenceOf[bytes]:
        """Hashes of the first `count` pieces of `size` tokens. Their tokens must be known; `size` is the same in all
        calls."""
        assert count * size <= len(self.tokens), "hashing tokens that are not known yet"
        while len(self._digests) < count:
            begin = len(self._digests) * size
            parent = self._digests[-1] if self._digests else self._root
            contents = contents_between(self.request.spans, begin, begin + size)
            self._digests.append(block_hash(parent, self.tokens[begin : begin + size], contents))
        return self._digests[:count]

    def finish(self, token: int, eos: Collection[int]) -> tuple[FinishReason | None, int | None]:
        """Why the token just added ends it, if it does, and which of stop_token_ids it is, if it is one."""
        params = self.request.params
        assert isinstance(params, SamplingParams), "a token of a request for a vector"
        if params.grammar is not None and token in eos:
            return "stop", None
        if self.num_output > params.min_tokens:
            if token in eos and not params.ignore_eos:
                return "stop", None
            if token in params.stop_token_ids:
                return "stop", token
        return ("length", None) if self.num_output >= self.limit else (None, None)

    def restart(self) -> None:
        """Back to waiting with nothing computed; tokens under way still arrive."""
        self.status = Status.WAITING
        self.computed = 0
        self.slot = None
        self.blocks = []
        self.trimmed = 0
        self.sent_blocks = 0
        self.known_pieces = 0
        self._read.clear()
        self._reading = None
