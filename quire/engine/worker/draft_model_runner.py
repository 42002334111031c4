"""Runs a draft model. Kernel launches dominate the time of such a small model, so this code path is short."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.engine.common.request_params import SamplingParams
from quire.engine.common.scheduler_output import DrafterCatchUp, DraftToken, NewRequestData, ScheduledRequest
from quire.engine.models.decoder import Decoder
from quire.engine.worker.device_memory import kv_cache_by_layer
from quire.engine.worker.graphs.decode_graphs import DecodeGraphs, StepFunctions
from quire.engine.worker.graphs.graphable_steps import GraphableSteps
from quire.engine.worker.input_batch import InputBatch, SlotRequest
from quire.engine.worker.kernel_compilation.kernel_variants import launch_kernel_variants
from quire.engine.worker.sampling.device_sampler import choose_sampler
from quire.engine.worker.sampling.sampling_rules import make_request_sampling_rules
from quire.engine.worker.step_costs import MEASURED_CONTEXT_TOKENS, MEASURED_TOKEN_COUNTS, measure_best_step_times
from quire.kernels.backend import NO_ADAPTERS
from quire.kernels.gpu.host_transfer import HostDownload, upload_arrays
from quire.kernels.probes.backend_probe import GraphCapture

_MAX_GRAPH_TOKENS_PER_SEQUENCE = 8
"""Longer chunks run eagerly, because each row of a graph reads its sequence's whole context."""


class _DraftingSlots(NamedTuple):
    slots: np.ndarray  # [R] int64
    num_known: np.ndarray  # [R] int64, tokens before the drafts


