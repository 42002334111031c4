"""The Executor of one device: slots, forward pass, picks. It knows slots and who was admitted to them, no requests."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quire.engine.core.executor import PageMover, PendingOutput
from quire.engine.core.scheduler_output import NewRequestData, ScheduledRequest, SchedulerOutput
from quire.engine.layers.pooling import PooledRow, Pooler
from quire.engine.models.decoder import Decoder, Features, had_numbers
from quire.engine.types import PoolingParams, SamplingParams
from quire.engine.worker.compiling.processes import Compiled, compile_kinds
from quire.engine.worker.compiling.steps import launch_every_kind
from quire.engine.worker.graphs.capture import Left
from quire.engine.worker.graphs.decodes import DecodeGraphs
from quire.engine.worker.graphs.forms import Forms
from quire.engine.worker.graphs.prompts import Planned, PromptGraphs
from quire.engine.worker.heads import Heads, HiddenStates
from quire.engine.worker.images.features import ImageFeatures
from quire.engine.worker.inputs import ForwardInputs, Owner, Picks, Slots
from quire.engine.worker.loading.drafts.started import Drafting
from quire.engine.worker.memory import Headroom, copy_page, copy_slot, layers_of
from quire.engine.worker.pages import page_mover
from quire.engine.worker.pending import LOST, PendingStep, PromptChunk
from quire.engine.worker.sampling.device_sampler import choose_sampler
from quire.engine.worker.sampling.grammar import SlotGrammars
from quire.engine.worker.sampling.sampler import logprob_tensors
from quire.engine.worker.sampling.sampling_rules import SamplingRow, listed_tokens, rules_of
from quire.engine.worker.scratch import scratch_prompt
from quire.kernels.backend import NO_ADAPTERS, LinearContext
from quire.kernels.gpu.others import is_other
from quire.kernels.gpu.transfer import Download, upload
from quire.kernels.probe import Capture

if TYPE_CHECKING:
    from quire.kernels.gpu.kinds import Kind

_LOGIT_ROWS = 256
"""How many rows of prompt logits are held at once; with a vocabulary of 150,000 each takes 600 KB."""

_WARM_PROMPTS = (2, 16, 128)
"""Tokens."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A batch whose tensors are made; the `inputs` are None where a graph makes them, one of steps with prompts as it
    was `planned`, or where it has no rows: then it was read of images alone."""

    batch: SchedulerOutput
    picks: Picks
    inputs: ForwardInputs | None
    features: Features | None = None
    """Of the images that some of its tokens stand for."""
    planned: Planned | None = None


class ModelRunner:
    def __init__(
        self,
        model: Decoder,
        pages: Sequence[Tensor],
        slots: Slots,
        grammars: SlotGrammars,
        eos_token_ids: tuple[int, ...],
        capture: Capture | None = None,
        pooler: Pooler | None = None,
        heads: Heads | None = None,
        features: ImageFeatures | None = None,
        prompts: bool = False,
    ) -> None:
        """`pages`: what allocate_pages made. `capture`: how decode steps become graphs, if they do; the slots have a
        scratch page then. `pooler`: makes vectors, where requests may ask for them. `heads`: guess tokens from the
        hidden states, on the same slots. `features`: of images, where requests may have some. `prompts`: small steps
        with prompts become graphs too."""
        self._model = model
        self._features = features
        if features is not None and features.places.turns:
            slots.turn_behind(slots.scratch_slot, 0)
        self._pages = pages
        self._kv_cache = layers_of(model, pages, slots.states)
        self._slots = slots
        self._grammars = grammars
        self._eos = eos_token_ids
        self._pooler = pooler
        self._heads = heads
        self._headroom = Headroom(layers_of(model, pages)) if slots.device.type == "cpu" and capture is None else None
        self._taps = () if heads is None else heads.head.taps
        self._forms = Forms(model, self._kv_cache, slots, self._taps, None if heads is None else heads.observe)
        self.graphs = None if capture is None else self._make_graphs(capture)
        self.prompt_graphs: PromptGraphs | None = None
        if capture is not None and prompts:
            behind = self._forms.small_behind if self._heads_read_all else None
            of = (capture, slots, self._forms.width, model.dtype)
            self.prompt_graphs = PromptGraphs(self._forms.small_step, *of, behind=behind, group=model.shard.group)
        self._sample = choose_sampler(slots.device, model.argmax, model.draw, model.shard.group)
        self._downloads = torch.cuda.Stream(slots.device) if slots.device.type == "cuda" else None

    def _make_graphs(self, capture: Capture) -> DecodeGraphs:
        return DecodeGraphs(
            self._forms.decode,
            capture,
            self._slots,
            self._forms.width,
            self._model.dtype,
            pick=self._decode_picks if self._model.has_head else None,
            behind=self._forms.decode_behind if self._heads_read_all else None,
            adapters=self._model.adapters is not None,
            group=self._model.shard.group,
        )

    @property
    def model(self) -> Decoder:
        return self._model

    @property
    def _heads_read_all(self) -> bool:
        return self._heads is not None and self._heads.reads_all

    @torch.inference_mode()
    def launch(self, batch: SchedulerOutput) -> PendingOutput:
        """Start to compute the batch's tokens, and to pick tokens after those of each row that samples.

        On a GPU this only queues work, in the order of the calls: a step reads what earlier ones picked and stored,
        though the host has not waited for them.
        """
        return self._finish(self._begin(batch))

    def _begin(self, batch: SchedulerOutput) -> Begun:
        """Take in what a batch says, and make its tensors."""
        self._take_in(batch)
        if self._features is not None:
            self._features.look(batch, self._admission)
        batch = batch.with_tokens
        picks = self._slots.picks(batch)
        if not batch.scheduled_requests:
            return Begun(batch, picks, None)
        images = self._features
        shown = images is not None and images.places.reach(batch.scheduled_requests, self._admission)
        captured = (
            self.graphs is not None
            and not shown
            and self.graphs.fit(batch)
            and self._slots.see(batch.scheduled_requests)
        )
        planned = None
        if self.prompt_graphs is not None and not (shown or captured):
            planned = self.prompt_graphs.plan(batch)
        inputs = None if captured or planned is not None else self._slots.build(batch)
        if images is None or inputs is None or not shown:
            return Begun(batch, picks, inputs, planned=planned)
        placed = images.places.put(inputs.metadata, batch.scheduled_requests, self._admission)
        return Begun(
            batch, picks, replace(inputs, metadata=placed), images.of(batch.scheduled_requests, self._admission)
        )

    def _take_in(self, batch: SchedulerOutput) -> None:
        self._admit(batch)
        self._slots.put_drafts(batch.scheduled_requests)
        self._slots.take_pages(batch.scheduled_requests)
        if self._headroom is not None:
            self._headroom.use(page for row in batch.scheduled_requests for page in row.new_block_ids)

    def _copy(self, batch: SchedulerOutput) -> None:
        """Make the copies that a batch asks for, which read what the steps before it have computed."""
        for copy in batch.block_copies:
            copy_page(self._pages, copy, self._slots.own.of_page)
            if self._heads is not None:
                copy_page(self._heads.pages, copy, self._slots.own.of_page)
        for slots in batch.slot_copies:
            copy_slot(self._slots.states, slots)

    def _finish(self, begun: Begun) -> PendingStep:
        """Compute a batch that was begun, in the order of the calls, before any of its slots has another owner."""
        batch, picks, inputs = begun.batch, begun.picks, begun.inputs
        self._copy(batch)
        if not batch.scheduled_requests:
            nothing = Download([torch.empty(0, dtype=torch.int64)], None)  # it is on the host
            return PendingStep([], [], [], [], None, nothing, self._grammars)
        chunks: list[PromptChunk] = []
        found: list[Tensor] = []
        pooled = [] if self._pooler is None else self._pooled(batch.scheduled_requests)
        whole = bool(pooled) or any(self._wants_prompt_logprobs(row) for row in batch.scheduled_requests)
        owners = [self._owner(row) for row in picks.rows]
        largest = not is_other(self._slots.device) and all(owner.rules.largest for owner in owners)
        hidden = self._compute(begun, whole=whole, largest=largest)
        if whole and hidden.every is not None:
            chunks, found = self._prompt_logprobs(batch.scheduled_requests, hidden.every)
            if self._pooler is not None and pooled:
                found.append(self._pooler.take(pooled, hidden.every))
        asked = [index for index, owner in enumerate(owners) if owner.rules.logprobs is not None]
        if picks.rows and largest:
            tensors = [self._pick_largest(picks, hidden) if hidden.picked is None else hidden.picked, *found]
        else:
            tensors = [*self._pick(picks, owners, asked, hidden.before_picks), *found]
        if self._heads is not None:
            self._heads.follow(batch, picks, hidden, inputs)
        made = list(zip(picks.rows, owners, strict=True))
        pooling = None if self._pooler is None else self._pooler.pooling
        download = Download(tensors, self._downloads)
        return PendingStep(made, asked, chunks, pooled, pooling, download, self._grammars, hidden.captured)

    @torch.inference_mode()
    def warm_up(self) -> bool:
        """Prepare something that a later step will need, in less than a second or so; False when all is ready."""
        if self._headroom is not None:
            return self._headroom.grow()
        if self.graphs is not None and self.graphs.warm_up():
            return True
        return self.prompt_graphs is not None and self.prompt_graphs.warm_up()

    @torch.inference_mode()
    def warm_sampler(self) -> None:
        """Pick once greedily, once from all tokens and once from the likeliest: kinds of kernels of their own."""
        device, table = self._slots.device, self._slots.token_ids
        hidden = torch.zeros((1, self._model.spec.hidden_size), dtype=self._model.dtype, device=device)
        for params in (SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.5)):
            row = SamplingRow(rules_of(params, ()), 0, 1, 1, table, self._slots.scratch_slot)
            self._sample(self._model.logits(hidden), [row], None)

    @torch.inference_mode()
    def warm_prompts(self) -> None:
        """Compute short prompts on the scratch page, and read a small image. Kernels come in kinds by the number of
        queries, and a kind is compiled, for seconds, when it is first called; the kind for long prompts was, when a
        step was measured."""
        if self._features is not None:
            self._features.warm_up()
        for length in _WARM_PROMPTS:
            inputs = scratch_prompt(self._slots, length)
            self._model.forward(inputs.token_ids, inputs.metadata, self._kv_cache, inputs.sampled)

    def kinds(self, step_tokens: int) -> list[Kind]:
        """Every kind of a Triton kernel that a step of up to so many tokens may launch here."""
        from quire.kernels.gpu.kinds import recorded

        model, group = self._model, self._model.shard.group
        with nullcontext() if group is None else group.apart():
            return recorded(partial(launch_every_kind, model, self._kv_cache, self._slots, step_tokens))

    def compile_kernels(self, step_tokens: int, drafting: Drafting | None) -> Compiled:
        """Compile, by several processes, the `kinds` of all ranks that are not there yet, and those of what drafts
        here."""
        from quire.kernels.gpu.kinds import recorded

        kinds = self.kinds(step_tokens)
        if drafting is not None:
            kinds += recorded(partial(drafting.launch_every_kind, step_tokens))
        return compile_kinds(list(dict.fromkeys(kinds)), self._model.progress)

    def mover(self) -> PageMover:
        pages = self._pages if self._heads is None else [*self._pages, *self._heads.pages]
        return page_mover(pages, self._model.computes, None if self._headroom is None else self._headroom.use)

    def state_mover(self) -> PageMover | None:
        kept = [each[None] for layer in self._slots.states for each in layer if each.numel()]
        return page_mover(kept, self._model.computes) if kept else None

    def load_grammars(self) -> None:
        self._grammars.prepare()

    def _admit(self, batch: SchedulerOutput) -> None:
        """Give slots to their new owners. The row of a request for a vector never samples, so it has no rules."""
        for slot in batch.freed_slots:
            self._grammars.leave(slot)
        for admission in batch.new_requests:
            params = admission.params
            rules = rules_of(SamplingParams() if isinstance(params, PoolingParams) else params, self._eos)
            self._slots.admit(Owner(admission, rules))
            if self._features is not None and self._features.places.turns:
                self._slots.turn_behind(admission.slot, self._features.places.behind(admission))
            self._grammars.admit(admission)

    def _pooled(self, rows: list[ScheduledRequest]) -> list[PooledRow]:
        """The rows of requests for vectors."""
        found, begin = [], 0
        for row in rows:
            admission = self._owner(row).admission
            if isinstance(admission.params, PoolingParams):
                found.append(PooledRow(row, begin, admission.num_prompt, admission.params))
            begin += row.num_tokens
        return found

    def _compute(self, begun: Begun, *, whole: bool, largest: bool) -> HiddenStates:
        """The forward pass; by a graph where there are no `inputs`. `whole`: the hidden states of all tokens too.
        `largest`: all picks are the largest logit."""
        if self._model.offload is not None:
            self._model.offload.step()
        inputs, features = begun.inputs, begun.features
        whole = whole or self._heads_read_all
        if begun.planned is not None:
            assert self.prompt_graphs is not None
            return self._found(self.prompt_graphs.run(begun.planned, every=whole))
        if inputs is None:
            assert self.graphs is not None
            return self._found(self.graphs.run(begun.picks.slots, begun.picks.positions, largest=largest))
        if not whole:
            hidden, _ = self._model.forward_tapped(
                inputs.token_ids, inputs.metadata, self._kv_cache, inputs.sampled, (), features
            )
            return HiddenStates(hidden)
        every = torch.arange(len(inputs.token_ids), device=self._slots.device)
        hidden, tapped = self._model.forward_tapped(
            inputs.token_ids, inputs.metadata, self._kv_cache, every, self._taps, features
        )
        return HiddenStates(hidden[inputs.sampled], hidden, tapped)

    def _found(self, left: Left) -> HiddenStates:
        before = self._forms.apart(left.before_picks)[0]
        if left.every is None:
            return HiddenStates(before, captured=left.captured)
        every, *tapped = self._forms.apart(left.every)
        return HiddenStates(before, every, tapped, left.picked, left.captured, left.behind)

    def _decode_picks(self, rows: Tensor, hidden: Tensor) -> Tensor:
        """The picks behind a step of one token per row, which are the largest logit, in a form that a graph can
        hold."""
        slots, positions, *adapters = rows
        context = LinearContext.of(adapters[0]) if adapters else NO_ADAPTERS
        return self._write_largest(self._forms.apart(hidden)[0], slots, positions + 1, context)

    def _pick_largest(self, picks: Picks, hidden: HiddenStates) -> Tensor:
        return self._write_largest(hidden.before_picks, picks.slots_there, picks.positions_there, picks.context)

    def _write_largest(self, hidden: Tensor, slots: Tensor, positions: Tensor, context: LinearContext) -> Tensor:
        """As `_pick`, of picks that are nothing but the largest logit."""
        picked, known = self._model.largest(hidden, context)
        self._slots.token_ids[slots, positions] = picked.to(torch.int32)
        return picked.masked_fill(~known, LOST)

    def _pick(self, picks: Picks, owners: list[Owner], asked: list[int], hidden: Tensor) -> list[Tensor]:
        """Pick tokens and write them to their slots. Returns them, [R] int64, LOST in the place of those for which the
        model gave no number, NOTHING_LEFT where constraints left none; then, if some are `asked` for log probabilities,
        what logprob_tensors finds."""
        if not picks.rows:
            return [hidden.new_empty(0, dtype=torch.int64)]
        logits = self._model.logits(hidden, picks.context)
        known = had_numbers(hidden, logits)
        unmodified = None
        if asked:
            (reported,) = upload([np.array(asked, dtype=np.int64)], logits.device)
            unmodified = logits[reported]
        table = self._slots.token_ids
        rows, mask = [], None
        if self._model.shard.rank == 0:  # the others hear what it picks
            rows = [
                SamplingRow(each.rules, each.admission.seed, length, each.admission.num_prompt, table, row.slot)
                for row, each, length in zip(picks.rows, owners, picks.positions.tolist(), strict=True)
            ]
            mask = self._grammars.mask(picks.rows)
        sampled = self._sample(logits, rows, mask)
        picked = sampled.clamp(min=0)  # a step under way may read what stands in the place of no token
        table[picks.slots_there, picks.positions_there] = picked.to(torch.int32)
        told = sampled.masked_fill(~known, LOST)  # `where` copies a number to the GPU, and waits
        if unmodified is None:
            return [told]
        rules = [owners[index].rules for index in asked]
        most = max(0 if each.listed is not None else each.logprobs or 0 for each in rules)
        return [told, *logprob_tensors(unmodified, picked[reported], most, listed_tokens(rules, logits.device))]

    def _prompt_logprobs(self, rows: list[ScheduledRequest], hidden: Tensor) -> tuple[list[PromptChunk], list[Tensor]]:
        """For each row that wants prompt log probabilities: the prompt tokens that follow its tokens, and what
        logprob_tensors finds for these."""
        chunks: list[PromptChunk] = []
        tensors: list[Tensor] = []
        begin = 0
        for row in rows:
            if self._wants_prompt_logprobs(row):
                owner = self._owner(row)
                last = min(row.start + row.num_tokens + 1, owner.admission.num_prompt)
                following = owner.admission.token_ids[row.start + 1 : last]
                top = owner.rules.params.prompt_logprobs or 0
                for first in range(0, len(following), _LOGIT_ROWS):
                    part = following[first : first + _LOGIT_ROWS]
                    context = self._slots.context(np.full(len(part), row.slot))
                    logits = self._model.logits(hidden[begin + first : begin + first + len(part)], context)
                    if self._model.shard.rank > 0:
                        continue  # the first rank alone has all of them
                    (tokens,) = upload([np.array(part, dtype=np.int64)], logits.device)
                    chunks.append(PromptChunk(row.request_id, part, top))
                    tensors += logprob_tensors(logits, tokens, top)
            begin += row.num_tokens
        return chunks, tensors

    def _owner(self, row: ScheduledRequest) -> Owner:
        return self._slots.owner(row.slot)

    def _admission(self, row: ScheduledRequest) -> NewRequestData:
        return self._owner(row).admission

    def _wants_prompt_logprobs(self, row: ScheduledRequest) -> bool:
        owner = self._owner(row)
        return owner.rules.params.prompt_logprobs is not None and row.start < owner.admission.num_prompt - 1
