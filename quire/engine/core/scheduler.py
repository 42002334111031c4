"""Decides what each step computes. One rule: every sequence catches its computed count up to its token count.

Decodes go first, then prompts, in chunks, within a token budget; that one rule makes chunked prefill, prefix hits,
mixed batches, drafts and resumption after a preemption. The scheduler touches no device and reads no clock.

`schedule()` may run ahead of `apply()`: a step's effects are counted when it is scheduled (tokens computed, tokens in
flight) and its tokens learnt when it is applied, in order. Device work runs in the order it was scheduled, so pages
freed while a step is under way may be handed out at once.
"""

from __future__ import annotations

from collections.abc import Collection

from quire.engine.checkpoint.page_groups import PageNeeds
from quire.engine.core.batch import Admission, Batch, PageCopy, Row, StepOutput
from quire.engine.core.blocks import GONE, BlockPool
from quire.engine.core.drafter import Drafter, NoDrafts
from quire.engine.core.fairness import FairQueue, TokenBudget
from quire.engine.core.no_tiers import NoTiers
from quire.engine.core.page_tables import PageTables
from quire.engine.core.prefix_cache import PrefixCache
from quire.engine.core.sequence import Sequence, Share, Status
from quire.engine.core.state_snapshots import SnapshotPlan, choose_snapshots
from quire.engine.core.stats import Counts, EngineStats
from quire.engine.types import Cause, Request, RequestOutput, Task


