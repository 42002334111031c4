"""Decides what each step computes, by one rule: a request's computed tokens catch up with its known tokens.

Decodes are scheduled first, then prefills in chunks, within a token budget. The scheduler touches no device and reads
no clock.

`schedule()` may run ahead of `update_from_output()`: a step counts as computed once it is scheduled, and its tokens are
appended when it is applied. Devices run steps in scheduling order, so freed blocks may be reallocated while a step is
in flight.
"""

from __future__ import annotations

from quire.engine.common.scheduler_output import (
    BlockCopy,
    ModelRunnerOutput,
    NewRequestData,
    ScheduledRequest,
    SchedulerOutput,
)
from quire.engine.common.types import EngineCoreOutput, EngineCoreRequest, ErrorCause
from quire.engine.core.drafter import NO_DRAFT, Draft, Drafter, draft_sources
from quire.engine.core.fair_queue import FairQueue, TokenBudget
from quire.engine.core.kv_cache.block_pool import NULL_BLOCK
from quire.engine.core.kv_cache.kv_cache_manager import KVCacheManager
from quire.engine.core.kv_offload import KVOffloader
from quire.engine.core.request import Request, RequestStatus, ScheduledChunk
from quire.engine.core.scheduler_config import SchedulerConfig
from quire.engine.core.stats import EngineStats, LiveCounters


