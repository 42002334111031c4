"""Attention of transformers' classes on our pages: the tokens of a step are one row of the class's, ragged over
sequences in ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor

from quire.engine.checkpoint.page_groups import PageGroups
from quire.engine.errors import ModelError
from quire.engine.models.adapted.interface import AttentionCall
from quire.engine.models.adapted.probe import AdaptedAttention
from quire.kernels.backend import AttentionMetadata, Backend, Pages
from quire.kernels.softmax import Softmax


class Paged:
    """Attends by way of pages. A class calls its attention in the order in which it did when it was probed, so the
    n-th call of a step is the n-th layer's."""

    def __init__(
        self,
        backend: Backend,
        layers: Sequence[AdaptedAttention],
        groups: PageGroups,
        progress: Callable[[], None],
    ) -> None:
        self._backend, self._layers, self._groups, self._progress = backend, layers, groups, progress
        self._softmax = [Softmax(each.scale, each.window, each.softcap) for each in layers]
        self._metadata: AttentionMetadata | None = None
        self._pages: Sequence[Pages] = ()
        self._calls = 0

    def begin(self, metadata: AttentionMetadata, pages: Sequence[Pages]) -> None:
        """Before each step; `pages`: by place."""
        self._metadata, self._pages, self._calls = metadata, pages, 0

    def end(self) -> None:
        if self._calls != len(self._layers):
            raise ModelError(f"model: its class attended {self._calls} times in a step, not {len(self._layers)} times")
        self._metadata, self._pages = None, ()

    @property
    def positions(self) -> Tensor:
        """[T], of the tokens of the step."""
        assert self._metadata is not None
        return self._metadata.positions

    def __call__(self, call: AttentionCall) -> Tensor:
        number, self._calls, given = self._calls, self._calls + 1, call.given
        assert self._metadata is not None
        spec, metadata = self._layers[number], self._metadata.of(self._groups.group_of[number])
        k_cache, v_cache = self._pages[self._groups.place_of[number]]
        q, k, v = (_rows(each, spec.head_dim) for each in (call.query, call.key, call.value))
        self._backend.store_kv(k, v, k_cache, v_cache, metadata.slots)
        softmax = self._softmax[number]
        if spec.sinks:
            sinks = given["s_aux"] if given.get("s_aux") is not None else given["sinks"]
            softmax = Softmax(softmax.scale, softmax.window, softmax.softcap, sinks=sinks.flatten().float())
        out = self._backend.paged_attention(q, k_cache, v_cache, metadata, softmax)
        self._progress()
        return out[None, ..., : spec.value_dim].contiguous()


def _rows(x: Tensor, width: int) -> Tensor:
    """[1, heads, T, D] to [T, heads, width], zeros behind D."""
    rows = x[0].transpose(0, 1)
    return (F.pad(rows, (0, width - x.shape[3])) if x.shape[3] < width else rows).contiguous()
