"""Runs a smaller model that guesses tokens: first it computes what it lacks of each sequence, then one guess of each
after the other. Of a step of so small a model most is what it takes to start it, so this has its own, short way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.engine.core.batch import Admission, CatchUp, Drafted, Row
from quire.engine.models.decoder import Decoder
from quire.engine.types import SamplingParams
from quire.engine.worker.costs import CONTEXT, TOKENS, measured
from quire.engine.worker.inputs import ForwardInputs, Owner, Slots
from quire.engine.worker.memory import layers_of
from quire.engine.worker.sampling.device_sampler import choose_sampler
from quire.engine.worker.sampling.sampling_rules import rules_of
from quire.kernels.backend import NO_ADAPTERS
from quire.kernels.gpu.transfer import Download, upload


class _Going(NamedTuple):
    """The sequences that the last guesses were made for."""

    slots: np.ndarray  # [R] int64
    known: np.ndarray  # [R] int64, tokens before these guesses


class DraftRunner:
    def __init__(self, model: Decoder, pages: Sequence[Tensor], slots: Slots, eos_token_ids: tuple[int, ...]) -> None:
        """`pages`: what allocate_pages made."""
        self._model = model
        self._kv_cache = layers_of(model, pages, slots.states)
        self._slots = slots
        self._eos = eos_token_ids
        self._sample = choose_sampler(slots.device, model.argmax, model.draw)
        self._downloads = torch.cuda.Stream(slots.device) if slots.device.type == "cuda" else None
        self._going = _Going(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))

    @torch.inference_mode()
    def begin(self, rows: Sequence[CatchUp]) -> list[Drafted]:
        """Compute these tokens. Returns a guess after each row that wants one."""
        slots = self._slots
        for row in rows:
            if (admission := row.admission) is not None:
                assert isinstance(admission.params, SamplingParams)
                slots.admit(Owner(admission, rules_of(admission.params, self._eos)))
            slots.put_pages(row.slot, row.first_page, row.pages)
        slots.put_drafts([Row("", row.slot, row.start, row.count, [], False, row.token_ids) for row in rows])
        every = np.array([(row.slot, row.start, row.count) for row in rows], dtype=np.int64).T
        ends, wants = np.cumsum(every[2]), np.array([row.wants_guess for row in rows])
        self._going = _Going(every[0][wants], (every[1] + every[2])[wants])
        inputs = slots.inputs(every[0], every[1], every[2], ends[wants] - 1, NO_ADAPTERS)
        return _drafted(self._guess(inputs))

    @torch.inference_mode()
    def another(self, keep: Sequence[int]) -> list[Drafted]:
        """One guess more for these of the last call's, by their places there."""
        before = self._going
        self._going = _Going(before.slots[keep], before.known[keep] + 1)
        ones = np.ones(len(keep), dtype=np.int64)
        inputs = self._slots.inputs(self._going.slots, before.known[keep], ones, ones.cumsum() - 1, NO_ADAPTERS)
        return _drafted(self._guess(inputs))

    def _guess(self, inputs: ForwardInputs) -> Download:
        """Tokens and chances, one of each for each sequence."""
        hidden = self._model.forward(inputs.token_ids, inputs.metadata, self._kv_cache, inputs.sampled)
        if not len(self._going.slots):
            return Download([torch.empty(0, dtype=torch.int64), torch.empty(0)], None)
        logits, table = self._model.logits(hidden), self._slots.token_ids
        where = zip(self._going.slots.tolist(), self._going.known.tolist(), strict=True)
        rows = [self._slots.sampling(slot, position) for slot, position in where]
        warm = [row.rules.params.temperature or 1.0 for row in rows]
        picked = self._sample(logits, rows, None)
        slots, known, temperatures = upload([*self._going, np.array(warm, dtype=np.float32)], logits.device)
        table[slots, known] = picked.to(torch.int32)
        chances = torch.softmax(logits / temperatures[:, None], dim=-1).gather(1, picked[:, None])[:, 0]
        return Download([picked, chances.nan_to_num(0.0)], self._downloads)

    @torch.inference_mode()
    def measure_costs(self, num_blocks: int, longest: int) -> list[tuple[int, float]]:
        """(sequences, seconds) of one more guess for each. Nobody uses the first `num_blocks` pages yet, and no
        sequence gets longer than `longest`."""
        size, there = self._slots.block_size, len(self._slots.owners)
        length = min(CONTEXT, longest, size * num_blocks)
        params = SamplingParams(max_tokens=1)
        for slot in range(min(there, max(TOKENS))):
            self._slots.admit(Owner(Admission(slot, [0] * length, length, params, seed=0), rules_of(params, self._eos)))
            self._slots.put_pages(slot, 0, list(range(-(-length // size))))

        def step(count: int) -> list[Drafted]:
            self._going = _Going(np.arange(count) % there, np.full(count, length - 1))
            return self.another(range(count))

        return measured(step)


def _drafted(found: Download) -> list[Drafted]:
    tokens, chances = found.wait()
    return [Drafted(*each) for each in zip(tokens.tolist(), chances.tolist(), strict=True)]
