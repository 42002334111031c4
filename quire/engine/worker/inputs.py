"""Makes a Batch's tensors. Slots keep what the device knows of sequences: token ids, page tables, rules for picks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.core.scheduler_output import NewRequestData, ScheduledRequest, SchedulerOutput
from quire.engine.worker.sampling.sampling_rules import Rules, SamplingRow
from quire.kernels.attention.own import Own, whole
from quire.kernels.backend import NO_ADAPTERS, AttentionMetadata, LinearContext, Pages
from quire.kernels.gpu.mixed import Division
from quire.kernels.gpu.transfer import upload
from quire.kernels.recurrent.recurrence import Guesses, Sequences


@dataclass(frozen=True, slots=True)
class Owner:
    """The request that a slot belongs to, and what its parameters mean."""

    admission: NewRequestData
    rules: Rules


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """One step's tensors: T tokens, of which R are followed by a pick."""

    token_ids: Tensor  # [T] int32
    metadata: AttentionMetadata
    sampled: Tensor  # [R] int64, indices into the T tokens
    owners: Tensor  # [T] int64, the slot of each token


@dataclass(frozen=True, slots=True)
class Picks:
    """The R picks that a step makes: in which slots, and at which positions. A row with drafts makes several, which
    stand side by side in the order of their positions."""

    rows: list[ScheduledRequest]
    """The row of each pick."""
    slots: np.ndarray  # [R] int64
    positions: np.ndarray  # [R] int64, also the number of tokens so far
    slots_there: Tensor  # the two on the device
    positions_there: Tensor
    context: LinearContext
    """Of the picks' rows."""


