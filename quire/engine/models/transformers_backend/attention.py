from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor

from quire.engine.checkpoint.kv_cache_groups import KVCacheGroups
from quire.engine.common.errors import ModelError
from quire.engine.models.transformers_backend.interface import AttentionCall
from quire.engine.models.transformers_backend.probe import TransformersAttentionSpec
from quire.kernels.attention_params import AttentionParams
from quire.kernels.backend import AttentionMetadata, Backend, LayerCache


class PagedAttentionFunction:
    """Computes attention for a class's calls, which come in the same order as in the probe. So the n-th call is for the
    n-th layer. All tokens of a step form one row of a batch of size 1.
    """

    def __init__(
        self,
        backend: Backend,
        layers: Sequence[TransformersAttentionSpec],
        groups: KVCacheGroups,
        report_progress: Callable[[], None],
    ) -> None:
        self._backend = backend
        self._layers = layers
        self._groups = groups
        self._report_progress = report_progress
        self._attention_params = [AttentionParams(each.scale, each.window, each.softcap) for each in layers]
        self._metadata: AttentionMetadata | None = None
        self._kv_cache: Sequence[LayerCache] = ()
        self._num_calls = 0

    def bind_step(self, metadata: AttentionMetadata, kv_cache: Sequence[LayerCache]) -> None:
        self._metadata = metadata
        self._kv_cache = kv_cache
        self._num_calls = 0

    def finish_step(self) -> None:
        if self._num_calls != len(self._layers):
            raise ModelError(
                f"model: its class called attention {self._num_calls} times in a step, not {len(self._layers)} times"
            )
        self._metadata, self._kv_cache = None, ()

    @property
    def positions(self) -> Tensor:
        """[T] int64."""
        assert self._metadata is not None
        return self._metadata.positions

    def __call__(self, call: AttentionCall) -> Tensor:
        call_index = self._num_calls
        self._num_calls += 1
        kwargs = call.kwargs
        assert self._metadata is not None
        spec, metadata = (
            self._layers[call_index],
            self._metadata.group_metadata(self._groups.group_of_layer[call_index]),
        )
        k_cache, v_cache = self._kv_cache[self._groups.layer_index_in_block[call_index]]
        q, k, v = (_to_padded_token_rows(each, spec.head_dim) for each in (call.query, call.key, call.value))
        self._backend.store_kv(k, v, k_cache, v_cache, metadata.slot_mapping)
        params = self._attention_params[call_index]
        if spec.sinks:
            sinks = kwargs["s_aux"] if kwargs.get("s_aux") is not None else kwargs["sinks"]
            params = AttentionParams(params.scale, params.window, params.softcap, sinks=sinks.flatten().float())
        out = self._backend.paged_attention(q, k_cache, v_cache, metadata, params)
        self._report_progress()
        return out[None, ..., : spec.value_dim].contiguous()


def _to_padded_token_rows(x: Tensor, width: int) -> Tensor:
    """Maps [1, heads, T, D] to [T, heads, width], padded with zeros."""
    rows = x[0].transpose(0, 1)
    return (F.pad(rows, (0, width - x.shape[3])) if x.shape[3] < width else rows).contiguous()
