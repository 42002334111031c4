"""Runs the heads that guess tokens from hidden states: beside every step, to follow what the model computes, and
between steps, to guess. They share the runner's slots: token ids, and how each request's tokens are picked. Where steps
become CUDA graphs, so does both: what follows a step is a graph behind the step's (DecodeGraphs, PromptGraphs)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.core.scheduler_output import DraftRequest, NewRequestData, SchedulerOutput
from quire.engine.models.decoder import Decoder
from quire.engine.models.heads.head import DraftHead
from quire.engine.worker.compiling.steps import launch_head
from quire.engine.worker.costs import CONTEXT, measured
from quire.engine.worker.graphs.guesses import GuessGraphs
from quire.engine.worker.inputs import ForwardInputs, Picks, Slots
from quire.engine.worker.loading.drafts.spare import SparePages
from quire.engine.worker.memory import layers_of, prompts
from quire.engine.worker.sampling.device_sampler import choose_sampler
from quire.kernels.backend import AttentionMetadata
from quire.kernels.gpu.transfer import Download, upload
from quire.kernels.probe import Capture


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """What a step computed of R picks."""

    before_picks: Tensor  # [R, hidden]
    every: Tensor | None = None  # [T, hidden], of all tokens, where a head reads these
    tapped: Sequence[Tensor] = ()
    """[T, hidden] each: what goes into the layers that a head reads."""
    picked: Tensor | None = None  # [R] int64, where a graph has made and written the picks
    captured: bool = False
    """Whether a graph has computed them."""
    behind: Callable[[], Tensor] | None = None
    """Runs the graph that gives what heads make of them, [R, hidden], once the picks are written."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """The states that a slot has."""

    owner: NewRequestData
    first: int
    """How many tokens there were at the first of the last step's picks."""
    count: int


