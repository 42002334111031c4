from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quire.engine.common.executor import BlockMover, PendingOutput
from quire.engine.common.request_params import PoolingParams, SamplingParams
from quire.engine.common.scheduler_output import NewRequestData, ScheduledRequest, SchedulerOutput
from quire.engine.layers.pooling import Pooler, PoolingChunk
from quire.engine.models.decoder import Decoder
from quire.engine.worker.batch_sampler import BatchSampler, logprob_indices_of
from quire.engine.worker.block_movers import choose_block_mover
from quire.engine.worker.device_memory import KVPrefaulter, copy_block_prefix, copy_slot_states, kv_cache_by_layer
from quire.engine.worker.draft_head_runner import DraftHeadRunner, HiddenStates
from quire.engine.worker.dummy_inputs import dummy_prefill_inputs
from quire.engine.worker.graphs.decode_graphs import DecodeGraphs, StepFunctions
from quire.engine.worker.graphs.graph_capture import GraphOutputs
from quire.engine.worker.graphs.graphable_steps import GraphableSteps
from quire.engine.worker.graphs.mixed_batch_graphs import MixedBatchGraphs
from quire.engine.worker.images.encoder_cache import ImageEncoderCache
from quire.engine.worker.input_batch import SlotRequest
from quire.engine.worker.kernel_compilation.kernel_compiler import CompileResult, compile_variants
from quire.engine.worker.kernel_compilation.kernel_variants import launch_kernel_variants
from quire.engine.worker.loading.drafts.device_drafter import DeviceDrafter
from quire.engine.worker.loading.kv_allocation import RunnerResources
from quire.engine.worker.pending_step import (
    PendingStep,
    PreparedBatch,
    PromptLogprobTargets,
    UnsampledStep,
)
from quire.engine.worker.sampling.sampler import logprob_tensors
from quire.engine.worker.sampling.sampling_rules import make_request_sampling_rules
from quire.engine.worker.sampling.slot_grammars import SlotGrammars
from quire.engine.worker.step_splitting import make_step_splitter
from quire.kernels.backend import NO_ADAPTERS, LinearContext
from quire.kernels.gpu.host_transfer import HostDownload, upload_arrays
from quire.kernels.probes.backend_probe import GraphCapture

if TYPE_CHECKING:
    from quire.kernels.gpu.kernel_variant import KernelVariant

_MAX_LOGIT_ROWS = 256
"""A row takes 600 KB if the vocabulary has 150,000 tokens."""

_WARM_UP_PROMPT_LENGTHS = (2, 16, 128)
"""Lengths in tokens."""


