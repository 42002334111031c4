"""Decides what each step computes. One rule: every request catches its computed count up to its token count.

Decodes go first, then prefills in chunks, within a token budget. That one rule covers chunked prefill, prefix cache
hits, mixed batches, draft tokens and resumption after a preemption. The scheduler touches no device and reads no clock.

`schedule()` may run ahead of `apply()`: a step's effects are counted when it is scheduled (tokens computed, tokens in
flight), and its tokens are appended when it is applied, in order. Device work runs in the order in which it was
scheduled, so blocks that are freed while a step is in flight may be allocated at once.
"""

from __future__ import annotations

from collections.abc import Collection

from quire.engine.checkpoint.page_groups import PageNeeds
from quire.engine.core.block_pool import NULL_BLOCK, BlockPool
from quire.engine.core.block_tables import BlockTables
from quire.engine.core.drafter import Drafter, NoDrafts
from quire.engine.core.fairness import FairQueue, TokenBudget
from quire.engine.core.no_tiers import NoTiers
from quire.engine.core.prefix_cache import PrefixCache
from quire.engine.core.request import Request, RequestStatus, ScheduledChunk
from quire.engine.core.scheduler_output import (
    BlockCopy,
    ModelRunnerOutput,
    NewRequestData,
    ScheduledRequest,
    SchedulerOutput,
)
from quire.engine.core.state_snapshots import SnapshotPlan, choose_snapshots
from quire.engine.core.stats import Counts, EngineStats
from quire.engine.types import Cause, EngineCoreOutput, EngineCoreRequest, Task


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
        hash_block_size: int | None = None,
        drafter: Drafter | None = None,
        waiting: FairQueue | None = None,
        whole_prompts: bool = False,
        pools_all: bool = False,
        tasks: Collection[Task] = ("generate", "embed", "classify"),
        tiers: NoTiers | None = None,
        micro_batches: int = 1,
        snapshots: SnapshotPlan | None = None,
    ) -> None:
        """`windows`: the sliding window of each KV cache group (PageGroups); a block belongs to one group.
        `hash_block_size`: unit in which cached prefixes are matched, in tokens; a divisor of block_size, its default.
        `long_prefill_token_threshold`: maximum tokens of one request in a step; None: as many as fit.

        `drafter` proposes tokens for requests all of whose known tokens the step computes and none of whose tokens is
        in flight, so a request that may draft is never scheduled ahead of its results. `waiting`: the waiting queue.
        `whole_prompts`: a step computes a prompt whole or not at all, as an encoder must; no prompt may be longer than
        max_num_batched_tokens. `pools_all`: see Request. `tasks`: what requests may ask of the model. `tiers`: KV
        offload; by default none. `micro_batches`: pipeline depth; steps in flight hold disjoint requests, except chunks
        of one prompt. `snapshots`: budget of recurrent-state snapshots.
        """
        self._max_tokens, self._max_model_len = max_num_batched_tokens, max_model_len
        self._max_tokens_per_request = long_prefill_token_threshold or max_num_batched_tokens
        self.pool = BlockPool(num_blocks)
        self._needs = PageNeeds(windows, block_size, self._max_tokens_per_request)
        self._block_tables = BlockTables(self.pool, self._needs)
        self._counts = Counts()
        kept = choose_snapshots(self.pool, block_size, snapshots, max_num_seqs + 1)
        piece = hash_block_size or block_size
        self.prefixes = PrefixCache(
            self._block_tables, piece, self._counts, enabled=enable_prefix_caching, snapshots=kept
        )
        self.tiers = tiers or NoTiers()
        self.tiers.serve(self.pool, self.prefixes)
        self._eos = frozenset(eos_token_ids)
        self._whole_prompts, self._pools_all = whole_prompts, pools_all
        self._tasks, self._micro_batches = tasks, micro_batches
        self._drafter = drafter or NoDrafts()
        self._arrivals = 0
        self._requests: dict[str, Request] = {}
        self._running: list[Request] = []
        self._waiting = waiting or FairQueue()
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._freed_slots, self._preempted_ids = list[int](), list[str]()
        self._outputs: list[EngineCoreOutput] = []

    @property
    def busy(self) -> bool:
        return bool(self._requests) or self.tiers.busy

    @property
    def needs_host_tokens(self) -> bool:
        """True if a running request must see its last token on the host before it can be scheduled."""
        return self._micro_batches == 1 and any(request.needs_host_tokens for request in self._running)

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._running),
            waiting=len(self._requests) - len(self._running),
            used_blocks=self.pool.num_used,
            total_blocks=self.pool.num_blocks,
            cached_blocks=len(self.pool.cached_blocks),
            saved_blocks=self._block_tables.num_blocks_saved,
            **self._counts.fields(),
            tiers=self.tiers.stats(),
            load_seconds=self.tiers.load_seconds,
            pages_lost=self.tiers.lost,
            prefix_unit=self.prefixes.unit,
            kept_blocks=self.pool.num_pinned,
            cache_tokens=self._block_tables.num_tokens_in_pool,
        )

    def requests(self) -> tuple[list[Request], list[Request]]:
        """The running and the waiting requests, each by priority and arrival."""
        waiting = [
            engine_request
            for engine_request in self._requests.values()
            if engine_request.status is not RequestStatus.RUNNING
        ]
        return sorted(self._running, key=lambda engine_request: engine_request.priority_key), sorted(
            waiting, key=lambda request: request.priority_key
        )

    def place(self, request: EngineCoreRequest) -> float:
        """The sort key of a request among those of its priority and tenant: the smallest goes first, and of equal ones
        the first that arrived. A class given by --scheduler-cls overrides it."""
        return 0.0

    def add(self, engine_request: EngineCoreRequest) -> None:
        """Queue a request, or answer it with an error output at once if it can never fit."""
        assert engine_request.id not in self._requests, f"request id {engine_request.id} is in use"
        if engine_request.task not in self._tasks:
            self._output_error(
                engine_request, f"the model serves {' and '.join(self._tasks)}, not {engine_request.task}"
            )
            return
        num_prompt = len(engine_request.prompt_ids)
        limit = engine_request.limit(self._max_model_len - num_prompt)
        if limit is None:
            self._output_error(engine_request, f"the prompt has {num_prompt} tokens, the context {self._max_model_len}")
            return
        drafting = self._drafter.can_draft(engine_request)
        turns = self._micro_batches > 1  # the first stage must know a token before it can compute it
        request = Request(
            engine_request, self._arrivals, limit, drafting=drafting, pools_all=self._pools_all, needs_host_tokens=turns
        )
        self._arrivals += 1
        longest = num_prompt + limit
        if (wrong := request.set_sort_key(self.place)) is not None:
            self._output_error(engine_request, wrong)
        elif self._needs.most(longest) > self.pool.num_blocks:
            fits = self._needs.longest(self.pool.num_blocks, longest)
            self._output_error(
                engine_request, f"prompt and max_tokens need {longest} tokens, the KV cache holds {fits}"
            )
        elif engine_request.emitted_ids and request.num_output_tokens >= limit:
            self._outputs.append(EngineCoreOutput(engine_request.id, [], finish_reason="length"))
        else:
            self._requests[engine_request.id] = request
            self._waiting.push(request)

    def abort(self, request_id: str) -> None:
        """End a request now and free its blocks. Does nothing for an unknown id: the request may just have finished."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish_request(request)
            self._outputs.append(EngineCoreOutput(request_id, [], finish_reason="abort"))

    def wait(self) -> None:
        """Wait briefly for loads that requests wait for. Called only while there is nothing to compute."""
        (self.tiers if self.tiers.busy else self._waiting).wait()

    def take_outputs(self) -> list[EngineCoreOutput]:
        """The outputs of add, abort and apply since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def schedule(self) -> SchedulerOutput | None:
        """Schedule the next step, and count it as computed from now on. None if there is nothing to compute."""
        for engine_request, why in self._waiting.advance():
            self._finish_request(engine_request)
            self._output_error(engine_request.engine_request, why)
        for engine_request in self.tiers.arrived():
            self._waiting.push(engine_request)
        self.prefixes.begin_step()
        self._preempt_for_fairness()
        planned, budget = self._schedule_running()
        drafts = self._propose_drafts(planned, budget)
        rows = [self._schedule_request(request, share, drafts.get(request, [])) for request, share in planned.items()]
        copies: list[BlockCopy] = []
        admissions = self._schedule_waiting(rows, copies, budget)
        if not rows:
            return None
        self._counts.steps += 1
        preempted, left, self._preempted_ids, self._freed_slots = self._preempted_ids, self._freed_slots, [], []
        told = self.tiers.take_fetched(), self._waiting.take_adapter_loads()
        return SchedulerOutput(rows, admissions, copies, preempted, *told, left, self.prefixes.snapshots.take_copies())

    def apply(self, batch: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Take in what a step computed. Steps are applied in the order in which they were scheduled."""
        if output.used_cuda_graph:
            self._counts.count_captured(prompts=batch.has_prefill)
        for row in batch.scheduled_requests:
            request = self._requests.get(row.request_id)
            if request is None:
                continue  # the request finished while the step was in flight
            if request.prompt_logprobs_pending:
                # A preempted prompt is computed again, perhaps in other chunks: append what is new.
                have = len(request.prompt_logprobs) - row.start
                request.prompt_logprobs += output.prompt_logprobs.get(row.request_id, [])[max(have, 0) :]
            if row.request_id in output.errors:
                self._finish_request(request)
                self._output_error(request.engine_request, *output.errors[row.request_id])
            elif row.sample:
                self._append_tokens(request, row, output)
            elif (vector := output.vectors.get(row.request_id)) is not None:
                self._finish_request(request)
                cached = request.num_cached_tokens or 0
                answer = EngineCoreOutput(row.request_id, [], finish_reason="stop", cached_tokens=cached, vector=vector)
                self._outputs.append(answer)

    def _preempt_for_fairness(self) -> None:
        """Preempt requests of tenants that run more than their share, if this is why a request of another lacks
        a slot or blocks. Called before the step is planned, because a step's own blocks cannot be reused."""
        request = self._waiting.peek()
        if (
            request is None
            or request.num_tokens_in_flight
            or not (candidates := self._waiting.preemption_candidates(request, self._running))
        ):
            return
        lacking = (
            self._block_tables.num_needed_blocks(request, self.prefixes.get_computed_blocks(request))
            - self.pool.num_free
        )
        victims: list[Request] = []
        for victim in candidates:
            if lacking > 0 or not (self._free_slots or victims):
                victims.append(victim)
                lacking -= self._block_tables.num_exclusive_blocks(victim)
        for victim in victims if lacking <= 0 else ():  # else they would lose their blocks in vain
            self._preempt(victim)

    def _schedule_running(self) -> tuple[dict[Request, ScheduledChunk], TokenBudget]:
        """The chunk of each running request, and what is left of the budget. Preempts if blocks run out."""
        budget = self._waiting.budget(self._max_tokens, self._running, whole=self._whole_prompts)
        planned: dict[Request, ScheduledChunk] = {}
        pending = {engine_request: engine_request.num_pending_tokens for engine_request in self._running}
        going = sum(
            engine_request.num_tokens_in_flight > 0 or pending[engine_request] == 1 for engine_request in self._running
        )
        share = -(-going // self._micro_batches)
        for engine_request in sorted(self._running, key=lambda request: (pending[request] > 1, request.priority_key)):
            room = min(budget.max_tokens(engine_request), self._max_tokens_per_request)
            part = engine_request.next_chunk(
                min(pending[engine_request], self.prefixes.snapshots.bound(engine_request, room)), room
            )
            if (
                not part
                or engine_request.status is not RequestStatus.RUNNING
                or (pending[engine_request] == 1 and len(planned) >= share)
            ):
                continue
            if self._block_tables.windowed_groups:
                self._block_tables.free_behind_window(engine_request)
            needed = self._block_tables.num_missing_blocks(
                engine_request, engine_request.num_computed_tokens + part.num_tokens
            )
            while needed > self.pool.num_free and engine_request.status is RequestStatus.RUNNING:
                victim = max(self._running, key=self._waiting.sort_key)
                budget.take(victim, -planned.pop(victim, ScheduledChunk(0, 0)).cost)
                self._preempt(victim)
            if engine_request.status is RequestStatus.RUNNING:
                self._block_tables.allocate_slots(engine_request, engine_request.num_computed_tokens + part.num_tokens)
                planned[engine_request] = part
                budget.take(engine_request, part.cost)
        return planned, budget

    def _schedule_waiting(
        self, rows: list[ScheduledRequest], copies: list[BlockCopy], budget: TokenBudget
    ) -> list[NewRequestData]:
        """Move waiting requests to free slots while budget and blocks last; preempts nobody. Appends to `rows` what is
        scheduled of them, and to `copies` the blocks of which they share only the beginning."""
        admissions = []
        while self._free_slots and (request := self._waiting.peek()) is not None:
            most = budget.left if self._whole_prompts else budget.max_tokens(request)
            cached = self.prefixes.get_computed_blocks(request)
            # Blocks for all its tokens, though this step may compute only some: else it would be preempted half-way.
            too_long = self._whole_prompts and len(request.token_ids) > most
            if (
                most <= 0
                or too_long
                or request.num_tokens_in_flight
                or self._block_tables.num_needed_blocks(request, cached) > self.pool.num_free
            ):
                break
            self._waiting.remove(request)
            if self.tiers.load(request, cached):
                continue  # its blocks are being loaded
            forked = self._start_request(request, cached)
            room = min(most, self._max_tokens_per_request)
            part = request.next_chunk(
                min(request.num_pending_tokens, self.prefixes.snapshots.bound(request, room)), room
            )
            self._block_tables.allocate_slots(request, request.num_computed_tokens + part.num_tokens)
            self.pool.ref(copy.source for copy in forked)  # else a load might fill it before it is copied
            copies += forked
            budget.take(request, part.cost)
            rows.append(self._schedule_request(request, part, []))
            how = (
                request.engine_request.params,
                request.engine_request.seed,
                self._waiting.adapter_slot(request),
                *request.engine_request.contents,
            )
            admissions.append(NewRequestData(rows[-1].slot, list(request.token_ids), request.num_prompt_tokens, *how))
        self.pool.unref([copy.source for copy in copies])
        return admissions

    def _start_request(self, request: Request, cached: list[int]) -> list[BlockCopy]:
        """Give a request a slot and its cached blocks. Returns the block copies that it needs."""
        request.status, request.slot = RequestStatus.RUNNING, self._free_slots.pop()
        self.prefixes.use_computed_blocks(request, cached)
        self._running.append(request)
        copies = self.prefixes.copy_partial_blocks(request)
        self._block_tables.free_behind_window(request)
        self.prefixes.count_hits(request)
        return copies

    def _propose_drafts(self, planned: dict[Request, ScheduledChunk], budget: TokenBudget) -> dict[Request, list[int]]:
        """Draft tokens for the requests all of whose known tokens are planned, as far as their limits, the budget and
        the free blocks allow. The planned chunks have their blocks already, so drafts cause no preemption."""
        asked = [
            (engine_request, engine_request.limit - engine_request.num_output_tokens - 1)
            for engine_request, part in planned.items()
            if engine_request.can_draft
            and engine_request.num_computed_tokens + part.num_tokens == len(engine_request.token_ids)
            and engine_request.limit - engine_request.num_output_tokens > 1
        ]
        found: dict[Request, list[int]] = {}
        if not asked or budget.left <= 0:
            return found
        guesses = self._drafter.propose(asked, sum(part.num_tokens for part in planned.values()))
        for (request, most), guess in zip(asked, guesses, strict=True):
            if not guess.token_ids:
                continue
            assert not request.num_tokens_in_flight
            known = len(request.token_ids)
            room = self._block_tables.num_tokens_with_room(request) - known
            most = min(most, budget.max_tokens(request), room, self.prefixes.snapshots.drafts(known, most))
            found[request] = drafts = guess.token_ids[: max(most, 0)]
            budget.take(request, len(drafts))
            self._block_tables.allocate_slots(request, known + len(drafts))
        return found

    def _schedule_request(self, request: Request, part: ScheduledChunk, drafts: list[int]) -> ScheduledRequest:
        """Count a chunk and its drafts as computed. Its full blocks can be shared from now on, even within this step:
        every layer stores the step's keys and values before any request attends to them."""
        assert request.slot is not None
        start, count = request.num_computed_tokens, part.num_tokens
        sample = request.limit > 0 and start + count == len(request.token_ids) + request.num_tokens_in_flight
        new_blocks = request.block_ids[request.num_sent_blocks :]
        if NULL_BLOCK in new_blocks:  # never read, but it must be a valid block id
            new_blocks = [max(page, 0) for page in new_blocks]
        request.count_encoded(part.encoder_chunks)
        request.num_computed_tokens += count + len(drafts)
        request.num_tokens_in_flight += sample + len(drafts)
        request.num_sent_blocks = len(request.block_ids)
        if start < request.num_prompt_tokens or request.num_charged_tokens < request.num_prompt_tokens:
            self._count_prompt(request, start)
        self.prefixes.cache_blocks(request, start, start + count)
        return ScheduledRequest(
            request.engine_request.id,
            request.slot,
            start,
            count + len(drafts),
            new_blocks,
            sample,
            drafts,
            list(part.encoder_chunks),
        )

    def _count_prompt(self, request: Request, start: int) -> None:
        """Count the prompt tokens from `start` on that are computed now, and charge them to the tenant."""
        done = min(request.num_computed_tokens, request.num_prompt_tokens)
        self._counts.prompt_tokens += max(0, done - start)
        self._waiting.charge(
            request.engine_request, prompt_tokens=max(0, done - max(start, request.num_charged_tokens))
        )
        request.num_charged_tokens = max(request.num_charged_tokens, done)

    def _append_tokens(self, request: Request, row: ScheduledRequest, output: ModelRunnerOutput) -> None:
        """Append the tokens that were sampled and accepted, up to one that finishes the request."""
        engine_request = request.engine_request
        new_ids = output.token_ids[engine_request.id]
        request.num_tokens_in_flight -= 1 + len(row.draft_token_ids)
        for taken, token in enumerate(new_ids, 1):
            request.token_ids.append(token)
            reason, stop = request.check_stop(token, self._eos)
            if reason is not None:
                new_ids = new_ids[:taken]
                break
        if (
            row.draft_token_ids
        ):  # rejected ones do not count as computed; a sequence preempted meanwhile has nothing computed
            request.num_computed_tokens = min(request.num_computed_tokens, len(request.token_ids) - 1)
            right = len(output.token_ids[engine_request.id]) - 1
            self._counts.count_drafts(len(row.draft_token_ids), right)
            self._drafter.record_acceptance(request, len(row.draft_token_ids), right)
        self._counts.generation_tokens += len(new_ids)
        self._waiting.charge(engine_request, output_tokens=len(new_ids))
        logprobs = output.logprobs.get(engine_request.id)
        prompt_logprobs = None
        if request.prompt_logprobs_pending:
            prompt_logprobs, request.prompt_logprobs_pending = [None, *request.prompt_logprobs], False
        self._outputs.append(
            EngineCoreOutput(
                engine_request.id,
                new_ids,
                logprobs=None if logprobs is None else logprobs[: len(new_ids)],
                prompt_logprobs=prompt_logprobs,
                finish_reason=reason,
                stop_reason=stop,
                cached_tokens=request.num_cached_tokens or 0,
            )
        )
        if reason is not None:
            self._finish_request(request)

    def _preempt(self, request: Request) -> None:
        """Free its blocks and let it wait. Later it is recomputed from what is still cached then."""
        self._free_slot(request)
        request.restart()
        self._waiting.push(request)
        self._preempted_ids.append(request.engine_request.id)
        self._counts.preemptions += 1

    def _finish_request(self, request: Request) -> None:
        del self._requests[request.engine_request.id]
        self._drafter.on_finished(request)
        if request.status is RequestStatus.RUNNING:
            self._free_slot(request)
        elif request.status is RequestStatus.WAITING:
            self._waiting.remove(request)
        self.tiers.forget(request)
        self._waiting.on_finished(request)
        request.status = RequestStatus.FINISHED

    def _free_slot(self, request: Request) -> None:
        assert request.slot is not None
        self._running.remove(request)
        self._free_slots.append(request.slot)
        self._freed_slots.append(request.slot)
        self.tiers.keep(request)
        self.prefixes.free(request)

    def _output_error(self, request: EngineCoreRequest, why: str, cause: Cause = "engine") -> None:
        self._outputs.append(EngineCoreOutput(request.id, [], finish_reason="error", error=why, cause=cause))
