from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.engine.architecture.pooler_head import HeadLayerSpec
from quire.engine.checkpoint.pooling import PoolingConfig
from quire.engine.common.request_params import PoolingParams
from quire.engine.common.scheduler_output import ScheduledRequest
from quire.engine.layers.pooler_head import PoolerHead
from quire.kernels.backend import Backend
from quire.kernels.gpu.other_devices import accumulation_dtype

PoolerHeadFunction = Callable[[Tensor], Tensor]
"""Maps [R, hidden] to [R, size] float32."""


@dataclass(frozen=True, slots=True)
class PoolingChunk:
    scheduled: ScheduledRequest
    first_row: int
    prompt_len: int
    params: PoolingParams

    @property
    def is_last_chunk(self) -> bool:
        return self.scheduled.start + self.scheduled.num_tokens == self.prompt_len


class Pooler:
    """Sums are float64 if the device has it. On CPUs they grow token by token, so chunks do not affect results. On GPUs
    the order of additions may vary.
    """

    def __init__(
        self, pooling: PoolingConfig, head: PoolerHeadFunction, num_slots: int, hidden_size: int, device: torch.device
    ) -> None:
        self.pooling = pooling
        self._head = head
        self._accumulated = torch.empty(0)
        """[slots, hidden]: the running sum, or the first token's state."""
        self._token_vectors: dict[int, list[Tensor]] = {}
        """By slot: one tensor [tokens, size] per chunk."""
        if pooling.pooling_type in ("mean", "cls"):
            self._accumulated = torch.zeros((num_slots, hidden_size), dtype=accumulation_dtype(device), device=device)

    def pool(self, rows: Sequence[PoolingChunk], hidden: Tensor) -> Tensor:
        """Returns [R, size] float32 for the R rows that end their prompt, or with pooling type "none" [the sum of these
        prompts' tokens, size]. `hidden` [T, hidden] covers all tokens in the step.
        """
        if self.pooling.pooling_type == "none":
            return self._pool_tokens_across_chunks(rows, hidden)
        finished_rows = [each for each in rows if each.is_last_chunk]
        if self.pooling.pooling_type != "last":
            self._accumulate(rows, hidden)
        if not finished_rows:
            return hidden.new_empty((0, self.pooling.vector_size), dtype=torch.float32)
        if self.pooling.pooling_type == "last":
            return self._head(hidden[[each.first_row + each.scheduled.num_tokens - 1 for each in finished_rows]])
        pooled = self._accumulated[[each.scheduled.slot for each in finished_rows]]
        if self.pooling.pooling_type == "mean":
            pooled /= torch.tensor(
                [[each.prompt_len] for each in finished_rows], dtype=pooled.dtype, device=pooled.device
            )
        return self._head(pooled)

    def _pool_tokens_across_chunks(self, rows: Sequence[PoolingChunk], hidden: Tensor) -> Tensor:
        finished_vectors = [hidden.new_empty((0, self.pooling.vector_size), dtype=torch.float32)]
        for each in rows:
            if each.scheduled.start == 0:
                self._token_vectors[each.scheduled.slot] = []
            parts = self._token_vectors[each.scheduled.slot]
            parts.append(self._head(hidden[each.first_row : each.first_row + each.scheduled.num_tokens]).float())
            if each.is_last_chunk:
                finished_vectors += self._token_vectors.pop(each.scheduled.slot)
        return torch.cat(finished_vectors)

    def _accumulate(self, rows: Sequence[PoolingChunk], hidden: Tensor) -> None:
        accumulated = self._accumulated
        starting = [each for each in rows if each.scheduled.start == 0]
        slots = [each.scheduled.slot for each in starting]
        if self.pooling.pooling_type == "cls":
            if starting:
                accumulated[slots] = hidden[[each.first_row for each in starting]].to(accumulated.dtype)
        else:
            accumulated[slots] = 0
            slot_of_token = torch.tensor(
                [each.scheduled.slot for each in rows for _ in range(each.scheduled.num_tokens)], device=hidden.device
            )
            if len(slot_of_token) < len(hidden):
                spans = [np.arange(each.first_row, each.first_row + each.scheduled.num_tokens) for each in rows]
                hidden = hidden[torch.from_numpy(np.concatenate(spans)).to(hidden.device)]
            accumulated.index_add_(0, slot_of_token, hidden.to(accumulated.dtype))


def make_pooler_head(
    pooling: PoolingConfig, backend: Backend, classifier: Callable[[int, int], Sequence[HeadLayerSpec]], hidden: int
) -> PoolerHead:
    dense = [
        HeadLayerSpec(f"{each.folder}.linear", each.in_features, each.out_features, each.bias, each.activation)
        for each in pooling.dense_modules
    ]
    is_classifier = pooling.labels and pooling.classifier_tokens is None
    return PoolerHead(classifier(hidden, pooling.vector_size) if is_classifier else dense, backend)


def postprocess_vectors_by_request_id(
    rows: Sequence[PoolingChunk], vectors: Tensor, pooling: PoolingConfig
) -> dict[str, bytes]:
    """Includes only rows that end their prompt. `vectors` are float32."""
    last_chunks = [each for each in rows if each.is_last_chunk]
    row_vectors = list(vectors.numpy())
    if pooling.pooling_type == "none":
        row_vectors = np.split(vectors.numpy(), np.cumsum([each.prompt_len for each in last_chunks])[:-1])
    return {
        each.scheduled.request_id: postprocess_vector_to_bytes(row_vectors[i], each.params, pooling)
        for i, each in enumerate(last_chunks)
    }


def postprocess_vector_to_bytes(vector: np.ndarray, params: PoolingParams, pooling: PoolingConfig) -> bytes:
    """`vector` is [size] or [tokens, size] float32."""
    wide = vector.astype(np.float64)
    if not pooling.labels:
        wide = wide[..., : params.dimensions]
        if pooling.normalize if params.activation is None else params.activation:
            wide /= np.maximum(np.sqrt(np.square(wide).sum(-1, keepdims=True)), 1e-12)
    elif params.activation is not False:
        wide = _apply_activation(wide, pooling)
    return wide.astype("<f4").tobytes()


def _apply_activation(scores: np.ndarray, pooling: PoolingConfig) -> np.ndarray:
    if pooling.activation == "sigmoid":
        return 1 / (1 + np.exp(-scores))
    if pooling.activation == "softmax":
        weights = np.exp(scores - scores.max())
        return weights / weights.sum()
    return scores