class Scheduler:
    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        windows: tuple[int | None, ...] = (None,),
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        long_prefill_token_threshold: int | None = None,
        eos_token_ids: tuple[int, ...] = (),
        enable_prefix_caching: bool = True,
        prefix_piece: int | None = None,
        drafter: Drafter | None = None,
        waiting: FairQueue | None = None,
        whole_prompts: bool = False,
        pools_all: bool = False,
        tasks: Collection[Task] = ("generate", "embed", "classify"),
        tiers: NoTiers | None = None,
        micro_batches: int = 1,
        snapshots: SnapshotPlan | None = None,
    ) -> None:
        """`windows`: by group of layers, as PageGroups has them; a page is of one group. `prefix_piece`: unit in which
        cached prefixes are matched, in tokens; a divisor of block_size, its default. `long_prefill_token_threshold`:
        most tokens of one sequence in a step; None: all that fit.

        `drafter` is asked about sequences all of whose known tokens the step computes and none of whose is in flight;
        so a sequence that may draft is never scheduled ahead of its results. `waiting`: the queue of those that wait;
        by default all of them may go next. `whole_prompts`: a step computes a prompt whole or not at all, as an encoder
        must; no prompt may be longer than max_num_batched_tokens. `pools_all`: see Sequence. `tasks`: what requests may
        ask of the model. `tiers`: where pages are kept below the device's cache; by default nowhere. `micro_batches`:
        steps that may be under way in a pipeline, each of other sequences, but for the parts of one prompt.
        `snapshots`: of what a cached prefix needs beside pages.
        """
        self._max_tokens, self._max_model_len = max_num_batched_tokens, max_model_len
        self._most_of_one = long_prefill_token_threshold or max_num_batched_tokens
        self.pool = BlockPool(num_blocks)
        self._needs = PageNeeds(windows, block_size, self._most_of_one)
        self._tables = PageTables(self.pool, self._needs)
        self._counts = Counts()
        kept = choose_snapshots(self.pool, block_size, snapshots, max_num_seqs + 1)
        piece = prefix_piece or block_size
        self.prefixes = PrefixCache(self._tables, piece, self._counts, enabled=enable_prefix_caching, snapshots=kept)
        self.tiers = tiers or NoTiers()
        self.tiers.serve(self.pool, self.prefixes)
        self._eos = frozenset(eos_token_ids)
        self._whole_prompts, self._pools_all = whole_prompts, pools_all
        self._tasks, self._micro_batches = tasks, micro_batches
        self._drafter = drafter or NoDrafts()
        self._arrivals = 0
        self._sequences: dict[str, Sequence] = {}
        self._running: list[Sequence] = []
        self._waiting = waiting or FairQueue()
        self._slots = list(range(max_num_seqs - 1, -1, -1))
        self._left, self._preempted = list[int](), list[str]()
        self._outputs: list[RequestOutput] = []

    @property
    def busy(self) -> bool:
        return bool(self._sequences) or self.tiers.busy

    @property
    def looks_back(self) -> bool:
        """Whether a sequence waits until all steps are learnt from, and there are no others whose turn it is."""
        return self._micro_batches == 1 and any(seq.looks_back for seq in self._running)

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._running),
            waiting=len(self._sequences) - len(self._running),
            used_blocks=self.pool.num_used,
            total_blocks=self.pool.num_blocks,
            cached_blocks=len(self.pool.cached),
            saved_blocks=self._tables.saved,
            **self._counts.fields(),
            tiers=self.tiers.stats(),
            load_seconds=self.tiers.load_seconds,
            pages_lost=self.tiers.lost,
            prefix_unit=self.prefixes.unit,
            kept_blocks=self.pool.num_kept,
            cache_tokens=self._tables.holds,
        )

    def sequences(self) -> tuple[list[Sequence], list[Sequence]]:
        """The running and the waiting sequences, each by priority and arrival."""
        waiting = [seq for seq in self._sequences.values() if seq.status is not Status.RUNNING]
        return sorted(self._running, key=lambda seq: seq.rank), sorted(waiting, key=lambda seq: seq.rank)

    def place(self, request: Request) -> float:
        """Where a request stands among those of its priority and tenant: the smaller goes first, and of equal ones who
        came first. A class of --scheduler-cls says otherwise."""
        return 0.0

    def add(self, request: Request) -> None:
        """Queue a request, or answer it with an error output at once if it can never fit."""
        assert request.id not in self._sequences, f"request id {request.id} is in use"
        if request.task not in self._tasks:
            self._refuse(request, f"the model serves {' and '.join(self._tasks)}, not {request.task}")
            return
        num_prompt = len(request.prompt_ids)
        limit = request.limit(self._max_model_len - num_prompt)
        if limit is None:
            self._refuse(request, f"the prompt has {num_prompt} tokens, the context {self._max_model_len}")
            return
        drafting = self._drafter.may_guess(request)
        turns = self._micro_batches > 1  # the first stage must know a token before it can compute it
        seq = Sequence(request, self._arrivals, limit, drafting=drafting, pools_all=self._pools_all, looks_back=turns)
        self._arrivals += 1
        longest = num_prompt + limit
        if (wrong := seq.put(self.place)) is not None:
            self._refuse(request, wrong)
        elif self._needs.most(longest) > self.pool.num_blocks:
            fits = self._needs.longest(self.pool.num_blocks, longest)
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

    def wait(self) -> None:
        """Wait a little for what sequences wait for; only while there is nothing to compute."""
        (self.tiers if self.tiers.busy else self._waiting).wait()

    def take_outputs(self) -> list[RequestOutput]:
        """The outputs that add, abort and apply made since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def schedule(self) -> Batch | None:
        """Decide the next step, and count it as done from now on; None where nothing can be computed now."""
        for seq, why in self._waiting.advance():
            self._end(seq)
            self._refuse(seq.request, why)
        for seq in self.tiers.arrived():
            self._waiting.push(seq)
        self.prefixes.begin_step()
        self._give_way()
        planned, budget = self._plan_running()
        drafts = self._draft(planned, budget)
        rows = [self._commit(seq, share, drafts.get(seq, [])) for seq, share in planned.items()]
        copies: list[PageCopy] = []
        admissions = self._admit(rows, copies, budget)
        if not rows:
            return None
        self._counts.steps += 1
        preempted, left, self._preempted, self._left = self._preempted, self._left, [], []
        told = self.tiers.take_fetched(), self._waiting.take_loads()
        return Batch(rows, admissions, copies, preempted, *told, left, self.prefixes.snapshots.take_copies())

    def apply(self, batch: Batch, output: StepOutput) -> None:
        """Learn what a step computed. Batches are applied in the order they were scheduled."""
        if output.captured:
            self._counts.count_captured(prompts=batch.has_prompts)
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
                self._refuse(seq.request, *output.errors[row.request_id])
            elif row.sample:
                self._learn(seq, row, output)
            elif (vector := output.vectors.get(row.request_id)) is not None:
                self._end(seq)
                cached = seq.cached_tokens or 0
                answer = RequestOutput(row.request_id, [], finish_reason="stop", cached_tokens=cached, vector=vector)
                self._outputs.append(answer)

    def _give_way(self) -> None:
        """Preempt what tenants run beyond their share, where another's next sequence lacks a slot or pages because of
        it. Before the step is planned: pages of a row of this step cannot be handed out."""
        seq = self._waiting.peek()
        if seq is None or seq.in_flight or not (candidates := self._waiting.yielding(seq, self._running)):
            return
        lacking = self._tables.needed(seq, self.prefixes.cached(seq)) - self.pool.num_free
        victims: list[Sequence] = []
        for victim in candidates:
            if lacking > 0 or not (self._slots or victims):
                victims.append(victim)
                lacking -= self._tables.own(victim)
        for victim in victims if lacking <= 0 else ():  # else they would lose their pages, and it would wait on
            self._preempt(victim)

    def _plan_running(self) -> tuple[dict[Sequence, Share], TokenBudget]:
        """What to compute for each running sequence, and what is left of the budget; preempts where pages run out."""
        budget = self._waiting.budget(self._max_tokens, self._running, whole=self._whole_prompts)
        planned: dict[Sequence, Share] = {}
        pending = {seq: seq.pending for seq in self._running}
        going = sum(seq.in_flight > 0 or pending[seq] == 1 for seq in self._running)
        share = -(-going // self._micro_batches)
        for seq in sorted(self._running, key=lambda seq: (pending[seq] > 1, seq.rank)):
            room = min(budget.most(seq), self._most_of_one)
            part = seq.share(min(pending[seq], self.prefixes.snapshots.bound(seq, room)), room)
            if not part or seq.status is not Status.RUNNING or (pending[seq] == 1 and len(planned) >= share):
                continue
            if self._tables.windowed:
                self._tables.trim(seq)
            needed = self._tables.missing(seq, seq.computed + part.count)
            while needed > self.pool.num_free and seq.status is Status.RUNNING:
                victim = max(self._running, key=self._waiting.rank)
                budget.take(victim, -planned.pop(victim, Share(0, 0)).weight)
                self._preempt(victim)
            if seq.status is Status.RUNNING:
                self._tables.grow(seq, seq.computed + part.count)
                planned[seq] = part
                budget.take(seq, part.weight)
        return planned, budget

    def _admit(self, rows: list[Row], copies: list[PageCopy], budget: TokenBudget) -> list[Admission]:
        """Move waiting sequences to free slots while budget and pages last; preempts nobody. Appends their rows, and
        the copies of pages of which they share only the beginning."""
        admissions = []
        while self._slots and (seq := self._waiting.peek()) is not None:
            most = budget.left if self._whole_prompts else budget.most(seq)
            cached = self.prefixes.cached(seq)
            # Pages for all its tokens, though this step may compute only some: else it would be preempted half-way.
            too_long = self._whole_prompts and len(seq.tokens) > most
            if most <= 0 or too_long or seq.in_flight or self._tables.needed(seq, cached) > self.pool.num_free:
                break
            self._waiting.remove(seq)
            if self.tiers.load(seq, cached):
                continue  # its pages are on their way
            forked = self._start(seq, cached)
            room = min(most, self._most_of_one)
            part = seq.share(min(seq.pending, self.prefixes.snapshots.bound(seq, room)), room)
            self._tables.grow(seq, seq.computed + part.count)
            self.pool.share(copy.source for copy in forked)  # else a load might fill it before it is copied
            copies += forked
            budget.take(seq, part.weight)
            rows.append(self._commit(seq, part, []))
            how = (seq.request.params, seq.request.seed, self._waiting.slot(seq), *seq.request.contents)
            admissions.append(Admission(rows[-1].slot, list(seq.tokens), seq.num_prompt, *how))
        self.pool.release([copy.source for copy in copies])
        return admissions

    def _start(self, seq: Sequence, cached: list[int]) -> list[PageCopy]:
        """Give a sequence a slot and its cached pages. Returns the copies of pages that it needs."""
        seq.status, seq.slot = Status.RUNNING, self._slots.pop()
        self.prefixes.share(seq, cached)
        self._running.append(seq)
        copies = self.prefixes.fork(seq)
        self._tables.trim(seq)
        self.prefixes.count(seq)
        return copies

    def _draft(self, planned: dict[Sequence, Share], budget: TokenBudget) -> dict[Sequence, list[int]]:
        """Drafts for the sequences all of whose known tokens are planned, as many as the requests' limits, the budget
        and the free pages allow. The pages of what is planned are allocated, so drafts cause no preemption."""
        asked = [
            (seq, seq.limit - seq.num_output - 1)
            for seq, part in planned.items()
            if seq.drafts and seq.computed + part.count == len(seq.tokens) and seq.limit - seq.num_output > 1
        ]
        found: dict[Sequence, list[int]] = {}
        if not asked or budget.left <= 0:
            return found
        guesses = self._drafter.propose(asked, sum(part.count for part in planned.values()))
        for (seq, most), guess in zip(asked, guesses, strict=True):
            if not guess.tokens:
                continue
            assert not seq.in_flight
            known = len(seq.tokens)
            room = self._tables.room(seq) - known
            most = min(most, budget.most(seq), room, self.prefixes.snapshots.drafts(known, most))
            found[seq] = drafts = guess.tokens[: max(most, 0)]
            budget.take(seq, len(drafts))
            self._tables.grow(seq, known + len(drafts))
        return found

    def _commit(self, seq: Sequence, part: Share, drafts: list[int]) -> Row:
        """Count a row of known tokens, images and drafts as done. Its full pages can be shared from now on, even
        within this step: every layer stores the step's keys and values before any row attends to them."""
        assert seq.slot is not None
        start, count = seq.computed, part.count
        sample = seq.limit > 0 and start + count == len(seq.tokens) + seq.in_flight
        new_blocks = seq.blocks[seq.sent_blocks :]
        if GONE in new_blocks:  # no row reads it, but it must be the number of a page
            new_blocks = [max(page, 0) for page in new_blocks]
        seq.take(part.looks)
        seq.computed += count + len(drafts)
        seq.in_flight += sample + len(drafts)
        seq.sent_blocks = len(seq.blocks)
        if start < seq.num_prompt or seq.charged < seq.num_prompt:
            self._count_prompt(seq, start)
        self.prefixes.register(seq, start, start + count)
        return Row(seq.request.id, seq.slot, start, count + len(drafts), new_blocks, sample, drafts, list(part.looks))

    def _count_prompt(self, seq: Sequence, start: int) -> None:
        """Count, and charge the tenant for, the prompt tokens from `start` on that are computed now."""
        done = min(seq.computed, seq.num_prompt)
        self._counts.prompt_tokens += max(0, done - start)
        self._waiting.charge(seq.request, prompt_tokens=max(0, done - max(start, seq.charged)))
        seq.charged = max(seq.charged, done)

    def _learn(self, seq: Sequence, row: Row, output: StepOutput) -> None:
        """Take in the tokens that the row accepted, up to one that ends the sequence."""
        request = seq.request
        new_ids = output.token_ids[request.id]
        seq.in_flight -= 1 + len(row.draft_ids)
        for taken, token in enumerate(new_ids, 1):
            seq.tokens.append(token)
            reason, stop = seq.finish(token, self._eos)
            if reason is not None:
                new_ids = new_ids[:taken]
                break
        if row.draft_ids:  # rejected ones do not count as computed; a sequence preempted meanwhile has nothing computed
            seq.computed = min(seq.computed, len(seq.tokens) - 1)
            right = len(output.token_ids[request.id]) - 1
            self._counts.count_drafts(len(row.draft_ids), right)
            self._drafter.learn(seq, len(row.draft_ids), right)
        self._counts.generation_tokens += len(new_ids)
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

    def _preempt(self, seq: Sequence) -> None:
        """Release its pages and let it wait; later it is computed again, from what is then still cached."""
        self._leave(seq)
        seq.restart()
        self._waiting.push(seq)
        self._preempted.append(seq.request.id)
        self._counts.preemptions += 1

    def _end(self, seq: Sequence) -> None:
        del self._sequences[seq.request.id]
        self._drafter.end(seq)
        if seq.status is Status.RUNNING:
            self._leave(seq)
        elif seq.status is Status.WAITING:
            self._waiting.remove(seq)
        self.tiers.forget(seq)
        self._waiting.ended(seq)
        seq.status = Status.FINISHED

    def _leave(self, seq: Sequence) -> None:
        assert seq.slot is not None
        self._running.remove(seq)
        self._slots.append(seq.slot)
        self._left.append(seq.slot)
        self.tiers.keep(seq)
        self.prefixes.leave(seq)

    def _refuse(self, request: Request, why: str, cause: Cause = "engine") -> None:
        self._outputs.append(RequestOutput(request.id, [], finish_reason="error", error=why, cause=cause))
