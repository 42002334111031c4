from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from quire.engine.common.request_params import PoolingParams
from quire.engine.common.scheduler_output import ModelRunnerOutput, NewRequestData, ScheduledRequest, SchedulerOutput
from quire.engine.encoders.encoder import Encoder
from quire.engine.layers.pooling import Pooler, PoolingChunk, postprocess_vectors_by_request_id


class CompletedStep:
    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def sample_tokens(self) -> None:
        """Encoders sample no tokens."""

    def result(self) -> ModelRunnerOutput:
        return self._output


class ImageEmbedder(Protocol):
    def run_scheduled_encoder_chunks(
        self, batch: SchedulerOutput, owner: Callable[[ScheduledRequest], NewRequestData]
    ) -> None: ...
    def image_request_vectors(
        self, rows: Sequence[ScheduledRequest], owner: Callable[[ScheduledRequest], NewRequestData]
    ) -> Tensor: ...


class EncoderRunner:
    def __init__(
        self,
        model: Encoder,
        pooler: Pooler,
        images: ImageEmbedder | None = None,
        padding_token: int | None = None,
    ) -> None:
        """If `padding_token` is None, prompts are not padded."""
        self._model = model
        self._pooler = pooler
        self._images, self._padding_token = images, padding_token
        self._requests: dict[int, NewRequestData] = {}

    @torch.inference_mode()
    def launch(self, batch: SchedulerOutput) -> CompletedStep:
        for admission in batch.new_requests:
            self._requests[admission.slot] = admission
        if self._images is not None:
            self._images.run_scheduled_encoder_chunks(batch, self._request_data)
        rows = batch.without_encoder_only.scheduled_requests
        image_requests = [row for row in rows if self._request_data(row).spans]
        text_requests = [row for row in rows if not self._request_data(row).spans]
        answers = dict[str, bytes]()
        if image_requests:
            assert self._images is not None
            pooled = [PoolingChunk(row, 0, 1, self._pooling_params(row)) for row in image_requests]
            vectors = self._images.image_request_vectors(image_requests, self._request_data).float().cpu()
            answers |= postprocess_vectors_by_request_id(pooled, vectors, self._pooler.pooling)
        return CompletedStep(
            ModelRunnerOutput({}, vectors=answers | (self._embed_texts(text_requests) if text_requests else {}))
        )

    def _embed_texts(self, rows: Sequence[ScheduledRequest]) -> dict[str, bytes]:
        pooled = []
        ids = list[np.ndarray]()
        begin = 0
        for row in rows:
            request = self._request_data(row)
            assert row.num_tokens == request.num_prompt_tokens, "an encoder computes whole prompts"
            ids.append(np.array(request.token_ids, dtype=np.int32))
            if self._padding_token is not None:
                num_padding_tokens = self._model.max_model_len - row.num_tokens
                ids[-1] = np.pad(ids[-1], (0, num_padding_tokens), constant_values=self._padding_token)
            padded = msgspec.structs.replace(row, num_tokens=len(ids[-1]))
            pooled.append(PoolingChunk(padded, begin, padded.num_tokens, self._pooling_params(row)))
            begin += padded.num_tokens
        lengths = np.array([len(each) for each in ids], dtype=np.int64)
        token_ids = torch.from_numpy(np.concatenate(ids)).to(self._model.device)
        hidden = self._model.forward(token_ids, self._token_type_ids(pooled), lengths)
        vectors = self._pooler.pool(pooled, hidden).cpu()
        return postprocess_vectors_by_request_id(pooled, vectors, self._pooler.pooling)

    def _request_data(self, row: ScheduledRequest) -> NewRequestData:
        return self._requests[row.slot]

    def _pooling_params(self, row: ScheduledRequest) -> PoolingParams:
        params = self._request_data(row).params
        assert isinstance(params, PoolingParams)
        return params

    def warm_up_next(self) -> bool:
        return False

    def make_block_mover(self) -> None:
        """An encoder keeps no KV blocks."""

    def make_state_offload_mover(self) -> None:
        """An encoder has no state slots."""

    def preload_grammar_compiler(self) -> None:
        pass

    def _token_type_ids(self, rows: list[PoolingChunk]) -> Tensor | None:
        """Return [T] int64, or None if all are 0."""
        if all(each.params.second_segment is None for each in rows):
            return None
        segments = np.zeros(sum(each.prompt_len for each in rows), dtype=np.int64)
        for each in rows:
            if each.params.second_segment is not None:
                segments[each.first_row + each.params.second_segment : each.first_row + each.prompt_len] = 1
        return torch.from_numpy(segments).to(self._model.device)
