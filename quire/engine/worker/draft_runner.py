"""Runs a smaller model that guesses tokens: first it computes what it lacks of each sequence, then one guess of each
after the other. Of a step of so small a model most is what it takes to start it, so this has its own, short way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.engine.core.scheduler_output import DrafterCatchUp, DraftToken, NewRequestData, ScheduledRequest
from quire.engine.models.decoder import Decoder
from quire.engine.types import SamplingParams
from quire.engine.worker.compiling.steps import launch_every_kind
from quire.engine.worker.costs import CONTEXT, TOKENS, measured
from quire.engine.worker.graphs.decodes import DecodeGraphs
from quire.engine.worker.graphs.forms import Forms
from quire.engine.worker.inputs import Owner, Slots
from quire.engine.worker.memory import layers_of
from quire.engine.worker.sampling.device_sampler import choose_sampler
from quire.engine.worker.sampling.sampling_rules import rules_of
from quire.kernels.backend import NO_ADAPTERS
from quire.kernels.gpu.transfer import Download, upload
from quire.kernels.probe import Capture

_MOST_IN_GRAPHS = 8
"""Tokens of a sequence that are rows of a graph: each row reads the whole context."""


class _Going(NamedTuple):
    """The sequences that the last guesses were made for."""

    slots: np.ndarray  # [R] int64
    known: np.ndarray  # [R] int64, tokens before these guesses


class DraftRunner:
    def __init__(
        self,
        model: Decoder,
        pages: Sequence[Tensor],
        slots: Slots,
        eos_token_ids: tuple[int, ...],
        capture: Capture | None = None,
    ) -> None:
        """`pages`: what allocate_pages made. `capture`: how guesses become graphs, if they do; the slots have a scratch
        page then."""
        self._model = model
        self._kv_cache = layers_of(model, pages, slots.states)
        self._slots = slots
        self._eos = eos_token_ids
        self._sample = choose_sampler(slots.device, model.argmax, model.draw)
        self._downloads = torch.cuda.Stream(slots.device) if slots.device.type == "cuda" else None
        self._going = _Going(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
        forms, pick = Forms(model, self._kv_cache, slots), self._likeliest
        self.graphs = capture and DecodeGraphs(forms.decode, capture, slots, forms.width, model.dtype, pick=pick)

    @torch.inference_mode()
    def begin(self, rows: Sequence[DrafterCatchUp]) -> list[DraftToken]:
        """Compute these tokens. Returns a guess after each row that wants one."""
        slots = self._slots
        for row in rows:
            if (admission := row.new_request) is not None:
                assert isinstance(admission.params, SamplingParams)
                slots.admit(Owner(admission, rules_of(admission.params, self._eos)))
        slots.put_pages([(row.slot, row.first_page, row.pages) for row in rows])
        slots.put_drafts(
            [ScheduledRequest("", row.slot, row.start, row.count, [], False, row.token_ids) for row in rows]
        )
        every = np.array([(row.slot, row.start, row.count) for row in rows], dtype=np.int64).T
        wants = np.array([row.wants_draft for row in rows])
        self._going = _Going(every[0][wants], (every[1] + every[2])[wants])
        return _drafted(self._guess(every, np.cumsum(every[2])[wants] - 1))

    @torch.inference_mode()
    def another(self, keep: Sequence[int]) -> list[DraftToken]:
        """One guess more for these of the last call's, by their places there."""
        before = self._going
        self._going = _Going(before.slots[keep], before.known[keep] + 1)
        every = np.stack((self._going.slots, before.known[keep], np.ones(len(keep), dtype=np.int64)))
        return _drafted(self._guess(every, np.arange(len(keep))))

    def _guess(self, every: np.ndarray, last: np.ndarray) -> Download:
        """Tokens and chances, [2, R] float32, which holds any token's number. every [3, rows] int64: slots, first
        tokens and counts; last [R] int64: which of all their tokens are to be followed by a guess."""
        where = zip(self._going.slots.tolist(), self._going.known.tolist(), strict=True)
        rows = [self._slots.sampling(slot, position) for slot, position in where]
        hidden, found = self._computed(every, last, largest=all(row.rules.largest for row in rows))
        if not rows:
            return Download([torch.empty(2, 0)], None)
        if found is None:
            logits = self._model.logits(hidden)
            asked = [row.rules.params for row in rows]
            warm = np.array([1.0 if each.greedy else each.temperature for each in asked], dtype=np.float32)
            slots, known, temperatures = upload([*self._going, warm], logits.device)
            picked = self._sample(logits, rows, None).clamp(min=0)
            found = _with_chances(picked, logits / temperatures[:, None])
        else:
            slots, known = upload([*self._going], found.device)
        self._slots.token_ids[slots, known] = found[0].to(torch.int32)
        return Download([found], self._downloads)

    def _computed(self, every: np.ndarray, last: np.ndarray, *, largest: bool) -> tuple[Tensor, Tensor | None]:
        """Hidden states [R, hidden] of the `last` tokens; and, where a graph makes them, as all guesses are the
        `largest` logit, these as `_guess` has them. A few tokens of a sequence are rows of a graph, as in
        DecodeGraphs.fit."""
        slots, starts, counts = every
        total = int(counts.sum())
        if self.graphs is None or total > self.graphs.most or counts.max() > _MOST_IN_GRAPHS:
            inputs = self._slots.inputs(slots, starts, counts, last, NO_ADAPTERS)
            return self._model.forward(inputs.token_ids, inputs.metadata, self._kv_cache, inputs.sampled), None
        contexts = (starts + counts - counts.cumsum()).repeat(counts) + np.arange(1, total + 1)
        left = self.graphs.run(slots.repeat(counts), contexts, largest=largest)
        hidden, found = left.before_picks, left.picked
        if len(last) < total:
            (kept,) = upload([last], hidden.device)
            hidden, found = hidden[kept], None if found is None else found[:, kept]
        return hidden, found

    def _likeliest(self, rows: Tensor, hidden: Tensor) -> Tensor:
        """Guesses that are the largest logit, in a form that a graph can hold."""
        logits = self._model.logits(hidden)
        return _with_chances(self._model.argmax(logits), logits)

    @torch.inference_mode()
    def warm_up(self) -> bool:
        """As Executor.warm_up."""
        return self.graphs is not None and self.graphs.warm_up()

    def launch_every_kind(self, step_tokens: int) -> None:
        """As Drafting has it. Without graphs there is no page on which it could: they are compiled at first use."""
        if self.graphs is not None:
            launch_every_kind(self._model, self._kv_cache, self._slots, step_tokens)

    @torch.inference_mode()
    def measure_costs(self, num_blocks: int, longest: int) -> list[tuple[int, float]]:
        """(sequences, seconds) of one more guess for each. Nobody uses the first `num_blocks` pages yet, and no
        sequence gets longer than `longest`."""
        size, there = self._slots.block_size, len(self._slots.owners)
        length = min(CONTEXT, longest, size * num_blocks)
        params = SamplingParams(max_tokens=1)
        for slot in range(min(there, max(TOKENS))):
            self._slots.admit(
                Owner(NewRequestData(slot, [0] * length, length, params, seed=0), rules_of(params, self._eos))
            )
            self._slots.put_pages([(slot, 0, range(-(-length // size)))])

        def step(count: int) -> list[DraftToken]:
            self._going = _Going(np.arange(count) % there, np.full(count, length - 1))
            return self.another(range(count))

        return measured(step)


def _with_chances(picked: Tensor, logits: Tensor) -> Tensor:
    """[2, R] float32: tokens [R], and how likely these logits [R, vocab] hold each."""
    chances = torch.softmax(logits, dim=-1).gather(1, picked[:, None])[:, 0]
    return torch.stack((picked.float(), chances.float().nan_to_num(0.0)))


def _drafted(found: Download) -> list[DraftToken]:
    tokens, chances = found.wait()[0].tolist()
    return [DraftToken(int(token), chance) for token, chance in zip(tokens, chances, strict=True)]
