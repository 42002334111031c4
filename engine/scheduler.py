"""Decides what each step computes. One rule: every sequence catches its computed count up to its token count.

Decodes go first, then prompts, in chunks, within a token budget; that one rule makes chunked prefill, prefix hits,
mixed batches, drafts and resumption after a preemption. The scheduler touches no device and reads no clock.

`schedule()` may run ahead of `apply()`: a step's effects are counted when it is scheduled (tokens computed, tokens in
flight) and its tokens learnt when it is applied, in order. Device work runs in the order it was scheduled, so pages
freed while a step is under way may be handed out at once.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.engine.batch import Admission, Batch, PageCopy, Row, StepOutput
from quire.engine.blocks import BlockPool
from quire.engine.fairness import FairQueue
from quire.engine.sequence import Sequence, Status
from quire.engine.types import EngineStats, FinishReason, Request, RequestOutput, SamplingParams


class Scheduler:
    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        eos_token_ids: tuple[int, ...] = (),
        enable_prefix_caching: bool = True,
        prefix_piece: int | None = None,
        propose: Callable[[Sequence], list[int]] | None = None,
    ) -> None:
        """`prefix_piece`: unit in which cached prefixes are matched, in tokens; a divisor of block_size, its default.

        `propose` guesses the tokens that follow a sequence's known ones. It is called only when the step computes all
        known tokens and none is in flight; so a sequence that may draft is never scheduled ahead of its results.
        """
        self.pool = BlockPool(num_blocks)
        self._block_size = block_size
        self._piece = prefix_piece or block_size
        assert block_size % self._piece == 0
        self._pieces = block_size // self._piece
        self._written: dict[int, int] = {}
        """For each page that the step being decided will write to, the first of its tokens that is written."""
        self._max_model_len = max_model_len
        self._max_tokens = max_num_batched_tokens
        self._eos = frozenset(eos_token_ids)
        self._caching = enable_prefix_caching
        self._propose = propose
        self._sequences: dict[str, Sequence] = {}
        self._running: list[Sequence] = []
        self._waiting = FairQueue()
        self._slots = list(range(max_num_seqs - 1, -1, -1))
        self._outputs: list[RequestOutput] = []
        self._preempted: list[str] = []
        self._arrivals = 0
        self._preemptions = self._queries = self._hits = self._prompt_tokens = self._generated = self._steps = 0

    @property
    def busy(self) -> bool:
        return bool(self._sequences)

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._running),
            waiting=len(self._sequences) - len(self._running),
            used_blocks=self.pool.num_used,
            total_blocks=self.pool.num_blocks,
            cached_blocks=len(self.pool.cached),
            preemptions=self._preemptions,
            prefix_queries=self._queries,
            prefix_hits=self._hits,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generated,
            steps=self._steps,
        )

    def sequences(self) -> tuple[list[Sequence], list[Sequence]]:
        """The running and the waiting sequences, each by priority and arrival."""
        waiting = [seq for seq in self._sequences.values() if seq.status is Status.WAITING]
        return sorted(self._running, key=lambda seq: seq.rank), sorted(waiting, key=lambda seq: seq.rank)

    def add(self, request: Request) -> None:
        """Queue a request, or answer it with an error output at once if it can never fit."""
        assert request.id not in self._sequences, f"request id {request.id} is in use"
        num_prompt = len(request.prompt_ids)
        limit = request.limit(self._max_model_len - num_prompt)
        if limit is None:
            self._refuse(request, f"the prompt has {num_prompt} tokens, the context {self._max_model_len}")
            return
        seq = Sequence(request, self._arrivals, limit, drafting=self._propose is not None)
        self._arrivals += 1
        longest = num_prompt + limit
        if self._blocks_for(longest) > self.pool.num_blocks:
            fits = self.pool.num_blocks * self._block_size
            self._refuse(request, f"prompt and max_tokens need {longest} tokens, the KV cache holds {fits}")
        elif request.emitted_ids and seq.num_output >= limit:
            self._outputs.append(RequestOutput(request.id, [], finish_reason="length"))
        else:
            self._sequences[request.id] = seq
            self._waiting.push(seq)

    def abort(self, request_id: str) -> None:
        """End a request now and free its pages. Does nothing for an unknown id: the request may just have ended."""
        seq = self._sequences.get(request_id)
        if seq is not None:
            self._end(seq)
            self._outputs.append(RequestOutput(request_id, [], finish_reason="abort"))

    def take_outputs(self) -> list[RequestOutput]:
        """The outputs that add, abort and apply made since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def schedule(self) -> Batch | None:
        """Decide the next step, and count it as done from now on; None where nothing can be computed now."""
        self._written.clear()
        planned, budget = self._plan_running()
        rows = []
        for seq, count in planned.items():  # after all pages are allocated, so drafts cause no preemption
            rows.append(row := self._commit(seq, count, budget))
            budget -= len(row.draft_ids)
        copies: list[PageCopy] = []
        admissions = self._admit(rows, copies, budget)
        if not rows:
            return None
        self._steps += 1
        preempted, self._preempted = self._preempted, []
        return Batch(rows, admissions, copies, preempted)

    def apply(self, batch: Batch, output: StepOutput) -> None:
        """Learn what a step computed. Batches are applied in the order they were scheduled."""
        for row in batch.rows:
            seq = self._sequences.get(row.request_id)
            if seq is None:
                continue  # the request ended while the step was under way
            if seq.owes_prompt_logprobs:
                # A preempted prompt is computed again, perhaps in other chunks: take what is new.
                have = len(seq.prompt_logprobs) - row.start
                seq.prompt_logprobs += output.prompt_logprobs.get(row.request_id, [])[max(have, 0) :]
            if row.request_id in output.errors:
                self._end(seq)
                self._refuse(seq.request, output.errors[row.request_id])
            elif row.sample:
                self._learn(seq, row, output)
            elif (vector := output.vectors.get(row.request_id)) is not None:
                self._end(seq)
                cached = seq.cached_tokens or 0
                answer = RequestOutput(row.request_id, [], finish_reason="stop", cached_tokens=cached, vector=vector)
                self._outputs.append(answer)

    def _plan_running(self) -> tuple[dict[Sequence, int], int]:
        """Tokens to compute for each running sequence, and what is left of the budget; preempts where pages run out."""
        budget = self._max_tokens
        planned: dict[Sequence, int] = {}
        for seq in sorted(self._running, key=lambda seq: (seq.pending > 1, seq.rank)):
            count = min(seq.pending, budget)
            if count == 0 or seq.status is not Status.RUNNING:
                continue
            needed = self._blocks_for(seq.computed + count) - len(seq.blocks)
            while needed > self.pool.num_free and seq.status is Status.RUNNING:
                victim = max(self._running, key=self._waiting.rank)
                budget += planned.pop(victim, 0)
                self._preempt(victim)
            if seq.status is Status.RUNNING:
                seq.blocks += self.pool.allocate(max(needed, 0))
                planned[seq] = count
                budget -= count
        return planned, budget

    def _admit(self, rows: list[Row], copies: list[PageCopy], budget: int) -> list[Admission]:
        """Move waiting sequences to free slots while budget and pages last; preempts nobody. Appends their rows, and
        the copies of pages of which they share only the beginning."""
        admissions = []
        while budget > 0 and self._slots and (seq := self._waiting.peek()) is not None:
            cached = self._cached_prefix(seq)
            # There must be pages for all its tokens, though this step may compute only some: else it would be preempted
            # half-way.
            needed = self._blocks_for(len(seq.tokens)) - len(cached)
            if seq.in_flight or needed > self.pool.num_free - self.pool.idle(cached):
                break
            self._waiting.remove(seq)
            self._start(seq, cached)
            copies += self._fork(seq)
            self._count_hits(seq)
            count = min(seq.pending, budget)
            seq.blocks += self.pool.allocate(self._blocks_for(seq.computed + count) - len(seq.blocks))
            budget -= count
            rows.append(row := self._commit(seq, count, budget))
            budget -= len(row.draft_ids)
            assert seq.slot is not None
            how = (seq.request.params, seq.request.seed)
            admissions.append(Admission(seq.slot, list(seq.tokens), seq.num_prompt, *how))
        return admissions

    def _cached_prefix(self, seq: Sequence) -> list[int]:
        """Cached pages of a waiting sequence's tokens but the last: that token must be computed."""
        if not self._caching or seq.owes_prompt_logprobs:
            return []
        digests = seq.digests((len(seq.tokens) - 1) // self._piece, self._piece)
        return self.pool.lookup(digests[self._pieces - 1 :: self._pieces])

    def _fork(self, seq: Sequence) -> list[PageCopy]:
        """Where a cached page begins as the sequence's next one does, give the sequence a page with a copy of that
        beginning.

        Copies are made before the step computes anything, so what it will write itself cannot be copied.
        """
        if self._pieces == 1 or not self._caching or seq.owes_prompt_logprobs:
            return []
        first = len(seq.blocks) * self._pieces
        digests = seq.digests((len(seq.tokens) - 1) // self._piece, self._piece)[first : first + self._pieces - 1]
        for count in range(len(digests), 0, -1):
            found = self.pool.lookup(digests[count - 1 : count])
            # Only what the page held before this step can be copied: copies are made first.
            if found and count * self._piece <= self._written.get(found[0], self._block_size):
                seq.blocks += self.pool.allocate(1)
                seq.computed += count * self._piece
                # If nobody holds the page found, it may be the very page that was allocated; then there is nothing to
                # copy.
                copy = PageCopy(found[0], seq.blocks[-1], count * self._piece)
                return [] if copy.source == copy.target else [copy]
        return []

    def _start(self, seq: Sequence, cached: list[int]) -> None:
        self.pool.share(cached)
        seq.blocks = list(cached)
        seq.known_pieces = len(cached) * self._pieces
        seq.computed = len(cached) * self._block_size
        seq.status = Status.RUNNING
        seq.slot = self._slots.pop()
        self._running.append(seq)

    def _count_hits(self, seq: Sequence) -> None:
        if seq.cached_tokens is None:
            seq.cached_tokens = min(seq.computed, seq.num_prompt)
            self._queries += seq.num_prompt
            self._hits += seq.cached_tokens

    def _draft(self, seq: Sequence, budget: int) -> list[int]:
        """Proposed tokens after the known ones, which are all in this step; as many as the request's limit, the budget
        and the free pages allow."""
        assert self._propose is not None
        assert not seq.in_flight
        known = len(seq.tokens)
        room = (len(seq.blocks) + self.pool.num_free) * self._block_size - known
        most = min(budget, seq.limit - seq.num_output - 1, room)
        drafts = self._propose(seq)[:most] if most > 0 else []
        seq.blocks += self.pool.allocate(max(self._blocks_for(known + len(drafts)) - len(seq.blocks), 0))
        return drafts

    def _commit(self, seq: Sequence, count: int, budget: int) -> Row:
        """Count a row of `count` known tokens as done, and its drafts, for which `budget` is left. Its full pages can
        be shared from now on, even within this step: every layer stores the step's keys and values before any row
        attends to them."""
        assert seq.slot is not None
        start = seq.computed
        sample = seq.limit > 0 and start + count == len(seq.tokens) + seq.in_flight
        drafts = self._draft(seq, budget) if sample and seq.drafts else []
        new_blocks = seq.blocks[seq.sent_blocks :]
        seq.computed += count + len(drafts)
        seq.in_flight += sample + len(drafts)
        seq.sent_blocks = len(seq.blocks)
        prompt_done = min(seq.computed, seq.num_prompt)
        self._prompt_tokens += max(0, prompt_done - start)
        self._waiting.charge(seq.request, prompt_tokens=max(0, prompt_done - max(start, seq.charged)))
        seq.charged = max(seq.charged, prompt_done)
        if self._caching:
            full = min(seq.computed, len(seq.tokens)) // self._piece
            for index, digest in enumerate(seq.digests(full, self._piece)[seq.known_pieces :], seq.known_pieces):
                self.pool.register(seq.blocks[index // self._pieces], digest)
            seq.known_pieces = full
            for index in range(start // self._block_size, self._blocks_for(seq.computed)):
                self._written[seq.blocks[index]] = max(start - index * self._block_size, 0)
        return Row(seq.request.id, seq.slot, start, count + len(drafts), new_blocks, sample, drafts)

    def _learn(self, seq: Sequence, row: Row, output: StepOutput) -> None:
        """Take in the tokens that the row accepted, up to one that ends the sequence."""
        request = seq.request
        new_ids = output.token_ids[request.id]
        seq.in_flight -= 1 + len(row.draft_ids)
        for taken, token in enumerate(new_ids, 1):
            seq.tokens.append(token)
            reason, stop = self._finish(seq, token)
            if reason is not None:
                new_ids = new_ids[:taken]
                break
        if row.draft_ids:  # rejected ones do not count as computed; a sequence preempted meanwhile has nothing computed
            seq.computed = min(seq.computed, len(seq.tokens) - 1)
        self._generated += len(new_ids)
        self._waiting.charge(request, output_tokens=len(new_ids))
        logprobs = output.logprobs.get(request.id)
        prompt_logprobs = None
        if seq.owes_prompt_logprobs:
            prompt_logprobs, seq.owes_prompt_logprobs = [None, *seq.prompt_logprobs], False
        self._outputs.append(
            RequestOutput(
                request.id,
                new_ids,
                logprobs=None if logprobs is None else logprobs[: len(new_ids)],
                prompt_logprobs=prompt_logprobs,
                finish_reason=reason,
                stop_reason=stop,
                cached_tokens=seq.cached_tokens or 0,
            )
        )
        if reason is not None:
            self._end(seq)

    def _finish(self, seq: Sequence, token: int) -> tuple[FinishReason | None, int | None]:
        params = seq.request.params
        assert isinstance(params, SamplingParams), "a token of a request for a vector"
        if params.grammar is not None and token in self._eos:
            return "stop", None
        if seq.num_output > params.min_tokens:
            if token in self._eos and not params.ignore_eos:
                return "stop", None
            if token in params.stop_token_ids:
                return "stop", token
        return ("length", None) if seq.num_output >= seq.limit else (None, None)

    def _preempt(self, seq: Sequence) -> None:
        """Release its pages and let it wait; later it is computed again, from what is then still cached."""
        self._leave(seq)
        seq.restart()
        self._waiting.push(seq)
        self._preempted.append(seq.request.id)
        self._preemptions += 1

    def _end(self, seq: Sequence) -> None:
        del self._sequences[seq.request.id]
        if seq.status is Status.RUNNING:
            self._leave(seq)
        else:
            self._waiting.remove(seq)
        seq.status = Status.FINISHED

    def _leave(self, seq: Sequence) -> None:
        assert seq.slot is not None
        self._running.remove(seq)
        self._slots.append(seq.slot)
        self.pool.release(seq.blocks)
        seq.blocks = []

    def _refuse(self, request: Request, why: str) -> None:
        self._outputs.append(RequestOutput(request.id, [], finish_reason="error", error=why))

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)
