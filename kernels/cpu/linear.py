"""Packed linears (linear.cpp), and decoder layers made of them (layers.cpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels.backend import AttentionMetadata, DecoderLayer, FusedLayers, LinearContext, Pages
from quire.kernels.cpu import native


class PackedLinear:
    """x @ weight.T + bias. The result has the dtype of the weight, or is float32 if `wide`."""

    def __init__(self, library: native.Native, weight: Tensor, bias: Tensor | None, *, wide: bool) -> None:
        self.outs, self.inner = weight.shape
        self.dtype = weight.dtype
        self._out_dtype = torch.float32 if wide else weight.dtype
        self._kernel = library.linear[weight.dtype]
        self._bias = None if bias is None else bias.to(weight.dtype).contiguous()
        weight = weight.contiguous()
        packed = weight.new_empty((self.outs + 63) // 64 * 64 * self.inner)
        shape, threads = (self.inner, self.outs), torch.get_num_threads()
        library.pack_linear[weight.dtype](weight.data_ptr(), packed.data_ptr(), *shape, threads)
        compressed = library.compressed_size(packed.data_ptr(), *shape, threads) if self.dtype == torch.bfloat16 else 0
        self._weight = library.weights.empty(compressed or packed.nbytes)
        if compressed:
            library.compress(packed.data_ptr(), self._weight.data_ptr(), *shape, threads)
        else:
            self._weight.view(self.dtype).copy_(packed)
        bias_ptr = None if self._bias is None else self._bias.data_ptr()
        self.native = native.PackedLinear(self._weight.data_ptr(), bias_ptr, *shape, compressed > 0, wide)
        self._pointer = ctypes.addressof(self.native)

    def __call__(self, x: Tensor, context: LinearContext) -> Tensor:
        rows, inner = x.shape
        if x.dtype != self.dtype or inner != self.inner:
            raise TypeError(
                f"a linear of {self.dtype} from {self.inner} to {self.outs} cannot take {list(x.shape)} of {x.dtype}"
            )
        x = x.contiguous()
        out = x.new_empty((rows, self.outs), dtype=self._out_dtype)
        self._kernel(self._pointer, x.data_ptr(), out.data_ptr(), rows, torch.get_num_threads(), None)
        return out


def fuse_layers(
    library: native.Native, layers: Sequence[DecoderLayer], *, head_dim: int, eps: float
) -> FusedLayers | None:
    """`Backend.fuse_layers`; None where a linear is not one of ours."""
    parts = [part for attention, mlp in layers for part in (attention.qkv, attention.out, mlp.gate_up, mlp.down)]
    ours = [part for part in parts if isinstance(part, PackedLinear)]
    if not ours or len(ours) < len(parts):
        return None
    return _FusedLayers(library, layers, ours, head_dim, eps)


class _FusedLayers:
    def __init__(
        self,
        library: native.Native,
        layers: Sequence[DecoderLayer],
        linears: Sequence[PackedLinear],
        head_dim: int,
        eps: float,
    ) -> None:
        """`linears`: qkv, out, gate_up and down of each layer in turn."""
        self._layers = layers  # keeps alive what the pointers below point to
        qkv, out, _, down = linears[:4]
        self._dtype = qkv.dtype
        self._kernel = library.decoder_layers[self._dtype]
        heads = out.inner // head_dim
        kv_heads = (qkv.outs // head_dim - heads) // 2
        self._shape = native.DecoderShape(qkv.inner, heads, kv_heads, head_dim, down.inner, eps)
        self._native = (native.DecoderLayer * len(layers))()
        for index, layer in enumerate(layers):
            self._native[index] = _native_layer(layer, linears[4 * index : 4 * index + 4])
        self._caches: Sequence[Pages] = ()
        self._pages = 0

    def __call__(
        self, x: Tensor, residual: Tensor | None, metadata: AttentionMetadata, kv_cache: Sequence[Pages], layers: range
    ) -> tuple[Tensor, Tensor]:
        assert metadata.linear.adapters is None, "these layers multiply by the packed weights alone"
        if kv_cache is not self._caches:
            self._take_caches(kv_cache)
        x, table = x.contiguous(), metadata.block_table
        starts = residual is None
        residual = torch.empty_like(x) if residual is None else residual.contiguous()
        step = native.DecoderStep(
            x.data_ptr(),
            residual.data_ptr(),
            metadata.query_start.data_ptr(),
            metadata.context_lens.data_ptr(),
            table.data_ptr(),
            metadata.positions.data_ptr(),
            metadata.slots.data_ptr(),
            table.shape[1],
            len(x),
            self._pages,
            table.shape[0],
            starts,
        )
        first = ctypes.addressof(self._native) + layers.start * ctypes.sizeof(native.DecoderLayer)
        shape_ptr, step_ptr = ctypes.addressof(self._shape), ctypes.addressof(step)
        if self._kernel(first, len(layers), shape_ptr, step_ptr, torch.get_num_threads()):
            raise IndexError(f"a block table or a slot names a page outside the {self._pages} pages of the cache")
        return x, residual

    def _take_caches(self, kv_cache: Sequence[Pages]) -> None:
        self._caches = kv_cache
        self._pages = kv_cache[0][0].shape[0]
        for layer, (keys, values) in zip(self._native, kv_cache, strict=False):
            if not (keys.dtype == values.dtype == self._dtype):
                raise TypeError(f"keys and values of {keys.dtype} and {values.dtype} cannot serve {self._dtype}")
            layer.keys, layer.values = keys.data_ptr(), values.data_ptr()
            layer.key_stride, layer.value_stride = keys.stride(0), values.stride(0)


def _native_layer(layer: DecoderLayer, linears: Sequence[PackedLinear]) -> native.DecoderLayer:
    """The layer without its caches."""
    attention, mlp = layer
    rope, softmax = attention.rope, attention.softmax
    norms = [attention.input_norm, mlp.input_norm, rope.q_norm, rope.k_norm, attention.output_norm, mlp.output_norm]
    pointers = [None if each is None else each.data_ptr() for each in (*norms, rope.cos_sin)]
    natives = [linear.native for linear in linears]
    rules = (softmax.window or 0, softmax.scale, softmax.softcap or 0.0, mlp.gelu)
    return native.DecoderLayer(*natives, *pointers, None, None, 0, 0, *rules)