class Heads:
    def __init__(
        self,
        head: DraftHead,
        decoder: Decoder,
        pages: Sequence[Tensor],
        slots: Slots,
        drafts: SparePages,
        most: int,
        capture: Capture | None = None,
    ) -> None:
        """`pages`: what allocate_pages made for the head, of which `drafts` tells. `most`: tokens of a row that are
        guessed. `capture`: how guesses become graphs, if they do."""
        self.head = head
        self.pages = pages
        self._slots, self.drafts = slots, drafts
        self._most = min(most, head.most or most)
        self._kv_cache = layers_of(head, pages) if pages else []
        self._reads_all = head.reads_all
        self._argmax = decoder.argmax
        self._vocab_size = decoder.spec.vocab_size
        self._sample = choose_sampler(slots.device, decoder.argmax, decoder.draw, decoder.shard.group)
        self._downloads = torch.cuda.Stream(slots.device) if slots.device.type == "cuda" else None
        shape = (len(slots.owners) + 1, 2 + most, decoder.spec.hidden_size)
        self._states = torch.empty(shape, dtype=decoder.dtype, device=slots.device)
        """Of each slot, at the places before its last picks; and the last one behind guesses that graphs have made."""
        self._kept: dict[int, _Kept] = {}
        self.graphs: GuessGraphs | None = None
        if capture is not None:
            advance = self._advance_there if self._reads_all else None
            self.graphs = GuessGraphs(
                self._pick_largest, advance, capture, slots, 1 if head.most is None else self._most
            )

    @property
    def reads_all(self) -> bool:
        return self._reads_all

    def follow(self, batch: SchedulerOutput, picks: Picks, found: HiddenStates, inputs: ForwardInputs | None) -> None:
        """Take in what a step computed, once its picks are written to the slots."""
        slots = self._slots
        if found.behind is not None:
            states = found.behind()
        elif self._reads_all:
            inputs = inputs or slots.build(batch)
            assert found.every is not None
            states = self.observe(inputs.owners, inputs.metadata, found.every, found.tapped)[inputs.sampled]
        else:
            states = self.head.observe(picks.slots_there, found.before_picks, (), None, [])
        firsts = np.array([row.start + row.num_tokens - len(row.draft_token_ids) for row in picks.rows], dtype=np.int64)
        (places,) = upload([picks.positions - firsts], slots.device)
        self._states[picks.slots_there, places] = states
        for row, first in zip(picks.rows, firsts.tolist(), strict=True):
            self._kept[row.slot] = _Kept(slots.owner(row.slot).admission, first, 1 + len(row.draft_token_ids))

    def observe(self, owners: Tensor, metadata: AttentionMetadata, hidden: Tensor, tapped: Sequence[Tensor]) -> Tensor:
        """The states at all tokens of a step, which these slots own [T], and whose picks are written."""
        # Behind a row's drafts is what was picked there; behind a row without a pick may be anything.
        following = self._slots.token_ids[owners, metadata.positions + 1].clamp_(0, self._vocab_size - 1)
        return self.head.observe(following, hidden, tapped, metadata, self._kv_cache)

    @torch.inference_mode()
    def draft(self, rows: Sequence[DraftRequest]) -> list[list[int]]:
        """Guesses for each of the rows, as many as it asks for; none where its last step was too long ago."""
        found: list[list[int]] = [[] for _ in rows]
        able = [index for index, row in enumerate(rows) if row.count > 0 and self._place(row) is not None]
        if not able:
            return found
        able.sort(key=lambda index: -rows[index].count)  # those that go on longest come first
        graphs = self.graphs is not None and len(able) <= self.graphs.most
        guess = self._guess_by_graphs if graphs else self._guess
        for tokens in guess([rows[index] for index in able]).wait():
            for index, token in zip(able, tokens.tolist(), strict=False):
                found[index].append(token)
        return found

    def _place(self, row: DraftRequest) -> int | None:
        """Where the slot keeps the state before the last known token; None: it has none."""
        kept, owner = self._kept.get(row.slot), self._slots.owners[row.slot]
        if kept is None or owner is None or owner.admission is not kept.owner:
            return None
        place = row.known - 1 - kept.first
        return place if 0 <= place < kept.count else None

    def _guess(self, rows: list[DraftRequest]) -> Download:
        """The guesses of one place after the other; those of later ones are for the first rows alone."""
        longest = max(len(row.blocks) for row in rows)
        arrays: list[np.ndarray] = [
            np.array([row.slot for row in rows], dtype=np.int64),
            np.array([self._place(row) for row in rows], dtype=np.int64),
            np.array([row.known for row in rows], dtype=np.int64),
            np.array([[*row.blocks, *[0] * (longest - len(row.blocks))] for row in rows], dtype=np.int32),
        ]
        slots, places, known, table = upload(arrays, self._slots.device)
        states, picked = self._states[slots, places], list[Tensor]()
        most = min(rows[0].count, self._most)
        for guessed in range(most):
            left = sum(row.count > guessed for row in rows)
            states, slots, known, table = states[:left], slots[:left], known[:left], table[:left]
            tokens = self._pick(states, rows[:left], guessed)
            self._slots.token_ids[slots, known + guessed] = tokens.to(torch.int32)
            picked.append(tokens)
            if guessed + 1 < most:
                end = max(row.known for row in rows[:left]) + guessed
                metadata = self._metadata(slots, known - 1 + guessed, table, end)
                states = self.head.advance(tokens.to(torch.int32), states, metadata, self._kv_cache)
        return Download(picked, self._downloads)

    def _guess_by_graphs(self, rows: list[DraftRequest]) -> Download:
        """The same; where all guesses are the largest logit, the picks too."""
        graphs, table, picked = self.graphs, self._slots.token_ids, list[Tensor]()
        assert graphs is not None
        each = [(row.slot, row.known - 1, self._slots.num_blocks[row.slot], self._place(row)) for row in rows]
        given = np.array(each, dtype=np.int64).T
        largest = all(self._slots.owner(row.slot).rules.largest for row in rows)
        most = min(rows[0].count, self._most)
        for guessed in range(most):
            left = sum(row.count > guessed for row in rows)
            given = given[:, :left]
            slots, positions, _, places = graphs.put(given)
            tokens = graphs.pick(left, guessed) if largest else None
            if tokens is None:
                tokens = self._pick(self._states[slots, places], rows[:left], guessed)
                table[slots, positions + 1] = tokens.to(torch.int32)
            picked.append(tokens)
            if guessed + 1 < most and self._reads_all:
                graphs.advance(left, int(given[1].max()) + 1)
                given[3] = self._states.shape[1] - 1
            given[1] += 1
        return Download(picked, self._downloads)

    def _pick_largest(self, rows: Tensor, guessed: int) -> Tensor:
        """As GuessGraphs takes it."""
        slots, positions, _, places = rows
        tokens = self._argmax(self.head.logits(self._states[slots, places], guessed))
        self._slots.token_ids[slots, positions + 1] = tokens.to(torch.int32)
        return tokens

    def _advance_there(self, rows: Tensor, pages: int) -> Tensor:
        """As GuessGraphs takes it."""
        slots, positions, owned, places = rows
        _, metadata = self._slots.decode_inputs(rows[:2], pages, seen=False)
        behind = torch.arange(pages, device=slots.device) - owned[:, None]
        spare = self.drafts.first_spare + slots[:, None] * self.drafts.spare + behind
        is_spare = (behind >= 0) & (behind < self.drafts.spare) & (slots != self._slots.scratch_slot)[:, None]
        table = torch.where(is_spare, spare, metadata.block_table).to(torch.int32)
        metadata = replace(metadata, block_table=table, slots=_stored(table, positions, self._slots.block_size))
        following = self._slots.token_ids[slots, positions + 1]
        states = self.head.advance(following, self._states[slots, places], metadata, self._kv_cache)
        self._states[:, -1][slots] = states
        return states

    def _pick(self, states: Tensor, rows: list[DraftRequest], guessed: int) -> Tensor:
        """A token after each of the states, by the request's own rules; its grammar is left out, as it would have to
        follow guesses that may be wrong."""
        sampling = [self._slots.sampling(row.slot, row.known + guessed) for row in rows]
        return self._sample(self.head.logits(states, guessed), sampling, None).clamp(min=0)

    def _metadata(self, slots: Tensor, positions: Tensor, table: Tensor, longest: int) -> AttentionMetadata:
        """Of one token for each of N sequences, in `slots` and at `positions` [N], with the pages of `table`."""
        device = self._slots.device
        contexts = (positions + 1).to(torch.int32)
        return AttentionMetadata(
            query_start=torch.arange(len(positions) + 1, dtype=torch.int32, device=device),
            context_lens=contexts,
            key_start=F.pad(contexts.cumsum(0, dtype=torch.int32), (1, 0)),
            block_table=table,
            positions=positions,
            slots=_stored(table, positions, self._slots.block_size),
            max_query_len=1,
            max_context_len=longest,
            turns=self._slots.turns(slots, positions),
        )

    @torch.inference_mode()
    def warm_up(self) -> bool:
        """As Executor.warm_up."""
        return self.graphs is not None and self.graphs.warm_up()

    def launch_every_kind(self, step_tokens: int) -> None:
        """As engine/worker/compiling/steps.py has it for models."""
        launch_head(self.head, self._states.shape[2], self._states.dtype, self._kv_cache, self._slots, step_tokens)

    def measure_costs(self) -> list[tuple[int, float]]:
        """(sequences, seconds) of one more guess for each."""
        return measured(self.try_guess)

    @torch.inference_mode()
    def try_guess(self, count: int) -> None:
        """Guess for so many sequences, while nobody uses the pages yet."""
        size, device = self._slots.block_size, self._slots.device
        length = size if not self.pages else min(CONTEXT, size * self.pages[0].shape[1])
        if self.graphs is not None and count <= self.graphs.most:
            self._try_graphs(self.graphs, count, min(length, self._slots.max_model_len))
            return
        states = torch.zeros((count, self._states.shape[2]), dtype=self._states.dtype, device=device)
        ids = torch.zeros(count, dtype=torch.int32, device=device)
        states = self.head.advance(ids, states, _decodes(count, length, size, device), self._kv_cache)
        Download([self._argmax(self.head.logits(states, 0))], self._downloads).wait()

    def _try_graphs(self, graphs: GuessGraphs, count: int, length: int) -> None:
        """The same, of sequences on the scratch page."""
        scratch = self._slots.scratch_slot
        slots, _, _, places = graphs.put(np.repeat([[scratch], [length - 1], [0], [0]], count, axis=1))
        if self._reads_all:
            graphs.advance(count, length)
        tokens = graphs.pick(count, 0)
        if tokens is None:
            tokens = self._argmax(self.head.logits(self._states[slots, places], 0))
        Download([tokens], self._downloads).wait()


def _stored(table: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """AttentionMetadata.slots of a token of each of these page tables."""
    page = table.gather(1, (positions // block_size)[:, None]).squeeze(1)
    return page.long() * block_size + positions % block_size


def _decodes(count: int, length: int, block_size: int, device: torch.device) -> AttentionMetadata:
    """A step of one token of each of so many sequences of `length` tokens, which all share their pages."""
    whole = prompts(1, length, block_size, device)
    return AttentionMetadata(
        query_start=torch.arange(count + 1, dtype=torch.int32, device=device),
        context_lens=torch.full((count,), length, dtype=torch.int32, device=device),
        key_start=torch.arange(count + 1, dtype=torch.int32, device=device) * length,
        block_table=whole.block_table.expand(count, -1).contiguous(),
        positions=torch.full((count,), length - 1, device=device),
        slots=whole.slots[-1:].expand(count).contiguous(),
        max_query_len=1,
        max_context_len=length,
    )
