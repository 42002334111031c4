from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.architecture.decoder import EMBED_POSITIONS, EMBED_TOKENS, LM_HEAD
from quire.engine.layers.parameters import LoadableParameter, ParameterTable, make_loadable_parameter
from quire.engine.layers.sublayer import BuildContext
from quire.engine.layers.sublayer_shapes import SublayerShapes
from quire.kernels.backend import Linear, LinearContext, QuantizedEmbedding

_EMBED_WEIGHT = f"{EMBED_TOKENS}.weight"


class Embedding:
    def __init__(
        self,
        build_context: BuildContext,
        shapes: SublayerShapes,
        *,
        tied: bool,
        embeds_tokens: bool = True,
        scale: float,
    ) -> None:
        """`tied`: the table is also the LM head. `embeds_tokens` is False if it is only the LM head."""
        self._shard = build_context.shard
        self._vocab_size, self._hidden_size = shapes.rows_and_columns(EMBED_TOKENS)
        self._cut = build_context.shard.output_slice(self._vocab_size)
        self._adapters = build_context.adapters
        self._scheme = build_context.scheme
        self._table_spec = self._scheme.embedding_tensor_spec(self._vocab_size, self._hidden_size)
        self._tied = tied
        self._embeds_tokens = embeds_tokens
        self.scale = torch.tensor(
            scale, dtype=build_context.dtype
        ).item()  # rounded to the weights' dtype, as Gemma was trained
        self._table: QuantizedEmbedding | None = None
        self._lm_head: Linear | None = None

    def parameters(self) -> ParameterTable:
        stored = self._table_spec
        return {
            _EMBED_WEIGHT: LoadableParameter(
                stored.shape,
                stored.dtype,
                self._pack_table_and_lm_head,
                partial(self._cut.slice_tensor_on_read, which=stored.early_slice_axes),
            )
        }

    def embed_tokens(self, token_ids: Tensor, context: LinearContext) -> Tensor:
        """Maps [T] to a new tensor [T, hidden]."""
        x = self.lookup_rows(token_ids)
        if self._adapters is not None:
            x = self._adapters.add_embedding_deltas(x, token_ids, context)
        return x if self.scale == 1 else x.mul_(self.scale)

    def lookup_rows(self, token_ids: Tensor) -> Tensor:
        assert self._table is not None, "weights are not loaded"
        if (vocab_range := self._cut.output_range) is None:
            return self._table.embed_tokens(token_ids)
        local_ids = token_ids - vocab_range.start
        clamped_ids = local_ids.clamp(0, len(vocab_range) - 1)
        return self._shard.all_reduce(
            self._table.embed_tokens(clamped_ids).masked_fill_((local_ids != clamped_ids)[:, None], 0)
        )

    @property
    def lm_head(self) -> Linear:
        """Computes float32 logits of this rank's part of the vocabulary."""
        assert self._lm_head is not None, "it is not the head, or its weights are not loaded"
        return self._lm_head

    def _pack_table_and_lm_head(self, tensor: Tensor) -> None:
        table = self._scheme.pack_embedding(tensor, self._cut, tied=self._tied)
        self._table, self._lm_head = table if self._embeds_tokens else None, table.lm_head
        if self._lm_head is not None and self._adapters is not None:
            sizes = {LM_HEAD: self._vocab_size}, self._hidden_size
            self._lm_head = self._adapters.add_slots_to_linear(self._lm_head, *sizes, {LM_HEAD: self._cut}, wide=True)


class PositionEmbedding:
    def __init__(self, shapes: SublayerShapes, dtype: torch.dtype) -> None:
        self._shape, self._dtype = shapes.rows_and_columns(EMBED_POSITIONS), dtype
        self._table: dict[str, Tensor] = {}

    def parameters(self) -> ParameterTable:
        return {
            f"{EMBED_POSITIONS}.weight": make_loadable_parameter(self._table, EMBED_POSITIONS, self._shape, self._dtype)
        }

    def add_positions(self, x: Tensor, positions: Tensor) -> Tensor:
        return x.add_(F.embedding(positions, self._table[EMBED_POSITIONS]))
