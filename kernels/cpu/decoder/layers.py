"""Decoder layers in one call, as layers.cpp runs them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.backend import AttentionMetadata, Linear, Pages
from quire.kernels.collective import Collective, RankEnded
from quire.kernels.cpu import native
from quire.kernels.cpu.decoder.experts import CompiledMixture
from quire.kernels.cpu.linear import CompiledLinear
from quire.kernels.cpu.lora import CompiledAdaptedLinear
from quire.kernels.cpu.ranks.collective import SharedCollective
from quire.kernels.kv_codes import KV_CODES
from quire.kernels.layers import DecoderLayer, DenseAttention, FusedLayers, SparseMlp

_NO_CACHE = native.KVFormat(0, 1.0, 1.0)
_RANK_ENDED = 2


@dataclass(frozen=True, slots=True)
class _Linear:
    own: CompiledLinear
    adapted: CompiledAdaptedLinear | None
    """The same with its room for adapters."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer of parts that are all ours."""

    whole: DecoderLayer
    qkv: _Linear
    out: _Linear
    dense: tuple[_Linear, _Linear] | None
    """gate_up and down; None where there are experts."""
    experts: CompiledMixture | None


def fused_layers(
    library: native.Native, layers: Sequence[DecoderLayer], group: Collective | None, *, head_dim: int, eps: float
) -> FusedLayers | None:
    """`Backend.fuse_layers`; None where a part is not one of ours, or the group is not."""
    ours = [made for made in map(_layer, layers) if made is not None]
    if not ours or len(ours) < len(layers) or not isinstance(group, SharedCollective | None):
        return None
    return _FusedLayers(library, ours, group, head_dim, eps)


def _layer(layer: DecoderLayer) -> _Layer | None:
    attention, mlp = layer
    qkv, out = _linear(attention.qkv), _linear(attention.out)
    if qkv is None or out is None:
        return None
    if isinstance(mlp, SparseMlp):
        return _Layer(layer, qkv, out, None, mlp.experts) if isinstance(mlp.experts, CompiledMixture) else None
    gate_up, down = _linear(mlp.gate_up), _linear(mlp.down)
    return None if gate_up is None or down is None else _Layer(layer, qkv, out, (gate_up, down), None)


def _linear(linear: Linear) -> _Linear | None:
    adapted = linear if isinstance(linear, CompiledAdaptedLinear) else None
    own = linear if adapted is None else adapted.linear
    return _Linear(own, adapted) if isinstance(own, CompiledLinear) else None


class _FusedLayers:
    def __init__(
        self,
        library: native.Native,
        layers: Sequence[_Layer],
        group: SharedCollective | None,
        head_dim: int,
        eps: float,
    ) -> None:
        self._layers, self._group = layers, group  # keeps alive what the pointers below point to
        qkv, out = layers[0].qkv.own, layers[0].out.own
        self._dtype = qkv.dtype
        self._kernel = library.decoder_layers[self._dtype]
        heads = out.inner // head_dim
        kv_heads = (qkv.outs // head_dim - heads) // 2
        gate = max((each.dense[1].own.inner for each in layers if each.dense is not None), default=0)
        self._shape = native.DecoderShape(qkv.inner, heads, kv_heads, head_dim, gate, eps)
        self._native = (native.DecoderLayer * len(layers))(*map(_native_layer, layers))
        self._caches: Sequence[Pages] = ()
        self._pages = 0

    def __call__(
        self, x: Tensor, residual: Tensor | None, metadata: AttentionMetadata, kv_cache: Sequence[Pages], layers: range
    ) -> tuple[Tensor, Tensor]:
        if kv_cache is not self._caches:
            self._take_caches(kv_cache)
        x, table, adapters = x.contiguous(), metadata.block_table, metadata.linear.adapters
        groups = (metadata, *metadata.others)
        tables = _pointers([each.block_table for each in groups])
        slots = _pointers([each.slots for each in groups])
        starts = residual is None
        residual = torch.empty_like(x) if residual is None else residual.contiguous()
        step = native.DecoderStep(
            x.data_ptr(),
            residual.data_ptr(),
            metadata.query_start.data_ptr(),
            metadata.context_lens.data_ptr(),
            ctypes.addressof(tables),
            metadata.positions.data_ptr(),
            ctypes.addressof(slots),
            table.shape[1],
            len(x),
            self._pages,
            table.shape[0],
            starts,
            None if adapters is None else adapters.data_ptr(),
            None if self._group is None else self._group.pointer,
        )
        first = ctypes.addressof(self._native) + layers.start * ctypes.sizeof(native.DecoderLayer)
        shape_ptr, step_ptr = ctypes.addressof(self._shape), ctypes.addressof(step)
        failed = self._kernel(first, len(layers), shape_ptr, step_ptr, torch.get_num_threads())
        if failed == _RANK_ENDED:
            raise RankEnded
        if failed:
            raise IndexError(f"a block table or a slot names a page outside the {self._pages} pages of the cache")
        return x, residual

    def _take_caches(self, kv_cache: Sequence[Pages]) -> None:
        self._caches = kv_cache
        self._pages = kv_cache[0][0].shape[0]
        for layer, ours in zip(self._native, self._layers, strict=True):
            attention = ours.whole[0]
            keys, values = kv_cache[attention.place]
            if keys.dtype != values.dtype or (keys.dtype != self._dtype and keys.dtype not in KV_CODES):
                raise TypeError(f"keys and values of {keys.dtype} and {values.dtype} cannot serve {self._dtype}")
            layer.format = native.kv_format(keys, attention.softmax.kv_scales) or native.KVFormat(0, 1.0, 1.0)
            layer.keys, layer.values = keys.data_ptr(), values.data_ptr()
            layer.key_stride, layer.value_stride = keys.stride(0), values.stride(0)


def _native_layer(layer: _Layer) -> native.DecoderLayer:
    """The layer without its caches."""
    attention, mlp = layer.whole
    made = native.DecoderLayer(qkv=layer.qkv.own.native, out=layer.out.own.native, format=_NO_CACHE)
    made.qkv_adapters, made.out_adapters = _adapters(layer.qkv), _adapters(layer.out)
    _set_attention(made, attention)
    made.output_norm = mlp.input_norm.data_ptr()
    if isinstance(mlp, SparseMlp):
        assert layer.experts is not None
        made.experts = ctypes.pointer(layer.experts.native)
    else:
        assert layer.dense is not None
        gate_up, down = layer.dense
        made.gate_up, made.down = gate_up.own.native, down.own.native
        made.gate_up_adapters, made.down_adapters = _adapters(gate_up), _adapters(down)
        made.mlp_norm, made.gelu = _pointer(mlp.output_norm), mlp.gelu
    return made


def _set_attention(made: native.DecoderLayer, attention: DenseAttention) -> None:
    rope, softmax = attention.rope, attention.softmax
    made.input_norm, made.attention_norm = attention.input_norm.data_ptr(), _pointer(attention.output_norm)
    made.q_norm, made.k_norm, made.cos_sin = _pointer(rope.q_norm), _pointer(rope.k_norm), _pointer(rope.cos_sin)
    made.window, made.scale, made.softcap = softmax.window or 0, softmax.scale, softmax.softcap or 0.0
    made.sinks, made.group = _pointer(softmax.sinks), attention.group


def _pointers(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _adapters(linear: _Linear) -> ctypes._Pointer[native.LoraLinear] | None:
    return None if linear.adapted is None else ctypes.pointer(linear.adapted.native)
