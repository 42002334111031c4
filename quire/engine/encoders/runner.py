"""The Executor of an encoder: whole prompts in, vectors out. It has no pages, no sampler and nothing to keep but who
was admitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from quire.engine.core.scheduler_output import ModelRunnerOutput, NewRequestData, ScheduledRequest, SchedulerOutput
from quire.engine.encoders.encoder import Encoder
from quire.engine.layers.pooling import PooledRow, Pooler, finished_rows
from quire.engine.types import PoolingParams


class Computed:
    """A step that is done."""

    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def result(self) -> ModelRunnerOutput:
        return self._output


class ImageVectors(Protocol):
    """Makes vectors of images: see engine/worker/images/features.py."""

    def look(self, batch: SchedulerOutput, owner: Callable[[ScheduledRequest], NewRequestData]) -> None: ...
    def vectors(
        self, rows: Sequence[ScheduledRequest], owner: Callable[[ScheduledRequest], NewRequestData]
    ) -> Tensor: ...


class EncoderRunner:
    def __init__(
        self,
        model: Encoder,
        pooler: Pooler,
        images: ImageVectors | None = None,
        padding: int | None = None,
    ) -> None:
        """`images`: where they have vectors too. `padding`: the token that prompts are filled up with; None: they are
        not."""
        self._model = model
        self._pooler = pooler
        self._images, self._padding = images, padding
        self._owners: dict[int, NewRequestData] = {}

    @torch.inference_mode()
    def launch(self, batch: SchedulerOutput) -> Computed:
        for admission in batch.new_requests:
            self._owners[admission.slot] = admission
        if self._images is not None:
            self._images.look(batch, self._owner)
        rows = batch.with_tokens.scheduled_requests
        shown = [row for row in rows if self._owner(row).spans]
        texts = [row for row in rows if not self._owner(row).spans]
        found = dict[str, bytes]()
        if shown:
            assert self._images is not None
            pooled = [PooledRow(row, 0, 1, self._params(row)) for row in shown]
            vectors = self._images.vectors(shown, self._owner).float().cpu()
            found |= finished_rows(pooled, vectors, self._pooler.pooling)
        return Computed(ModelRunnerOutput({}, vectors=found | (self._of_texts(texts) if texts else {})))

    def _of_texts(self, rows: Sequence[ScheduledRequest]) -> dict[str, bytes]:
        pooled, ids, begin = [], list[np.ndarray](), 0
        for row in rows:
            owner = self._owner(row)
            assert row.num_tokens == owner.num_prompt, "an encoder computes whole prompts"
            ids.append(np.array(owner.token_ids, dtype=np.int32))
            if self._padding is not None:
                room = self._model.max_model_len - row.num_tokens
                ids[-1] = np.pad(ids[-1], (0, room), constant_values=self._padding)
            filled = msgspec.structs.replace(row, num_tokens=len(ids[-1]))
            pooled.append(PooledRow(filled, begin, filled.num_tokens, self._params(row)))
            begin += filled.num_tokens
        lengths = np.array([len(each) for each in ids], dtype=np.int64)
        token_ids = torch.from_numpy(np.concatenate(ids)).to(self._model.device)
        hidden = self._model.forward(token_ids, self._segments(pooled), lengths)
        vectors = self._pooler.take(pooled, hidden).cpu()
        return finished_rows(pooled, vectors, self._pooler.pooling)

    def _owner(self, row: ScheduledRequest) -> NewRequestData:
        return self._owners[row.slot]

    def _params(self, row: ScheduledRequest) -> PoolingParams:
        params = self._owner(row).params
        assert isinstance(params, PoolingParams)
        return params

    def warm_up(self) -> bool:
        return False

    def mover(self) -> None:
        """It keeps no pages."""

    def state_mover(self) -> None:
        """Nor slots."""

    def load_grammars(self) -> None:
        pass

    def _segments(self, rows: list[PooledRow]) -> Tensor | None:
        """Which of two texts each token is of; None where there are no second ones."""
        if all(each.params.second_segment is None for each in rows):
            return None
        segments = np.zeros(sum(each.length for each in rows), dtype=np.int64)
        for each in rows:
            if each.params.second_segment is not None:
                segments[each.begin + each.params.second_segment : each.begin + each.length] = 1
        return torch.from_numpy(segments).to(self._model.device)
