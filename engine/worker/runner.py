"""The Executor of one device: slots, forward pass, picks. It knows slots and who was admitted to them, no requests."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.engine.batch import Batch, Row
from quire.engine.models.decoder import Decoder, KVCache
from quire.engine.types import PoolingParams, SamplingParams
from quire.engine.worker.device_sampler import choose_sampler
from quire.engine.worker.grammar import SlotGrammars
from quire.engine.worker.graphs import Capture, DecodeGraphs
from quire.engine.worker.inputs import Owner, Picks, Slots
from quire.engine.worker.memory import Headroom
from quire.engine.worker.pending import PendingStep, PromptChunk
from quire.engine.worker.sampler import logprob_tensors
from quire.engine.worker.sampling_rules import SamplingRow, rules_of
from quire.engine.worker.transfer import Download, upload

NO_VECTORS = "the model generates tokens; it has no pooling head that would make a vector"
_LOGIT_ROWS = 256
"""How many rows of prompt logits are held at once; with a vocabulary of 150,000 each takes 600 KB."""


class Runner:
    def __init__(
        self,
        model: Decoder,
        kv_cache: KVCache,
        slots: Slots,
        grammars: SlotGrammars,
        eos_token_ids: tuple[int, ...],
        capture: Capture | None = None,
    ) -> None:
        """`capture`: how decode steps become graphs, if they do; the slots have a scratch page then."""
        self._model = model
        self._kv_cache = kv_cache
        self._slots = slots
        self._grammars = grammars
        self._eos = eos_token_ids
        self._headroom = Headroom(kv_cache) if slots.device.type == "cpu" and capture is None else None
        self._graphs = None if capture is None else DecodeGraphs(self._decode, capture, slots)
        self._sample = choose_sampler(slots.device, model.argmax, model.draw)
        self._downloads = torch.cuda.Stream(slots.device) if slots.device.type == "cuda" else None

    @torch.inference_mode()
    def launch(self, batch: Batch) -> PendingStep:
        """Start to compute the batch's tokens, and to pick tokens after those of each row that samples.

        On a GPU this only queues work, in the order of the calls: a step reads what earlier ones picked and stored,
        though the host has not waited for them.
        """
        errors = self._admit(batch)
        for copy in batch.copies:  # only of large pages, which lie token by token in every layout
            for cache in (cache for layer in self._kv_cache for cache in layer):
                cache[copy.target, : copy.tokens] = cache[copy.source, : copy.tokens]
        self._slots.put_drafts(batch.rows)
        self._slots.take_pages(batch.rows)
        if self._headroom is not None:
            self._headroom.use(page for row in batch.rows for page in row.new_blocks)
        picks = self._slots.picks(batch)
        chunks: list[PromptChunk] = []
        found: list[Tensor] = []
        if self._graphs is not None and self._graphs.fit(batch):
            hidden = self._graphs.run(picks)
        elif any(self._wants_prompt_logprobs(row) for row in batch.rows):
            inputs = self._slots.build(batch)
            every = torch.arange(len(inputs.token_ids), device=self._slots.device)
            hidden = self._model.forward(inputs.token_ids, inputs.metadata, self._kv_cache, every)
            chunks, found = self._prompt_logprobs(batch.rows, hidden)
            hidden = hidden[inputs.sampled]
        else:
            inputs = self._slots.build(batch)
            hidden = self._model.forward(inputs.token_ids, inputs.metadata, self._kv_cache, inputs.sampled)
        owners = [self._owner(row) for row in picks.rows]
        asked = [index for index, owner in enumerate(owners) if owner.rules.logprobs is not None]
        tensors = [*self._pick(picks, owners, asked, hidden), *found]
        made = list(zip(picks.rows, owners, strict=True))
        return PendingStep(made, asked, chunks, Download(tensors, self._downloads), self._grammars, errors)

    @torch.inference_mode()
    def warm_up(self) -> bool:
        """Prepare something that a later step will need, in less than a second or so; False when all is ready."""
        if self._headroom is not None:
            return self._headroom.grow()
        return self._graphs is not None and self._graphs.warm_up()

    def load_grammars(self) -> None:
        self._grammars.prepare()

    def _admit(self, batch: Batch) -> dict[str, str]:
        """Give slots to their new owners. Returns the errors of requests for vectors, by id: no model here makes any.

        The row of such a request never samples, so it is computed like any other chunk of a prompt.
        """
        refused = set()
        for admission in batch.admissions:
            params = admission.params
            if isinstance(params, PoolingParams):
                refused.add(admission.slot)
                params = SamplingParams()
            self._slots.admit(Owner(admission, rules_of(params, self._eos)))
            self._grammars.admit(admission)
        return {row.request_id: NO_VECTORS for row in batch.rows if row.slot in refused} if refused else {}

    def _decode(self, rows: Tensor, pages: int) -> Tensor:
        """A step of one token per row, in a form that a graph can hold; see Slots.decode_inputs."""
        token_ids, metadata = self._slots.decode_inputs(rows, pages)
        every = torch.arange(rows.shape[1], device=rows.device)
        return self._model.forward(token_ids, metadata, self._kv_cache, every)

    def _pick(self, picks: Picks, owners: list[Owner], asked: list[int], hidden: Tensor) -> list[Tensor]:
        """Pick tokens and write them to their slots. Returns them, [R] int64; then, if some are `asked` for log
        probabilities, what logprob_tensors finds."""
        if not picks.rows:
            return [hidden.new_empty(0, dtype=torch.int64)]
        logits = self._model.logits(hidden)
        (reported,) = upload([np.array(asked, dtype=np.int64)], logits.device)
        unmodified = logits[reported] if asked else None
        table = self._slots.token_ids
        rows = [
            SamplingRow(each.rules, each.admission.seed, length, each.admission.num_prompt, table, row.slot)
            for row, each, length in zip(picks.rows, owners, picks.positions.tolist(), strict=True)
        ]
        mask = self._grammars.mask([row.slot for row in picks.rows])
        picked = self._sample(logits, rows, mask)
        table[picks.slots_there, picks.positions_there] = picked.to(torch.int32)
        if unmodified is None:
            return [picked]
        most = max(owners[index].rules.logprobs or 0 for index in asked)
        return [picked, *logprob_tensors(unmodified, picked[reported], most)]

    def _prompt_logprobs(self, rows: list[Row], hidden: Tensor) -> tuple[list[PromptChunk], list[Tensor]]:
        """For each row that wants prompt log probabilities: the prompt tokens that follow its tokens, and what
        logprob_tensors finds for these."""
        chunks: list[PromptChunk] = []
        tensors: list[Tensor] = []
        begin = 0
        for row in rows:
            if self._wants_prompt_logprobs(row):
                owner = self._owner(row)
                last = min(row.start + row.count + 1, owner.admission.num_prompt)
                following = owner.admission.token_ids[row.start + 1 : last]
                top = owner.rules.prompt_logprobs or 0
                for first in range(0, len(following), _LOGIT_ROWS):
                    part = following[first : first + _LOGIT_ROWS]
                    logits = self._model.logits(hidden[begin + first : begin + first + len(part)])
                    (tokens,) = upload([np.array(part, dtype=np.int64)], logits.device)
                    chunks.append(PromptChunk(row.request_id, part, top))
                    tensors += logprob_tensors(logits, tokens, top)
            begin += row.count
        return chunks, tensors

    def _owner(self, row: Row) -> Owner:
        owner = self._slots.owners[row.slot]
        assert owner is not None
        return owner

    def _wants_prompt_logprobs(self, row: Row) -> bool:
        owner = self._owner(row)
        return owner.rules.prompt_logprobs is not None and row.start < owner.admission.num_prompt - 1
