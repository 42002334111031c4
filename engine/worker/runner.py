"""Executes batches: slots, forward pass, picks. Knows no request, only slots and what was admitted to them."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.models.decoder import Decoder, KVCache
from engine.types import Batch, Row, StepOutput, TokenLogprob
from engine.worker.grammar import SlotGrammars
from engine.worker.inputs import ForwardInputs, Slots
from engine.worker.sampler import SamplingRow, sample, token_logprobs

_LOGIT_ROWS = 256
"""Rows of prompt logits held at once: a vocabulary of 150,000 makes each 600 KB."""


class Runner:
    def __init__(
        self, model: Decoder, kv_cache: KVCache, slots: Slots, grammars: SlotGrammars, eos_token_ids: tuple[int, ...]
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._slots = slots
        self._grammars = grammars
        self._eos = eos_token_ids

    @torch.inference_mode()
    def execute(self, batch: Batch) -> StepOutput:
        """Compute the batch's tokens and pick one after each row that samples."""
        for admission in batch.admissions:
            self._slots.admit(admission)
            self._grammars.admit(admission)
        inputs = self._slots.build(batch)
        prompt_rows = [row for row in batch.rows if self._wants_prompt_logprobs(row)]
        if prompt_rows:
            every = torch.arange(len(inputs.token_ids), device=self._slots.device)
            hidden = self._model.forward(inputs.token_ids, inputs.metadata, self._kv_cache, every)
            prompt_logprobs = self._prompt_logprobs(batch.rows, hidden)
            hidden = hidden[inputs.sampled]
        else:
            hidden = self._model.forward(inputs.token_ids, inputs.metadata, self._kv_cache, inputs.sampled)
            prompt_logprobs = {}
        token_ids, logprobs = self._pick(inputs, hidden)
        slots = {row.request_id: row.slot for row in inputs.sampled_rows}
        consumed = {name: self._grammars.consume(slots[name], token) for name, token in token_ids.items()}
        errors = {name: error for name, error in consumed.items() if error is not None}
        return StepOutput(token_ids, logprobs, prompt_logprobs, errors)

    def _pick(self, inputs: ForwardInputs, hidden: Tensor) -> tuple[dict[str, int], dict[str, TokenLogprob]]:
        if not inputs.sampled_rows:
            return {}, {}
        rows = [
            self._sampling_row(row, int(length))
            for row, length in zip(inputs.sampled_rows, inputs.lengths, strict=True)
        ]
        logits = self._model.logits(hidden)
        asked = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
        unmodified = logits[asked] if asked else None
        owners = [row.slot for row in inputs.sampled_rows]
        picks = sample(logits, rows, self._eos, self._grammars.mask(owners), self._model.argmax)
        self._slots.token_ids[owners, inputs.lengths] = picks.to(torch.int32)
        picked = picks.tolist()
        token_ids = {row.request_id: token for row, token in zip(inputs.sampled_rows, picked, strict=True)}
        if unmodified is None:
            return token_ids, {}
        found = token_logprobs(
            unmodified, [picked[index] for index in asked], [rows[index].params.logprobs or 0 for index in asked]
        )
        return token_ids, {
            inputs.sampled_rows[index].request_id: logprob for index, logprob in zip(asked, found, strict=True)
        }

    def _sampling_row(self, row: Row, length: int) -> SamplingRow:
        owner = self._slots.owners[row.slot]
        assert owner is not None
        tokens = self._slots.token_ids[row.slot, :length]
        return SamplingRow(owner.params, owner.seed, length, owner.num_prompt, tokens)

    def _wants_prompt_logprobs(self, row: Row) -> bool:
        owner = self._slots.owners[row.slot]
        assert owner is not None
        return owner.params.prompt_logprobs is not None and row.start < owner.num_prompt - 1

    def _prompt_logprobs(self, rows: list[Row], hidden: Tensor) -> dict[str, list[TokenLogprob]]:
        """For each row that wants them, the log probabilities of the prompt tokens that follow its tokens."""
        found, begin = {}, 0
        for row in rows:
            owner = self._slots.owners[row.slot]
            assert owner is not None
            if self._wants_prompt_logprobs(row):
                following = owner.token_ids[row.start + 1 : min(row.start + row.count + 1, owner.num_prompt)]
                top = owner.params.prompt_logprobs or 0
                logprobs: list[TokenLogprob] = []
                for first in range(0, len(following), _LOGIT_ROWS):
                    part = following[first : first + _LOGIT_ROWS]
                    logits = self._model.logits(hidden[begin + first : begin + first + len(part)])
                    logprobs += token_logprobs(logits, part, [top] * len(part))
                found[row.request_id] = logprobs
            begin += row.count
        return found