class ModelRunner:
    def __init__(
        self,
        model: Decoder,
        allocation: RunnerResources,
        grammars: SlotGrammars,
        eos_token_ids: tuple[int, ...],
        pooler: Pooler | None = None,
        draft_heads: DraftHeadRunner | None = None,
        encoder_cache: ImageEncoderCache | None = None,
        captures_mixed_batches: bool = False,
    ) -> None:
        """To capture graphs, the input batch needs a scratch block."""
        kv_tensors = allocation.kv_tensors
        slots = allocation.input_batch
        capture = allocation.capture
        self._model = model
        self._encoder_cache = encoder_cache
        if encoder_cache is not None and encoder_cache.positions.uses_mrope:
            slots.set_rope_offset(slots.scratch_slot, 0)
        self._kv_tensors = kv_tensors
        self._kv_cache = kv_cache_by_layer(model, kv_tensors, slots.recurrent_states)
        self._input_batch = slots
        self._grammars = grammars
        self._eos_token_ids = eos_token_ids
        self._pooler = pooler
        self._draft_heads = draft_heads
        self._prefaulter = (
            KVPrefaulter(kv_cache_by_layer(model, kv_tensors))
            if slots.device.type == "cpu" and capture is None
            else None
        )
        self._aux_layers = () if draft_heads is None else draft_heads.head.aux_layers
        self._graphable_steps = GraphableSteps(
            model, self._kv_cache, slots, self._aux_layers, None if draft_heads is None else draft_heads.compute_states
        )
        self.decode_graphs = None if capture is None else self._make_decode_graphs(capture)
        self.mixed_batch_graphs: MixedBatchGraphs | None = None
        if capture is not None and captures_mixed_batches:
            run_draft_heads = (
                self._graphable_steps.compute_head_states_after_mixed_batch
                if self._draft_heads_read_all_tokens
                else None
            )
            buffers = (capture, slots, self._graphable_steps.hidden_width, model.dtype)
            self.mixed_batch_graphs = MixedBatchGraphs(
                self._graphable_steps.compute_mixed_batch_hidden,
                *buffers,
                run_draft_heads=run_draft_heads,
                group=model.shard.group,
                max_step_tokens=allocation.max_step_tokens,
            )
        self._sampler = BatchSampler(model, slots, grammars)
        self._step_splitter = make_step_splitter(
            lambda batch: self._compute_and_sample_batch(self._plan_batch(batch)), slots, model.shard.group
        )
        self._download_stream = torch.cuda.Stream(slots.device) if slots.device.type == "cuda" else None

    def _make_decode_graphs(self, capture: GraphCapture) -> DecodeGraphs:
        functions = StepFunctions(
            decode=self._graphable_steps.compute_decode_hidden,
            sample=self._sample_greedy_in_graph if self._model.has_head else None,
            run_draft_heads=self._graphable_steps.compute_head_states_after_decode
            if self._draft_heads_read_all_tokens
            else None,
        )
        return DecodeGraphs(
            functions,
            capture,
            self._input_batch,
            self._graphable_steps.hidden_width,
            self._model.dtype,
            adapters=self._model.adapters is not None,
            group=self._model.shard.group,
        )

    @property
    def model(self) -> Decoder:
        return self._model

    @property
    def _draft_heads_read_all_tokens(self) -> bool:
        return self._draft_heads is not None and self._draft_heads.reads_all_tokens

    @torch.inference_mode()
    def launch(self, scheduler_output: SchedulerOutput) -> PendingOutput:
        """On a GPU, this only queues work, and the host does not wait. On the device, a step reads the tokens that
        earlier steps sampled and stored.
        """
        if self._step_splitter is None:
            return self._compute_and_sample_batch(self._prepare_batch(scheduler_output))
        self._update_slots(scheduler_output)
        self._apply_copies(scheduler_output)
        return self._step_splitter.launch(SchedulerOutput(self._rows_with_tokens(scheduler_output).scheduled_requests))

    def _prepare_batch(self, scheduler_output: SchedulerOutput) -> PreparedBatch:
        self._update_slots(scheduler_output)
        return self._plan_batch(self._rows_with_tokens(scheduler_output))

    def _rows_with_tokens(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        return scheduler_output if self._encoder_cache is None else scheduler_output.without_encoder_only

    def _plan_batch(self, scheduler_output: SchedulerOutput) -> PreparedBatch:
        """May be called several times for a step, with parts of its batch."""
        sample_targets = self._input_batch.make_sample_targets(scheduler_output)
        if not scheduler_output.scheduled_requests:
            return PreparedBatch(scheduler_output, sample_targets, None)
        encoder_cache = self._encoder_cache
        has_tokens_before_image_end = (
            encoder_cache is not None
            and encoder_cache.positions.has_rows_before_last_image_end(
                scheduler_output.scheduled_requests, self._get_new_request
            )
        )
        in_decode_graph = (
            self.decode_graphs is not None
            and not has_tokens_before_image_end
            and self.decode_graphs.can_run(scheduler_output)
            and self._input_batch.try_record_state_lengths(scheduler_output.scheduled_requests)
        )
        graph_plan = None
        if self.mixed_batch_graphs is not None and not (has_tokens_before_image_end or in_decode_graph):
            graph_plan = self.mixed_batch_graphs.plan_batch(scheduler_output)
        inputs = None if in_decode_graph or graph_plan is not None else self._input_batch.build_inputs(scheduler_output)
        if encoder_cache is None or inputs is None or not has_tokens_before_image_end:
            return PreparedBatch(scheduler_output, sample_targets, inputs, graph_plan=graph_plan)
        image_metadata = encoder_cache.positions.apply_to_metadata(
            inputs.metadata, scheduler_output.scheduled_requests, self._get_new_request
        )
        return PreparedBatch(
            scheduler_output,
            sample_targets,
            replace(inputs, metadata=image_metadata),
            encoder_cache.gather_features(scheduler_output.scheduled_requests, self._get_new_request),
        )

    def _update_slots(self, scheduler_output: SchedulerOutput) -> None:
        self._admit_requests(scheduler_output)
        self._input_batch.write_draft_tokens(scheduler_output.scheduled_requests)
        self._input_batch.append_blocks(scheduler_output.scheduled_requests)
        if self._prefaulter is not None:
            self._prefaulter.mark_used(
                page for row in scheduler_output.scheduled_requests for page in row.new_block_ids
            )
        if self._encoder_cache is not None:
            self._encoder_cache.run_scheduled_encoder_chunks(scheduler_output, self._get_new_request)

    def _apply_copies(self, scheduler_output: SchedulerOutput) -> None:
        """The copies read what earlier steps computed."""
        for copy in scheduler_output.block_copies:
            copy_block_prefix(self._kv_tensors, copy, self._input_batch.context_shard.token_range_in_page)
            if self._draft_heads is not None:
                copy_block_prefix(
                    self._draft_heads.kv_tensors, copy, self._input_batch.context_shard.token_range_in_page
                )
        for slots in scheduler_output.slot_copies:
            copy_slot_states(self._input_batch.recurrent_states, slots)

    def _compute_and_sample_batch(self, prepared: PreparedBatch) -> PendingStep | UnsampledStep:
        """Call in the order of the `_prepare_batch` calls, before a new request gets any of the slots.

        Logits are always computed here, where a batch that runs out of memory can still be split.
        """
        batch = prepared.scheduler_output
        sample_targets = prepared.sample_targets
        self._apply_copies(batch)
        if not batch.scheduled_requests:
            nothing = HostDownload([torch.empty(0, dtype=torch.int64)], None)
            return PendingStep([], [], [], [], None, nothing, self._grammars)
        chunks: list[PromptLogprobTargets] = []
        extra_tensors: list[Tensor] = []
        pooled_rows = [] if self._pooler is None else self._make_pooling_chunks(batch.scheduled_requests)
        needs_all_tokens = bool(pooled_rows) or any(
            self._wants_prompt_logprobs(row) for row in batch.scheduled_requests
        )
        slot_requests = [self._get_slot_request(row) for row in sample_targets.rows]
        all_greedy = self._sampler.samples_greedily(slot_requests)
        hidden = self._run_model(prepared, all_tokens=needs_all_tokens, all_greedy=all_greedy)
        if needs_all_tokens and hidden.all_hidden is not None:
            chunks, extra_tensors = self._compute_prompt_logprobs(batch.scheduled_requests, hidden.all_hidden)
            if self._pooler is not None and pooled_rows:
                extra_tensors.append(self._pooler.pool(pooled_rows, hidden.all_hidden))
        if all_greedy and sample_targets.rows:
            sampled_tensors = [
                self._sampler.sample_and_write_greedy(
                    hidden.sample_hidden,
                    sample_targets.device_slots,
                    sample_targets.device_positions,
                    sample_targets.linear_context,
                )
                if hidden.sampled_tokens is None
                else hidden.sampled_tokens
            ]
            return self._finish_launch(prepared, slot_requests, hidden, chunks, sampled_tensors + extra_tensors)
        logits = self._sampler.compute_logits_and_finite_flags(sample_targets, hidden.sample_hidden)

        @torch.inference_mode()
        def launch_sampling() -> PendingStep:
            sampled_tensors = self._sampler.sample_and_write(sample_targets, slot_requests, logits)
            step = self._finish_launch(prepared, slot_requests, hidden, chunks, sampled_tensors + extra_tensors)
            if self._grammars.requests:
                self._grammars.mark_sampled(sample_targets.rows)  # last, because the batch may be computed again
            return step

        if self._grammars.requests and self._grammars.lacks_tokens(sample_targets.rows):
            return UnsampledStep(launch_sampling)
        return launch_sampling()

    def _finish_launch(
        self,
        prepared: PreparedBatch,
        slot_requests: list[SlotRequest],
        hidden: HiddenStates,
        chunks: list[PromptLogprobTargets],
        tensors: list[Tensor],
    ) -> PendingStep:
        """Launches updates of draft heads, and the download of `tensors` (see PendingStep)."""
        batch, sample_targets = prepared.scheduler_output, prepared.sample_targets
        if self._draft_heads is not None:
            self._draft_heads.update_states(batch, sample_targets, hidden, prepared.inputs)
        return PendingStep(
            list(zip(sample_targets.rows, slot_requests, strict=True)),
            logprob_indices_of(slot_requests),
            chunks,
            [] if self._pooler is None else self._make_pooling_chunks(batch.scheduled_requests),
            None if self._pooler is None else self._pooler.pooling,
            HostDownload(tensors, self._download_stream),
            self._grammars,
            hidden.used_cuda_graph,
        )

    @torch.inference_mode()
    def warm_up_next(self) -> bool:
        """Does the next part of the warm-up, which takes about a second at most. Returns False if nothing is left to
        do.
        """
        if self._prefaulter is not None:
            return self._prefaulter.touch_next()
        if self.decode_graphs is not None and self.decode_graphs.capture_next():
            return True
        return self.mixed_batch_graphs is not None and self.mixed_batch_graphs.capture_next()

    def warm_sampler(self) -> None:
        self._sampler.warm_up()

    @torch.inference_mode()
    def warm_prompts(self) -> None:
        """Runs dummy prompts of several lengths, and warms up the encoder if there is one. Which kernels run depends on
        the number of query tokens, and compiling them takes seconds.
        """
        if self._encoder_cache is not None:
            self._encoder_cache.warm_up_tower()
        for length in _WARM_UP_PROMPT_LENGTHS:
            inputs = dummy_prefill_inputs(self._input_batch, length)
            self._model.forward(inputs.token_ids, inputs.metadata, self._kv_cache, inputs.sampled_indices)

    def kernel_variants(self, step_tokens: int) -> list[KernelVariant]:
        from quire.kernels.gpu.kernel_variant import dry_run_for_variants

        model, group = self._model, self._model.shard.group
        with nullcontext() if group is None else group.suspend_communication():
            return dry_run_for_variants(
                partial(launch_kernel_variants, model, self._kv_cache, self._input_batch, step_tokens)
            )

    def compile_kernels(self, step_tokens: int, drafter: DeviceDrafter | None) -> CompileResult:
        from quire.kernels.gpu.kernel_variant import dry_run_for_variants

        variants = self.kernel_variants(step_tokens)
        if drafter is not None:
            variants += dry_run_for_variants(partial(drafter.launch_kernel_variants, step_tokens))
        return compile_variants(list(dict.fromkeys(variants)), self._model.report_progress)

    def make_block_mover(self) -> BlockMover:
        pages = self._kv_tensors if self._draft_heads is None else [*self._kv_tensors, *self._draft_heads.kv_tensors]
        return choose_block_mover(
            pages, self._model.kernel_backend_identity, None if self._prefaulter is None else self._prefaulter.mark_used
        )

    def make_state_offload_mover(self) -> BlockMover | None:
        state_tensors = [each[None] for layer in self._input_batch.recurrent_states for each in layer if each.numel()]
        return choose_block_mover(state_tensors, self._model.kernel_backend_identity) if state_tensors else None

    def preload_grammar_compiler(self) -> None:
        self._grammars.start_loading_compiler()

    def _admit_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Pooling requests get default sampling rules, which they never use."""
        if self._grammars.requests:
            for slot in scheduler_output.freed_slots:
                self._grammars.release_slot(slot)
        for new_request in scheduler_output.new_requests:
            params = new_request.params
            rules = make_request_sampling_rules(
                SamplingParams() if isinstance(params, PoolingParams) else params, self._eos_token_ids
            )
            self._input_batch.admit_request(SlotRequest(new_request, rules))
            if self._encoder_cache is not None and self._encoder_cache.positions.uses_mrope:
                self._input_batch.set_rope_offset(
                    new_request.slot, self._encoder_cache.positions.rope_offset(new_request)
                )
            if self._grammars.requests or rules.params.grammar is not None:
                self._grammars.admit_request(new_request)

    def _make_pooling_chunks(self, rows: list[ScheduledRequest]) -> list[PoolingChunk]:
        pooled_rows, begin = [], 0
        for row in rows:
            new_request = self._get_slot_request(row).new_request
            if isinstance(new_request.params, PoolingParams):
                pooled_rows.append(PoolingChunk(row, begin, new_request.num_prompt_tokens, new_request.params))
            begin += row.num_tokens
        return pooled_rows

    def _run_model(self, prepared: PreparedBatch, *, all_tokens: bool, all_greedy: bool) -> HiddenStates:
        if self._model.offload is not None:
            self._model.offload.prepare_for_step()
        inputs, features = prepared.inputs, prepared.features
        all_tokens = all_tokens or self._draft_heads_read_all_tokens
        if prepared.graph_plan is not None:
            assert self.mixed_batch_graphs is not None
            return self._unpack_graph_outputs(
                self.mixed_batch_graphs.run_planned(prepared.graph_plan, needs_all_hidden=all_tokens)
            )
        if inputs is None:
            assert self.decode_graphs is not None
            return self._unpack_graph_outputs(
                self.decode_graphs.run_decode(
                    prepared.sample_targets.slots, prepared.sample_targets.positions, all_greedy=all_greedy
                )
            )
        if not all_tokens:
            hidden, _ = self._model.forward_with_aux(
                inputs.token_ids, inputs.metadata, self._kv_cache, inputs.sampled_indices, (), features
            )
            return HiddenStates(hidden)
        token_indices = torch.arange(len(inputs.token_ids), device=self._input_batch.device)
        hidden, aux_hidden = self._model.forward_with_aux(
            inputs.token_ids, inputs.metadata, self._kv_cache, token_indices, self._aux_layers, features
        )
        return HiddenStates(hidden[inputs.sampled_indices], hidden, aux_hidden)

    def _unpack_graph_outputs(self, outputs: GraphOutputs) -> HiddenStates:
        sample_hidden = self._graphable_steps.split_hidden(outputs.sample_hidden)[0]
        if outputs.all_hidden is None:
            return HiddenStates(sample_hidden, used_cuda_graph=outputs.used_cuda_graph)
        all_hidden, *aux_hidden = self._graphable_steps.split_hidden(outputs.all_hidden)
        return HiddenStates(
            sample_hidden,
            all_hidden,
            aux_hidden,
            outputs.sampled_tokens,
            outputs.used_cuda_graph,
            outputs.run_draft_head_graph,
        )

    def _sample_greedy_in_graph(self, rows: Tensor, hidden: Tensor) -> Tensor:
        slots, positions, *adapters = rows
        linear_context = LinearContext.from_adapter_slots(adapters[0]) if adapters else NO_ADAPTERS
        return self._sampler.sample_and_write_greedy(
            self._graphable_steps.split_hidden(hidden)[0], slots, positions + 1, linear_context
        )

    def _compute_prompt_logprobs(
        self, rows: list[ScheduledRequest], hidden: Tensor
    ) -> tuple[list[PromptLogprobTargets], list[Tensor]]:
        chunks: list[PromptLogprobTargets] = []
        tensors: list[Tensor] = []
        begin = 0
        for row in rows:
            if self._wants_prompt_logprobs(row):
                slot_request = self._get_slot_request(row)
                last = min(row.start + row.num_tokens + 1, slot_request.new_request.num_prompt_tokens)
                following = slot_request.new_request.token_ids[row.start + 1 : last]
                top = slot_request.rules.params.prompt_logprobs or 0
                for first in range(0, len(following), _MAX_LOGIT_ROWS):
                    part = following[first : first + _MAX_LOGIT_ROWS]
                    context = self._input_batch.adapter_context(np.full(len(part), row.slot))
                    logits = self._model.compute_logits(hidden[begin + first : begin + first + len(part)], context)
                    if self._model.shard.rank > 0:
                        continue
                    (tokens,) = upload_arrays([np.array(part, dtype=np.int64)], logits.device)
                    chunks.append(PromptLogprobTargets(row.request_id, part, top))
                    tensors += logprob_tensors(logits, tokens, top)
            begin += row.num_tokens
        return chunks, tensors

    def _get_slot_request(self, row: ScheduledRequest) -> SlotRequest:
        return self._input_batch.get_slot_request(row.slot)

    def _get_new_request(self, row: ScheduledRequest) -> NewRequestData:
        return self._get_slot_request(row).new_request

    def _wants_prompt_logprobs(self, row: ScheduledRequest) -> bool:
        slot_request = self._get_slot_request(row)
        return (
            slot_request.rules.params.prompt_logprobs is not None
            and row.start < slot_request.new_request.num_prompt_tokens - 1
        )