class DraftModelRunner:
    def __init__(
        self,
        model: Decoder,
        kv_tensors: Sequence[Tensor],
        slots: InputBatch,
        eos_token_ids: tuple[int, ...],
        capture: GraphCapture | None = None,
    ) -> None:
        """`capture` requires that `slots` has a scratch block."""
        self._model = model
        self._kv_cache = kv_cache_by_layer(model, kv_tensors, slots.recurrent_states)
        self._input_batch = slots
        self._eos_token_ids = eos_token_ids
        self._sample = choose_sampler(slots.device, model.argmax, model.sample_tokens)
        self._download_stream = torch.cuda.Stream(slots.device) if slots.device.type == "cuda" else None
        self._drafting_slots = _DraftingSlots(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
        steps = GraphableSteps(model, self._kv_cache, slots)
        functions = StepFunctions(steps.compute_decode_hidden, sample=self._sample_greedy_with_probabilities)
        self.graphs = capture and DecodeGraphs(functions, capture, slots, steps.hidden_width, model.dtype)

    @torch.inference_mode()
    def draft_first_tokens(self, rows: Sequence[DrafterCatchUp]) -> list[DraftToken]:
        slots = self._input_batch
        for row in rows:
            if (new_request := row.new_request) is not None:
                assert isinstance(new_request.params, SamplingParams)
                slots.admit_request(
                    SlotRequest(new_request, make_request_sampling_rules(new_request.params, self._eos_token_ids))
                )
        slots.update_block_tables([(row.slot, row.first_block, row.block_ids) for row in rows])
        slots.write_draft_tokens(
            [ScheduledRequest("", row.slot, row.start, row.num_tokens, [], False, row.token_ids) for row in rows]
        )
        row_array = np.array([(row.slot, row.start, row.num_tokens) for row in rows], dtype=np.int64).T
        wants = np.array([row.wants_draft for row in rows])
        self._drafting_slots = _DraftingSlots(row_array[0][wants], (row_array[1] + row_array[2])[wants])
        return _to_draft_tokens(self._draft_tokens(row_array, np.cumsum(row_array[2])[wants] - 1))

    @torch.inference_mode()
    def draft_next_tokens(self, keep: Sequence[int]) -> list[DraftToken]:
        previous = self._drafting_slots
        self._drafting_slots = _DraftingSlots(previous.slots[keep], previous.num_known[keep] + 1)
        row_array = np.stack((self._drafting_slots.slots, previous.num_known[keep], np.ones(len(keep), dtype=np.int64)))
        return _to_draft_tokens(self._draft_tokens(row_array, np.arange(len(keep))))

    def _draft_tokens(self, row_array: np.ndarray, last: np.ndarray) -> HostDownload:
        """Returns tokens and their probabilities, [2, R] float32 (exact for every token id). `row_array` [3, rows]
        int64: slots, start positions and token counts. `last` [R] int64: the index of the last token of each row that
        drafts.
        """
        where = zip(self._drafting_slots.slots.tolist(), self._drafting_slots.num_known.tolist(), strict=True)
        rows = [self._input_batch.make_sampling_row(slot, position) for slot, position in where]
        hidden, token_probabilities = self._compute_hidden_and_graph_tokens(
            row_array, last, all_greedy=all(row.rules.is_greedy_only for row in rows)
        )
        if not rows:
            return HostDownload([torch.empty(2, 0)], None)
        if token_probabilities is None:
            logits = self._model.compute_logits(hidden)
            params = [row.rules.params for row in rows]
            temperature_array = np.array(
                [1.0 if each.is_greedy else each.temperature for each in params], dtype=np.float32
            )
            slots, known, temperatures = upload_arrays([*self._drafting_slots, temperature_array], logits.device)
            draft_tokens = self._sample(logits, rows, None).clamp(min=0)
            token_probabilities = _tokens_with_softmax_probabilities(draft_tokens, logits / temperatures[:, None])
        else:
            slots, known = upload_arrays([*self._drafting_slots], token_probabilities.device)
        self._input_batch.token_ids[slots, known] = token_probabilities[0].to(torch.int32)
        return HostDownload([token_probabilities], self._download_stream)

    def _compute_hidden_and_graph_tokens(
        self, row_array: np.ndarray, last: np.ndarray, *, all_greedy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Returns hidden states [R, hidden], and the tokens with their probabilities [2, R] if a CUDA graph has sampled
        them, otherwise None.
        """
        slots, starts, counts = row_array
        total = int(counts.sum())
        if self.graphs is None or total > self.graphs.max_rows or counts.max() > _MAX_GRAPH_TOKENS_PER_SEQUENCE:
            inputs = self._input_batch.build_inputs_from_arrays(slots, starts, counts, last, NO_ADAPTERS)
            return self._model.forward(inputs.token_ids, inputs.metadata, self._kv_cache, inputs.sampled_indices), None
        contexts = (starts + counts - counts.cumsum()).repeat(counts) + np.arange(1, total + 1)
        outputs = self.graphs.run_decode(slots.repeat(counts), contexts, all_greedy=all_greedy)
        hidden, token_probabilities = outputs.sample_hidden, outputs.sampled_tokens
        if len(last) < total:
            (last_indices,) = upload_arrays([last], hidden.device)
            hidden, token_probabilities = (
                hidden[last_indices],
                None if token_probabilities is None else token_probabilities[:, last_indices],
            )
        return hidden, token_probabilities

    def _sample_greedy_with_probabilities(self, rows: Tensor, hidden: Tensor) -> Tensor:
        logits = self._model.compute_logits(hidden)
        return _tokens_with_softmax_probabilities(self._model.argmax(logits), logits)

    @torch.inference_mode()
    def capture_next_graph(self) -> bool:
        return self.graphs is not None and self.graphs.capture_next()

    def launch_kernel_variants(self, step_tokens: int) -> None:
        """Launches nothing if there are no graphs, because then there is no scratch block."""
        if self.graphs is not None:
            launch_kernel_variants(self._model, self._kv_cache, self._input_batch, step_tokens)

    @torch.inference_mode()
    def measure_draft_costs(self, num_blocks: int, longest: int) -> list[tuple[int, float]]:
        """Returns pairs (number of sequences, seconds per draft token). The first `num_blocks` blocks must be free."""
        size, num_slots = self._input_batch.block_size, len(self._input_batch.slot_requests)
        length = min(MEASURED_CONTEXT_TOKENS, longest, size * num_blocks)
        params = SamplingParams(max_tokens=1)
        for slot in range(min(num_slots, max(MEASURED_TOKEN_COUNTS))):
            self._input_batch.admit_request(
                SlotRequest(
                    NewRequestData(slot, [0] * length, length, params, seed=0),
                    make_request_sampling_rules(params, self._eos_token_ids),
                )
            )
            self._input_batch.update_block_tables([(slot, 0, range(-(-length // size)))])

        def run_step(count: int) -> list[DraftToken]:
            self._drafting_slots = _DraftingSlots(np.arange(count) % num_slots, np.full(count, length - 1))
            return self.draft_next_tokens(range(count))

        return measure_best_step_times(run_step)


def _tokens_with_softmax_probabilities(token_ids: Tensor, logits: Tensor) -> Tensor:
    """Returns [2, R] float32, token ids and probabilities, for tokens [R] and logits [R, vocab]."""
    probabilities = torch.softmax(logits, dim=-1).gather(1, token_ids[:, None])[:, 0]
    return torch.stack((token_ids.float(), probabilities.float().nan_to_num(0.0)))


def _to_draft_tokens(download: HostDownload) -> list[DraftToken]:
    tokens, probabilities = download.wait_for_copy()[0].tolist()
    return [DraftToken(int(token), chance) for token, chance in zip(tokens, probabilities, strict=True)]