class Scheduler:
    def __init__(
        self,
        config: SchedulerConfig,
        *,
        drafter: Drafter | None = None,
        waiting: FairQueue | None = None,
        tiers: KVOffloader | None = None,
    ) -> None:
        """A request that may have drafts is never scheduled before the results of its last step are applied."""
        self._config = config
        self._max_chunk_tokens = config.max_chunk_tokens
        self._counts = LiveCounters()
        self.kv_cache_manager = KVCacheManager(config, self._counts)
        self.kv_offloader = tiers
        if tiers is not None:
            tiers.attach_cache(self.kv_cache_manager.block_pool, self.kv_cache_manager.prefix_cache)
        self._drafter = drafter
        self._eos_token_ids = frozenset(config.eos_token_ids)
        self._num_arrivals = 0
        self._requests: dict[str, Request] = {}
        self._running: list[Request] = []
        self._waiting = waiting or FairQueue()
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._freed_slots: list[int] = []
        self._preempted_ids: list[str] = []
        self._outputs: list[EngineCoreOutput] = []

    @property
    def has_requests(self) -> bool:
        return bool(self._requests) or (self.kv_offloader is not None and self.kv_offloader.has_open_loads)

    @property
    def needs_host_tokens(self) -> bool:
        """True if the last token of a running request must reach the host before that request's next step."""
        return self._config.micro_batches == 1 and any(request.needs_host_tokens for request in self._running)

    def make_stats(self) -> EngineStats:
        offloader = self.kv_offloader
        return EngineStats(
            running=len(self._running),
            waiting=len(self._requests) - len(self._running),
            **self.kv_cache_manager.make_stats(),
            **self._counts.as_dict(),
            tiers=[] if offloader is None else offloader.tier_stats(),
            load_seconds=0.0 if offloader is None else offloader.load_seconds,
            pages_lost=0 if offloader is None else offloader.num_blocks_not_stored,
        )

    def list_requests(self) -> tuple[list[Request], list[Request]]:
        waiting = [each for each in self._requests.values() if each.status is not RequestStatus.RUNNING]
        return sorted(self._running, key=lambda each: each.priority_key), sorted(
            waiting, key=lambda request: request.priority_key
        )

    def find_request(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    def place(self, request: EngineCoreRequest) -> float:
        """Return the request's sort key. Within a priority and tenant, the smallest goes first. A class given by
        --scheduler-cls may override this.
        """
        return 0.0

    def add_request(self, engine_request: EngineCoreRequest) -> None:
        """Queue a request, or an error output if the request can never fit."""
        assert engine_request.id not in self._requests, f"request id {engine_request.id} is in use"
        if engine_request.task not in self._config.tasks:
            self._queue_error_output(
                engine_request, f"the model serves {' and '.join(self._config.tasks)}, not {engine_request.task}"
            )
            return
        num_prompt = len(engine_request.prompt_ids)
        limit = engine_request.output_token_limit(self._config.max_model_len - num_prompt)
        if limit is None:
            self._queue_error_output(
                engine_request, f"the prompt has {num_prompt} tokens, the context {self._config.max_model_len}"
            )
            return
        drafter, params = self._drafter, engine_request.sampling_params
        drafting = drafter is not None and params is not None and not (drafter.needs_grammar and params.grammar is None)
        is_pipelined = self._config.micro_batches > 1  # the first stage must have a token before it can compute it
        has_grammar = params is not None and params.grammar is not None
        request = Request(
            engine_request,
            self._num_arrivals,
            limit,
            drafting=drafting,
            pools_all_tokens=self._config.pools_all_tokens,
            needs_host_tokens=is_pipelined or (has_grammar and self._config.waits_for_grammar_tokens),
        )
        self._num_arrivals += 1
        max_total_tokens = num_prompt + limit
        num_fitting_tokens = self.kv_cache_manager.num_tokens_fitting_empty_cache(max_total_tokens)
        if (problem := request.set_sort_key_or_return_error(self.place)) is not None:
            self._queue_error_output(engine_request, problem)
        elif num_fitting_tokens < max_total_tokens:
            self._queue_error_output(
                engine_request,
                f"prompt and max_tokens need {max_total_tokens} tokens, the KV cache holds {num_fitting_tokens}",
            )
        elif engine_request.emitted_ids and request.num_output_tokens >= limit:
            self._outputs.append(EngineCoreOutput(engine_request.id, [], finish_reason="length"))
        else:
            self._requests[engine_request.id] = request
            self._waiting.push_request(request)

    def abort_request(self, request_id: str) -> None:
        """End a request with finish_reason "abort". Unknown ids are ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish_request(request)
            self._outputs.append(EngineCoreOutput(request_id, [], finish_reason="abort"))

    def wait_for_loads(self) -> None:
        """Wait briefly for blocks or adapters. Called only while there is nothing to compute."""
        if self.kv_offloader is not None and self.kv_offloader.has_open_loads:
            self.kv_offloader.wait_for_loads()
        else:
            self._waiting.wait_for_loads()

    def take_outputs(self) -> list[EngineCoreOutput]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def schedule(self) -> SchedulerOutput | None:
        """Plan a step, which counts as computed from now on. None if there is nothing to compute."""
        for waiting_request, why in self._waiting.process_adapter_loads():
            self._finish_request(waiting_request)
            self._queue_error_output(waiting_request.engine_request, why)
        if self.kv_offloader is not None:
            for waiting_request in self.kv_offloader.take_loaded_requests():
                self._waiting.push_request(waiting_request)
        self.kv_cache_manager.begin_step()
        self._preempt_for_fairness()
        chunks, budget = self._schedule_running()
        drafts = {} if self._drafter is None else self._draft_tokens_for_step(self._drafter, chunks, budget)
        scheduled_requests = [
            self._commit_scheduled_chunk(request, chunk, drafts.get(request, NO_DRAFT))
            for request, chunk in chunks.items()
        ]
        copies: list[BlockCopy] = []
        new_requests = self._schedule_waiting(scheduled_requests, copies, budget)
        if not scheduled_requests:
            return None
        self._counts.steps += 1
        preempted_ids, self._preempted_ids = self._preempted_ids, []
        freed_slots, self._freed_slots = self._freed_slots, []
        return SchedulerOutput(
            scheduled_requests,
            new_requests,
            copies,
            preempted_ids,
            [] if self.kv_offloader is None else self.kv_offloader.take_load_records(),
            self._waiting.take_adapter_load_times(),
            freed_slots,
            self.kv_cache_manager.take_slot_copies(),
        )

    def update_from_output(self, scheduler_output: SchedulerOutput, model_output: ModelRunnerOutput) -> None:
        """Apply a step's output. Steps must be applied in scheduling order."""
        if model_output.used_cuda_graph:
            self._counts.count_cuda_graph_step(has_prefill=scheduler_output.has_prefill)
        for scheduled_request in scheduler_output.scheduled_requests:
            request = self._requests.get(scheduled_request.request_id)
            if request is None:
                continue
            if request.prompt_logprobs_pending:
                # A preempted prompt may be computed again in different chunks, so skip the positions that are already
                # recorded.
                num_known = len(request.prompt_logprobs) - scheduled_request.start
                request.prompt_logprobs += model_output.prompt_logprobs.get(scheduled_request.request_id, [])[
                    max(num_known, 0) :
                ]
            if scheduled_request.request_id in model_output.errors:
                self._finish_request(request)
                self._queue_error_output(request.engine_request, *model_output.errors[scheduled_request.request_id])
            elif scheduled_request.should_sample:
                self._append_tokens_and_output(request, scheduled_request, model_output)
            elif (vector := model_output.vectors.get(scheduled_request.request_id)) is not None:
                self._finish_request(request)
                cached = request.num_cached_tokens or 0
                answer = EngineCoreOutput(
                    scheduled_request.request_id, [], finish_reason="stop", cached_tokens=cached, vector=vector
                )
                self._outputs.append(answer)

    def _preempt_for_fairness(self) -> None:
        """This runs before a step is planned, because blocks of requests in the plan cannot be reused."""
        request = self._waiting.peek()
        if (
            request is None
            or request.num_tokens_in_flight
            or not (candidates := self._waiting.preemption_candidates(request, self._running))
        ):
            return
        computed = self.kv_cache_manager.get_computed_blocks(request)
        lacking = self.kv_cache_manager.num_lacking_blocks(request, computed)
        victims: list[Request] = []
        for victim in candidates:
            if lacking > 0 or not (self._free_slots or victims):
                victims.append(victim)
                lacking -= self.kv_cache_manager.num_exclusive_blocks(victim)
        for victim in victims if lacking <= 0 else ():  # if victims free too few blocks, preempting them is useless
            self._preempt(victim)

    def _schedule_running(self) -> tuple[dict[Request, ScheduledChunk], TokenBudget]:
        budget = self._waiting.make_step_budget(
            self._config.max_num_batched_tokens, self._running, whole_prompts=self._config.whole_prompts
        )
        chunks: dict[Request, ScheduledChunk] = {}
        pending = {running_request: running_request.num_pending_tokens for running_request in self._running}
        num_decoding = sum(
            running_request.num_tokens_in_flight > 0 or pending[running_request] == 1
            for running_request in self._running
        )
        max_decoding = -(-num_decoding // self._config.micro_batches)
        for running_request in sorted(self._running, key=lambda request: (pending[request] > 1, request.priority_key)):
            max_tokens = min(budget.max_tokens(running_request), self._max_chunk_tokens)
            limit = self.kv_cache_manager.limit_tokens_to_snapshot(running_request, max_tokens)
            chunk = running_request.next_chunk(min(pending[running_request], limit), max_tokens)
            if (
                not chunk
                or running_request.status is not RequestStatus.RUNNING
                or (pending[running_request] == 1 and len(chunks) >= max_decoding)
            ):
                continue
            num_tokens = running_request.num_computed_tokens + chunk.num_tokens
            while not self.kv_cache_manager.allocate_slots(running_request, num_tokens):
                victim = max(self._running, key=self._waiting.sort_key)
                budget.spend(victim, -chunks.pop(victim, ScheduledChunk(0, 0)).cost)
                self._preempt(victim)
                if victim is running_request:
                    break
            else:
                chunks[running_request] = chunk
                budget.spend(running_request, chunk.cost)
        return chunks, budget

    def _schedule_waiting(
        self, scheduled_requests: list[ScheduledRequest], copies: list[BlockCopy], budget: TokenBudget
    ) -> list[NewRequestData]:
        """Preempts no other requests."""
        new_requests = []
        while self._free_slots and (request := self._waiting.peek()) is not None:
            max_tokens = budget.remaining if self._config.whole_prompts else budget.max_tokens(request)
            cached = self.kv_cache_manager.get_computed_blocks(request)
            # There must be free blocks for all tokens, not only for this step's. Otherwise the request would soon be
            # preempted.
            too_long = self._config.whole_prompts and len(request.token_ids) > max_tokens
            if (
                max_tokens <= 0
                or too_long
                or request.num_tokens_in_flight
                or self.kv_cache_manager.num_lacking_blocks(request, cached) > 0
            ):
                break
            self._waiting.remove_request(request)
            if self.kv_offloader is not None and self.kv_offloader.try_begin_load(request, cached):
                continue
            partial_copies = self._start_request(request, cached)
            max_chunk = min(max_tokens, self._max_chunk_tokens)
            limit = self.kv_cache_manager.limit_tokens_to_snapshot(request, max_chunk)
            chunk = request.next_chunk(min(request.num_pending_tokens, limit), max_chunk)
            has_blocks = self.kv_cache_manager.allocate_slots(request, request.num_computed_tokens + chunk.num_tokens)
            assert has_blocks, "allocation beyond the pool"
            if partial_copies:
                self.kv_cache_manager.ref_copy_sources(partial_copies)
                copies += partial_copies
            budget.spend(request, chunk.cost)
            scheduled_requests.append(self._commit_scheduled_chunk(request, chunk, NO_DRAFT))
            engine_request = request.engine_request
            new_requests.append(
                NewRequestData(
                    scheduled_requests[-1].slot,
                    list(request.token_ids),
                    request.num_prompt_tokens,
                    engine_request.params,
                    engine_request.seed,
                    self._waiting.adapter_slot(request),
                    engine_request.spans,
                    engine_request.images,
                    engine_request.cache_salt,
                )
            )
        if copies:
            self.kv_cache_manager.unref_copy_sources(copies)
        return new_requests

    def _start_request(self, request: Request, cached: list[int]) -> list[BlockCopy]:
        request.status, request.slot = RequestStatus.RUNNING, self._free_slots.pop()
        self._running.append(request)
        return self.kv_cache_manager.use_computed_blocks(request, cached)

    def _draft_tokens_for_step(
        self, drafter: Drafter, chunks: dict[Request, ScheduledChunk], budget: TokenBudget
    ) -> dict[Request, Draft]:
        """The chunks already have their blocks, so drafts cause no preemption."""
        draft_requests = [
            (each, each.max_output_tokens - each.num_output_tokens - 1)
            for each, chunk in chunks.items()
            if each.can_draft
            and each.num_computed_tokens + chunk.num_tokens == len(each.token_ids)
            and each.max_output_tokens - each.num_output_tokens > 1
        ]
        drafts: dict[Request, Draft] = {}
        if not draft_requests or budget.remaining <= 0:
            return drafts
        proposals = drafter.propose(draft_requests, sum(chunk.num_tokens for chunk in chunks.values()))
        for (request, max_drafts), proposal in zip(draft_requests, proposals, strict=True):
            if not proposal.token_ids:
                continue
            assert not request.num_tokens_in_flight
            num_known = len(request.token_ids)
            max_drafts = min(budget.max_tokens(request), self.kv_cache_manager.limit_draft_tokens(request, max_drafts))
            drafts[request] = draft = proposal.truncate_to(max(max_drafts, 0))
            budget.spend(request, len(draft.token_ids))
            has_blocks = self.kv_cache_manager.allocate_slots(request, num_known + len(draft.token_ids))
            assert has_blocks, "allocation beyond the pool"
        return drafts

    def _commit_scheduled_chunk(self, request: Request, chunk: ScheduledChunk, draft: Draft) -> ScheduledRequest:
        """Other requests of the step can share the chunk's full blocks, because each layer stores keys and values
        before it attends.
        """
        assert request.slot is not None
        start, count = request.num_computed_tokens, chunk.num_tokens
        num_drafts = len(draft.token_ids)
        sample = (
            request.max_output_tokens > 0 and start + count == len(request.token_ids) + request.num_tokens_in_flight
        )
        new_blocks = request.block_ids[request.num_sent_blocks :]
        if NULL_BLOCK in new_blocks:  # such blocks are never read, but the device needs valid ids
            new_blocks = [max(block, 0) for block in new_blocks]
        if chunk.encoder_chunks:
            request.mark_encoded(chunk.encoder_chunks)
        request.num_computed_tokens += count + num_drafts
        request.num_tokens_in_flight += sample + num_drafts
        request.num_sent_blocks = len(request.block_ids)
        if start < request.num_prompt_tokens or request.num_charged_tokens < request.num_prompt_tokens:
            self._charge_prompt_tokens(request, start)
        self.kv_cache_manager.cache_blocks(request, start, start + count)
        return ScheduledRequest(
            request.engine_request.id,
            request.slot,
            start,
            count + num_drafts,
            new_blocks,
            sample,
            draft.token_ids,
            list(chunk.encoder_chunks),
            draft_sources(draft) if num_drafts else [],
        )

    def _charge_prompt_tokens(self, request: Request, start: int) -> None:
        """The prompt tokens from `start` on that are now computed are counted each time, but charged only once."""
        done = min(request.num_computed_tokens, request.num_prompt_tokens)
        self._counts.prompt_tokens += max(0, done - start)
        self._waiting.charge(
            request.engine_request, prompt_tokens=max(0, done - max(start, request.num_charged_tokens))
        )
        request.num_charged_tokens = max(request.num_charged_tokens, done)

    def _append_tokens_and_output(
        self, request: Request, scheduled_request: ScheduledRequest, output: ModelRunnerOutput
    ) -> None:
        engine_request = request.engine_request
        new_ids = output.token_ids[engine_request.id]
        request.num_tokens_in_flight -= 1 + len(scheduled_request.draft_token_ids)
        for count, token in enumerate(new_ids, 1):
            request.token_ids.append(token)
            reason, stop_id = request.finish_reason_after_token(token, self._eos_token_ids)
            if reason is not None:
                new_ids = new_ids[:count]
                break
        if (
            scheduled_request.draft_token_ids
        ):  # Rejected drafts are not computed; a request preempted meanwhile has nothing computed.
            request.num_computed_tokens = min(request.num_computed_tokens, len(request.token_ids) - 1)
            num_accepted = len(output.token_ids[engine_request.id]) - 1
            self._counts.count_drafts(scheduled_request.draft_sources, num_accepted)
            assert self._drafter is not None
            self._drafter.record_acceptance(request, len(scheduled_request.draft_token_ids), num_accepted)
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
                stop_reason=stop_id,
                cached_tokens=request.num_cached_tokens or 0,
            )
        )
        if reason is not None:
            self._finish_request(request)

    def _preempt(self, request: Request) -> None:
        self._free_slot_and_blocks(request)
        request.reset_to_waiting()
        self._waiting.push_request(request)
        self._preempted_ids.append(request.engine_request.id)
        self._counts.preemptions += 1

    def _finish_request(self, request: Request) -> None:
        del self._requests[request.engine_request.id]
        if self._drafter is not None and request.can_draft:
            self._drafter.forget_request(request)
        if request.status is RequestStatus.RUNNING:
            self._free_slot_and_blocks(request)
        elif request.status is RequestStatus.WAITING:
            self._waiting.remove_request(request)
        if self.kv_offloader is not None:
            self.kv_offloader.cancel_load(request)
        self._waiting.release_adapter(request)
        request.status = RequestStatus.FINISHED

    def _free_slot_and_blocks(self, request: Request) -> None:
        assert request.slot is not None
        self._running.remove(request)
        self._free_slots.append(request.slot)
        self._freed_slots.append(request.slot)
        if self.kv_offloader is not None:
            self.kv_offloader.offload_blocks_before_free(request)
        self.kv_cache_manager.free(request)

    def _queue_error_output(self, request: EngineCoreRequest, why: str, cause: ErrorCause = "engine") -> None:
        self._outputs.append(EngineCoreOutput(request.id, [], finish_reason="error", error=why, cause=cause))
