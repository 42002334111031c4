"""Samples the tokens of a step, and writes them where the next step reads them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.engine.common.request_params import SamplingParams
from quire.engine.models.decoder import Decoder, has_finite_logits
from quire.engine.worker.input_batch import InputBatch, SampleTargets, SlotRequest
from quire.engine.worker.pending_step import NONFINITE_TOKEN
from quire.engine.worker.sampling.device_sampler import choose_sampler
from quire.engine.worker.sampling.sampler import logprob_tensors
from quire.engine.worker.sampling.sampling_rules import SamplingRow, make_request_sampling_rules, pad_logprob_token_ids
from quire.engine.worker.sampling.slot_grammars import SlotGrammars
from quire.kernels.backend import LinearContext
from quire.kernels.gpu.host_transfer import upload_arrays
from quire.kernels.gpu.other_devices import is_other_device


class BatchSampler:
    def __init__(self, model: Decoder, slots: InputBatch, grammars: SlotGrammars) -> None:
        self._model = model
        self._input_batch = slots
        self._grammars = grammars
        self._sample = choose_sampler(slots.device, model.argmax, model.sample_tokens, model.shard.group)
        self._has_greedy_sampling = not is_other_device(slots.device)

    def samples_greedily(self, slot_requests: list[SlotRequest]) -> bool:
        return self._has_greedy_sampling and all(each.rules.is_greedy_only for each in slot_requests)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Runs greedy, unfiltered and filtered sampling, which have different kernels."""
        device, table = self._input_batch.device, self._input_batch.token_ids
        hidden = torch.zeros((1, self._model.spec.hidden_size), dtype=self._model.dtype, device=device)
        for params in (SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.5)):
            row = SamplingRow(make_request_sampling_rules(params, ()), 0, 1, 1, table, self._input_batch.scratch_slot)
            self._sample(self._model.compute_logits(hidden), [row], None)

    def sample_and_write_greedy(
        self, hidden: Tensor, slots: Tensor, positions: Tensor, linear_context: LinearContext
    ) -> Tensor:
        """Returns tokens [R] int64, with NONFINITE_TOKEN for rows whose logits are not finite."""
        sampled, is_finite = self._model.greedy_tokens_and_finite_flags(hidden, linear_context)
        self._input_batch.token_ids[slots, positions] = sampled.to(torch.int32)
        return sampled.masked_fill(~is_finite, NONFINITE_TOKEN)

    def compute_logits_and_finite_flags(self, sample_targets: SampleTargets, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Returns logits [R, vocab] float32, and whether each row is finite, [R] bool."""
        if not sample_targets.rows:
            return hidden.new_empty((0, 0)), hidden.new_empty(0, dtype=torch.bool)
        logits = self._model.compute_logits(hidden, sample_targets.linear_context)
        return logits, has_finite_logits(hidden, logits)

    def sample_and_write(
        self,
        sample_targets: SampleTargets,
        slot_requests: list[SlotRequest],
        logits_and_finite_flags: tuple[Tensor, Tensor],
    ) -> list[Tensor]:
        """Returns tokens [R] int64, and logprob_tensors of the rows that report them. Overwrites the logits. A token is
        NONFINITE_TOKEN if its row's logits are not finite, and NO_TOKEN_LEFT if constraints allow no token.
        """
        logits, is_finite = logits_and_finite_flags
        if not sample_targets.rows:
            return [torch.empty(0, dtype=torch.int64, device=logits.device)]
        logprob_indices = logprob_indices_of(slot_requests)
        unmodified = None
        if logprob_indices:
            (reported,) = upload_arrays([np.array(logprob_indices, dtype=np.int64)], logits.device)
            unmodified = logits[reported]
        table = self._input_batch.token_ids
        rows, mask = [], None
        if self._model.shard.rank == 0:
            rows = [
                SamplingRow(
                    each.rules, each.new_request.seed, length, each.new_request.num_prompt_tokens, table, row.slot
                )
                for row, each, length in zip(
                    sample_targets.rows, slot_requests, sample_targets.positions.tolist(), strict=True
                )
            ]
            mask = self._grammars.fill_bitmask(sample_targets.rows) if self._grammars.requests else None
        sampled = self._sample(logits, rows, mask)
        device_tokens = sampled.clamp(min=0)  # steps in flight may read them, so they must be valid ids
        table[sample_targets.device_slots, sample_targets.device_positions] = device_tokens.to(torch.int32)
        host_tokens = sampled.masked_fill(
            ~is_finite, NONFINITE_TOKEN
        )  # torch.where would copy a scalar to the GPU and wait
        if unmodified is None:
            return [host_tokens]
        rules = [slot_requests[index].rules for index in logprob_indices]
        max_logprobs = max(0 if each.logprob_token_ids is not None else each.num_logprobs or 0 for each in rules)
        return [
            host_tokens,
            *logprob_tensors(
                unmodified, device_tokens[reported], max_logprobs, pad_logprob_token_ids(rules, logits.device)
            ),
        ]


def logprob_indices_of(slot_requests: list[SlotRequest]) -> list[int]:
    return [index for index, owner in enumerate(slot_requests) if owner.rules.num_logprobs is not None]