class Slots:
    """What the device knows of each slot. Token ids live on the device, so that a step can read a token that the host
    has not seen yet."""

    def __init__(
        self,
        num_slots: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        *,
        scratch_page: int | None = None,
        groups: int = 1,
        states: Sequence[Pages] = (),
        drafts: int = 0,
        own: Own | None = None,
    ) -> None:
        """`scratch_page`: there is one slot more, `scratch_slot`, which owns that page, and the page tables are kept on
        the device too; `decode_inputs` needs both. `groups`: of layers that have pages of their own; for each
        block_size tokens a table has a page of each of them, side by side. `states`: what layers keep in slots, as
        allocate_states made it for so many `drafts`. `own`: the tokens that this rank keeps; None: all."""
        self.states, self._most_drafts = states, drafts
        self._keeps_guesses = drafts > 0 and any(states)
        self._has_matrices = any(len(kept) > 1 for kept in states)  # beside a convolution's columns
        self.block_size, self.max_model_len = block_size, max_model_len
        self.own = whole(block_size) if own is None else own
        self.device = device
        self.groups = groups
        self.scratch_page = scratch_page
        self.scratch_slot = num_slots
        self.max_pages = -(-max_model_len // block_size)
        self.owners: list[Owner | None] = [None] * num_slots
        self.adapters = np.zeros(num_slots + 1, dtype=np.int64)
        """The slot of each owner's adapter; 0: none."""
        self.token_ids = torch.empty((num_slots + 1, max_model_len + 1), dtype=torch.int32, device=device)
        self.token_ids[num_slots] = 0
        self._seen = np.zeros(num_slots, dtype=np.int64)
        """Tokens that the matrices in each slot have seen; below 0: all before its owner's first ones."""
        self._blocks = np.zeros((num_slots, self.max_pages * groups), dtype=np.int32)
        self.num_blocks = [0] * num_slots
        """Pages that each slot's table has of its owner."""
        self._tables: Tensor | None = None
        self._seen_there: Tensor | None = None
        """`_seen` on the device, where graphs need it."""
        self._behind: Tensor | None = None
        """[slots] int64: what is added to positions behind the last image of a slot's prompt for what they are rotated
        by; None: nothing ever is."""
        if scratch_page is not None:
            if self.keeps_guesses:
                self._seen_there = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)
            self._tables = torch.zeros((groups, num_slots + 1, self.max_pages), dtype=torch.int32, device=device)
            self._tables[:, num_slots] = scratch_page

    def admit(self, owner: Owner) -> None:
        admission = owner.admission
        self.owners[admission.slot] = owner
        self.adapters[admission.slot] = admission.adapter
        self.num_blocks[admission.slot] = 0
        self._seen[admission.slot] = -1
        ids = upload([np.array(admission.token_ids, dtype=np.int32)], self.device)[0]
        self.token_ids[admission.slot, : len(ids)] = ids

    def turn_behind(self, slot: int, more: int) -> None:
        """Rotate tokens of this slot by so many `more` than their positions, but those that a step's metadata says
        otherwise of."""
        if self._behind is None:
            self._behind = torch.zeros(len(self.owners) + 1, dtype=torch.int64, device=self.device)
        self._behind[slot].fill_(more)

    def turns(self, slots: Tensor, positions: Tensor) -> Tensor | None:
        """AttentionMetadata.turns of tokens [T] of these slots at these positions, both [T] int64."""
        return None if self._behind is None else positions + self._behind[slots]

    def owner(self, slot: int) -> Owner:
        owner = self.owners[slot]
        assert owner is not None
        return owner

    def sampling(self, slot: int, position: int) -> SamplingRow:
        """The pick of a slot's token at this position, by its owner's rules."""
        admission = (owner := self.owner(slot)).admission
        return SamplingRow(owner.rules, admission.seed, position, admission.num_prompt, self.token_ids, slot)

    def take_pages(self, rows: list[ScheduledRequest]) -> None:
        """Put a batch's new pages into the page tables."""
        grown = [row for row in rows if row.new_block_ids]
        self.put_pages([(row.slot, self.num_blocks[row.slot], row.new_block_ids) for row in grown])
        for row in grown:
            self.num_blocks[row.slot] += len(row.new_block_ids)

    def put_pages(self, given: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """Slots, each once, and their pages from a page of each on; those beyond the longest context are left out."""
        changed = []
        for slot, first, pages in given:
            kept = self._blocks[slot, first : first + len(pages)]
            new = np.array(pages[: len(kept)], dtype=np.int32)
            if self._tables is not None and len(at := np.flatnonzero(kept != new)):
                changed.append((np.full(len(at), slot), first + at, new[at]))
            kept[:] = new
        if self._tables is not None and changed:
            slots, at, new = (np.concatenate(each) for each in zip(*changed, strict=True))
            there = upload([at % self.groups, slots, at // self.groups, new], self.device)
            self._tables[there[0], there[1], there[2]] = there[3]

    def put_drafts(self, rows: list[ScheduledRequest]) -> None:
        """Write the rows' drafts to their slots' tokens."""
        drafted = [row for row in rows if row.draft_token_ids]
        if not drafted:
            return
        slots = np.array([row.slot for row in drafted for _ in row.draft_token_ids], dtype=np.int64)
        ends = [(row.start + row.num_tokens, len(row.draft_token_ids)) for row in drafted]
        positions = np.concatenate([np.arange(end - count, end) for end, count in ends])
        ids = np.array([token for row in drafted for token in row.draft_token_ids], dtype=np.int32)
        there = upload([slots, positions, ids], self.device)
        self.token_ids[there[0], there[1]] = there[2]

    @property
    def keeps_guesses(self) -> bool:
        """Whether matrices may have to take in guesses later."""
        return self._keeps_guesses and self._has_matrices

    def see(self, rows: list[ScheduledRequest]) -> bool:
        """Note, if a graph is to compute these rows, what matrices will have seen. False where it cannot: nobody has
        said yet what those of a new owner have."""
        if not self.keeps_guesses:
            return True
        if any(self._seen[row.slot] < 0 for row in rows):
            return False
        for row in rows:
            self._seen[row.slot] = row.start + row.num_tokens - len(row.draft_token_ids)
        return True

    def is_seen(self, slots: np.ndarray) -> np.ndarray:
        """[rows] bool: whether it is known what the matrices in these slots have seen, here and on the device."""
        return self._seen[slots] >= 0

    def look_back(self, slots: np.ndarray, starts: np.ndarray, known: np.ndarray) -> np.ndarray:
        """How many tokens the matrices in these slots have seen; they will have seen the `known` ones."""
        seen = self._seen[slots]
        self._seen[slots] = known
        return np.where(seen < 0, starts, seen)

    def picks(self, batch: SchedulerOutput) -> Picks:
        """The picks of the batch's rows that sample."""
        rows = [row for row in batch.scheduled_requests if row.sample]
        positions = by_pick(rows, np.array([row.start + row.num_tokens for row in rows], dtype=np.int64))
        if len(positions) > len(rows):
            fits = not any(self.states) or max(len(row.draft_token_ids) for row in rows) <= self._most_drafts
            assert fits, "wrong drafts would overwrite columns that are needed"
            rows = [row for row in rows for _ in (None, *row.draft_token_ids)]
        slots = np.array([row.slot for row in rows], dtype=np.int64)
        there = upload([slots, positions], self.device)
        return Picks(rows, slots, positions, there[0], there[1], self.context(slots))

    def context(self, slots: np.ndarray) -> LinearContext:
        """Of tokens of these slots, [T] int64."""
        adapters = self.adapters[slots]
        if not adapters.any():
            return NO_ADAPTERS
        return LinearContext.of(*upload([adapters], self.device))

    def decode_inputs(self, rows: Tensor, pages: int, *, seen: bool = True) -> tuple[Tensor, AttentionMetadata]:
        """Token ids [B] and metadata for one token of each of B slots, made on the device alone, so that a graph can
        hold it. rows [2 or 3, B] int64 are slots, positions and, if some have adapters, the slots of these; no context
        has more than `pages` pages. `seen`: whether matrices take the tokens in, which is noted; heads have none."""
        slots, positions = rows[:2]
        starts = torch.arange(rows.shape[1] + 1, dtype=torch.int32, device=self.device)
        sequences = self._sequences(slots, positions) if seen else None
        return self._made_there(rows, (slots, starts, positions + 1), 1, pages, sequences)

    def prompt_inputs(
        self, rows: Tensor, pieces: Tensor, pages: int, *, seen: bool = True
    ) -> tuple[Tensor, AttentionMetadata]:
        """The same for T tokens of P sequences, in their order: pieces [5, P] int64 are their slots, how many of the
        tokens are theirs, at least one, their contexts, and what Guesses says of them."""
        slots, counts, contexts, before, known = pieces
        starts, sequences = F.pad(counts.cumsum(0, dtype=torch.int32), (1, 0)), None
        if seen and self._seen_there is not None:
            guesses = Guesses(before.to(torch.int32), known.to(torch.int32))
            self._seen_there[slots] = guesses.known
            sequences = Sequences(starts, contexts.to(torch.int32), guesses)
        return self._made_there(rows, (slots, starts, contexts), rows.shape[1], pages, sequences)

    def _made_there(
        self, rows: Tensor, of: tuple[Tensor, ...], longest: int, pages: int, sequences: Sequences | None
    ) -> tuple[Tensor, AttentionMetadata]:
        """of: slots, first tokens, and contexts of sequences of at most `longest` tokens."""
        assert self._tables is not None
        (slots, positions, *adapters), (owners, starts, contexts) = rows, of
        page = self._tables[:, slots, positions // self.block_size]
        stored = self.own.slots(page.long(), positions)
        tables = self._tables[:, :, :pages][:, owners]
        metadata = AttentionMetadata(
            query_start=starts,
            context_lens=contexts.to(torch.int32),
            key_start=F.pad(contexts.cumsum(0, dtype=torch.int32), (1, 0)),
            block_table=tables[0],
            positions=positions,
            slots=stored[0],
            max_query_len=longest,
            max_context_len=pages * self.block_size,
            linear=LinearContext.of(adapters[0]) if adapters else NO_ADAPTERS,
            state_slots=owners,
            turns=self.turns(slots, positions),
            sequences=sequences,
        )
        return self.token_ids[slots, positions], metadata.grouped(tables.unbind(), stored.unbind())

    def _sequences(self, slots: Tensor, positions: Tensor) -> Sequences | None:
        """Of B rows of a token each: the first of a slot is no guess, those behind it are. Notes on the device what the
        matrices will have seen."""
        if self._seen_there is None:
            return None
        count, at = len(slots), torch.arange(len(slots), device=self.device)
        begins = torch.ones_like(slots, dtype=torch.bool)
        begins[1:] = (slots[1:] != slots[:-1]) | (positions[1:] != positions[:-1] + 1)
        starts = F.pad(torch.where(begins, at, count).flip(0).cummin(0).values.flip(0), (0, 1), value=count)
        ends = (positions[(starts[1:] - 1)] + 1).to(torch.int32)
        known = (positions + 1).to(torch.int32)
        seen = torch.where(begins, self._seen_there[slots], ends)
        self._seen_there[torch.where(begins, slots, self.scratch_slot)] = known
        return Sequences(starts.to(torch.int32), ends, Guesses(seen, torch.where(begins, known, ends)))

    def build(self, batch: SchedulerOutput) -> ForwardInputs:
        """A batch's tensors; call `take_pages` first."""
        rows = batch.scheduled_requests
        slots = np.array([row.slot for row in rows], dtype=np.int64)
        starts = np.array([row.start for row in rows], dtype=np.int64)
        counts = np.array([row.num_tokens for row in rows], dtype=np.int64)
        ends, sampling = counts.cumsum(), [row for row in rows if row.sample]
        if len(sampling) < len(rows):
            ends = ends[np.array([row.sample for row in rows])]
        drafts = np.array([len(row.draft_token_ids) for row in rows], dtype=np.int64) if self._keeps_guesses else None
        picked, context = by_pick(sampling, ends) - 1, self.context(slots.repeat(counts))
        found = self.inputs(slots, starts, counts, picked, context, drafts)
        if self._seen_there is not None:
            metadata = found.metadata
            known = metadata.context_lens if metadata.guesses is None else metadata.guesses.known
            self._seen_there[metadata.state_slots] = known
        return found

    def inputs(
        self,
        slots: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        picked: np.ndarray,
        linear: LinearContext,
        drafts: np.ndarray | None = None,
    ) -> ForwardInputs:
        """The tensors of rows of `counts` tokens from `starts` on, the last `drafts` of them guesses (None: none), each
        [rows] int64. picked [R] int64: the tokens that are followed by a pick, by their place among all."""
        # Every rank of a model makes these in each step: methods of arrays take half the time of NumPy's functions.
        ends, contexts = counts.cumsum(), starts + counts
        owner = slots.repeat(counts)
        positions = (contexts - ends).repeat(counts)
        positions += np.arange(len(positions))
        longest, stored = int(contexts.max()), self._stored(owner, positions)
        tables = self._by_group[slots, : -(-longest // self.block_size)]
        starting = _starting(ends, contexts.cumsum())
        guessed = self._guessed(slots, starts, contexts, drafts)
        division = Division.of(counts, contexts, starting[1])
        divided = () if division is None else (division.query_start, division.key_start)
        query_start, context_lens, key_start, at, owners, sampled, state_slots, *others = upload(
            [
                starting[0],
                contexts.astype(np.int32),
                starting[1],
                positions,
                owner,
                picked,
                slots,
                *divided,
                *guessed,
                *(tables[:, :, group] for group in range(self.groups)),
                *(stored[:, group] for group in range(self.groups)),
            ],
            self.device,
        )
        begins, others = others[: len(divided)], others[len(divided) :]
        lens, paged = others[: len(guessed)], others[len(guessed) :]
        metadata = AttentionMetadata(
            query_start=query_start,
            context_lens=context_lens,
            key_start=key_start,
            block_table=paged[0],
            positions=at,
            slots=paged[self.groups],
            max_query_len=int(counts.max()),
            max_context_len=longest,
            linear=linear,
            whole=not starts.any(),
            state_slots=state_slots,
            guesses=Guesses(*lens) if lens else None,
            turns=self.turns(owners, at),
        )
        metadata = metadata.grouped(paged[: self.groups], paged[self.groups :])
        if division is not None:
            metadata = division.divide(metadata, begins[0], begins[1], self.block_size)
        return ForwardInputs(self.token_ids[owners, at], metadata, sampled, owners)

    @property
    def _by_group(self) -> np.ndarray:
        """The page tables, [slots, pages, groups]."""
        return self._blocks.reshape(len(self._blocks), -1, self.groups)

    def _stored(self, owner: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """AttentionMetadata.slots of tokens of these slots, [T, groups] int64."""
        page = positions // self.block_size
        places = positions - page * self.block_size
        stored: np.ndarray = self._by_group[owner, page].astype(np.int64)
        own = self.own.of_page
        stored *= len(own)
        stored += (places - own.start)[:, None]
        if len(own) < self.block_size:
            stored[(places < own.start) | (places >= own.stop)] = self.own.elsewhere
        return stored

    def _guessed(
        self, slots: np.ndarray, starts: np.ndarray, contexts: np.ndarray, drafts: np.ndarray | None
    ) -> tuple[np.ndarray, ...]:
        """What Guesses says; () where no sequence has guesses, or had some last."""
        if not self._keeps_guesses:
            return ()
        known = contexts if drafts is None else contexts - drafts
        seen = self.look_back(slots, starts, known)
        if (seen == starts).all() and (known == contexts).all():
            return ()
        return seen.astype(np.int32), known.astype(np.int32)


def _starting(*ends: np.ndarray) -> np.ndarray:
    """Cumulative counts [rows] each, from 0 on: [counts, rows + 1] int32."""
    starting = np.zeros((len(ends), len(ends[0]) + 1), dtype=np.int32)
    for row, each in zip(starting, ends, strict=True):
        row[1:] = each
    return starting


def by_pick(rows: list[ScheduledRequest], ends: np.ndarray) -> np.ndarray:
    """A number for each pick of `rows`, which all sample. A row's last pick has its number of `ends` [rows]; the picks
    before it, one per draft, have the numbers just below."""
    if not any(row.draft_token_ids for row in rows):
        return ends
    widths = np.array([1 + len(row.draft_token_ids) for row in rows])
    return np.repeat(ends - np.cumsum(widths), widths) + np.arange(1, widths.sum() + 1)
