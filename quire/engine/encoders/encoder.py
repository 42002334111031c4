"""Bidirectional transformer (Devlin et al., 2019), pre- or post-norm. Each layer stores its keys and values in the same
KV blocks, where the decoders' attention kernels read them. A step computes whole prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.architecture.encoder import EncoderSpec
from quire.engine.architecture.parameter_shapes import ParameterShapes
from quire.engine.encoders.encoder_chunks import (
    MAX_CHUNK_TOKENS,
    QKV_COST_SHARE,
    chunk_cost,
    count_kv_blocks,
    make_chunks_with_metadata,
    ragged_positions,
    run_all_chunks,
)
from quire.engine.layers.linear import FusedLinear
from quire.engine.layers.norm import LayerNormWeights
from quire.engine.layers.parameters import LoadableParameter, ParameterTable, make_loadable_parameter, merge_parameters
from quire.engine.layers.rope import rope_table
from quire.engine.layers.schemes import QuantizationScheme
from quire.kernels.activation import sigmoid, silu
from quire.kernels.attention_params import AttentionParams
from quire.kernels.backend import NO_ADAPTERS, Backend
from quire.kernels.gpu.host_transfer import upload_arrays
from quire.kernels.parameters.activation import GELU
from quire.kernels.parameters.activation import Activation as Elementwise
from quire.kernels.qk_norm_rope import QKNormRopeParams

MAX_BUCKET_DISTANCE = 128


class _EncoderLayerWeights:
    def __init__(self, spec: EncoderSpec, scheme: QuantizationScheme, index: int, cos_sin: Tensor | None) -> None:
        names = spec.names
        name = names.layer_template.format(index)
        self._shapes = shapes = spec.layer_shapes(index)

        def make_linear(*parts: str) -> FusedLinear:
            weights = {f"{name}.{part}": shapes[f"{name}.{part}.weight"] for part in parts}
            sizes = {linear: out for linear, (out, _) in weights.items()}
            in_features = weights[f"{name}.{parts[0]}"][1]
            return FusedLinear(scheme, in_features, sizes, bias=f"{name}.{parts[0]}.bias" in shapes)

        self.qkv, self.out = make_linear(*names.qkv), make_linear(names.out)
        self.up, self.down = make_linear(*names.up), make_linear(names.down)
        self.gate_last = spec.gate_last
        self.attention_norm = _make_norm(shapes, f"{name}.{names.attention_norm}")
        self.mlp_norm = _make_required_norm(shapes, f"{name}.{names.mlp_norm}")
        self.scales: list[Tensor | None] = [None, None]
        self._scale_names = [f"{name}.{each}" for each in names.layer_scales or ()]
        self._head_norms = [_make_required_norm(shapes, f"{name}.{norm}") for norm in names.qk_norms or ()]
        self._rope = QKNormRopeParams(spec.head_dim, cos_sin, eps=spec.eps, norm_kind="whole")
        window = spec.windows[index]
        self.window = None if window is None else window + 1
        self.lookahead = 0 if spec.causal else window

    @property
    def qk_norm_rope_params(self) -> QKNormRopeParams:
        if not self._head_norms:
            return self._rope
        q_norm, k_norm = self._head_norms
        return replace(self._rope, q_norm=q_norm.weight, k_norm=k_norm.weight)

    def parameters(self) -> ParameterTable:
        norms = (self.attention_norm, self.mlp_norm, *self._head_norms)
        table = merge_parameters(self.qkv, self.out, self.down, *norms)
        for place, name in enumerate(self._scale_names):
            table[name] = make_loadable_parameter(self.scales, place, self._shapes[name], torch.float32)
        up = self.up.parameters()
        return table | ({name: _swap_halves_on_load(each) for name, each in up.items()} if self.gate_last else up)


def _make_required_norm(shapes: ParameterShapes, name: str) -> LayerNormWeights:
    return LayerNormWeights(name, *shapes[f"{name}.weight"], bias=f"{name}.bias" in shapes)


def _make_norm(shapes: ParameterShapes, name: str | None) -> LayerNormWeights | None:
    return None if name is None or f"{name}.weight" not in shapes else _make_required_norm(shapes, name)


def _swap_halves_on_load(parameter: LoadableParameter) -> LoadableParameter:
    def load_swapped(tensor: Tensor) -> None:
        second_half, first_half = tensor.chunk(2)
        parameter.weight_loader(torch.cat((first_half, second_half)))

    return replace(parameter, weight_loader=load_swapped)


class Encoder:
    """Load weights through `parameters()` before use."""

    def __init__(
        self,
        spec: EncoderSpec,
        backend: Backend,
        scheme: QuantizationScheme,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        report_progress: Callable[[], None],
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.device = device
        self.max_model_len = max_model_len
        self._backend = backend
        self._report_progress = report_progress
        ropes = {str(rope): rope for rope in spec.ropes if rope is not None}
        tables = {key: rope_table(rope, spec.head_dim, max_model_len).to(device) for key, rope in ropes.items()}
        self._layers = [
            _EncoderLayerWeights(spec, scheme, i, tables.get(str(rope))) for i, rope in enumerate(spec.ropes)
        ]
        self._embedding_tables: dict[str, Tensor] = {}
        self._shapes = spec.parameter_shapes()
        self._embedding_norm, self._final_norm = (
            _make_norm(self._shapes, name) for name in (spec.names.embedding_norm, spec.names.final_norm)
        )

    def parameters(self) -> ParameterTable:
        names, table = self.spec.names, ParameterTable()
        for name in (names.word_embeddings, names.position_embeddings, names.token_type_embeddings):
            if (shape := self._shapes.get(f"{name}.weight")) is not None:
                table[f"{name}.weight"] = make_loadable_parameter(self._embedding_tables, name, shape, self.dtype)
        if (name := names.relative_attention_bias) is not None:
            weight = f"{name}.weight"
            table[weight] = make_loadable_parameter(
                self._embedding_tables, name, self._shapes[weight], torch.float32, self._expand_relative_bias
            )
        return table | merge_parameters(self._embedding_norm, self._final_norm, *self._layers)

    def forward(self, token_ids: Tensor, segments: Tensor | None, lengths: np.ndarray) -> Tensor:
        """Return [T, hidden]. `lengths` [S] and `segments` [T] are int64; segments default to 0."""
        (positions,) = upload_arrays([ragged_positions(lengths)], self.device)
        return run_all_chunks(
            self.forward_in_chunks(self._embed_tokens(token_ids, segments, positions), [lengths], splits_tokens=False)
        )[0]

    def forward_in_chunks(
        self,
        x: Tensor,
        lengths: Sequence[np.ndarray],
        cos_sin: Tensor | None = None,
        aux_layers: Sequence[int] = (),
        *,
        splits_tokens: bool = True,
    ) -> Generator[float, None, tuple[Tensor, list[Tensor]]]:
        """Yield costs that sum to `chunk_cost` of the tokens. Return the output and the states after `aux_layers`
        (ascending).

        `lengths` has, per metadata group, the lengths of the sequences within which tokens attend. `cos_sin` is [T,
        head_dim] float32. If `splits_tokens`, a chunk may hold part of a sequence.
        """
        backend = self._backend
        spec = self.spec
        aux_hidden_states = list[Tensor]()
        bias, size = self._embedding_tables.get(spec.names.relative_attention_bias or ""), self._backend.block_size
        num_blocks = max(count_kv_blocks(each, size) for each in lengths)
        shape = backend.kv_cache_shape(num_blocks, spec.num_heads, spec.head_dim, self.dtype)
        keys, values = (torch.empty(shape, dtype=self.dtype, device=self.device) for _ in range(2))
        max_rows, has_rope = MAX_CHUNK_TOKENS if splits_tokens else None, cos_sin is not None
        groups = [
            (make_chunks_with_metadata(each, size, self.device, max_rows, has_rope_table=has_rope), int(each.max()))
            for each in lengths
        ]
        for index, layer in enumerate(self._layers):
            chunks, num_visible = groups[spec.metadata_groups[index] if spec.metadata_groups else 0]
            rope = layer.qk_norm_rope_params if cos_sin is None else replace(layer.qk_norm_rope_params, cos_sin=cos_sin)
            softmax = AttentionParams(spec.head_dim**-0.5, layer.window, lookahead=layer.lookahead, relative_bias=bias)
            queries, outputs = list[Tensor](), list[Tensor]()
            for rows, metadata in chunks:
                queries.append(
                    backend.rope_and_store_kv(self._norm_and_project_qkv(layer, x[rows]), rope, keys, values, metadata)
                )
                yield QKV_COST_SHARE * len(queries[-1]) / spec.num_layers
            for (rows, metadata), q in zip(chunks, queries, strict=True):
                attended = backend.paged_attention(q, keys, values, metadata, softmax).flatten(1)
                outputs.append(self._finish_layer(layer, layer.out.packed_linear(attended, NO_ADAPTERS), x[rows]))
                yield (chunk_cost(len(q), num_visible, spec.hidden_size) - QKV_COST_SHARE * len(q)) / spec.num_layers
            x = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
            if index in aux_layers:
                aux_hidden_states.append(x.clone())  # a backend may overwrite x
            self._report_progress()
        return x if self._final_norm is None else self._apply_norm(x, self._final_norm), aux_hidden_states

    def _norm_and_project_qkv(self, layer: _EncoderLayerWeights, x: Tensor) -> Tensor:
        normed = (
            x if layer.attention_norm is None or not self.spec.pre_norm else self._apply_norm(x, layer.attention_norm)
        )
        return layer.qkv.packed_linear(normed, NO_ADAPTERS)

    def _finish_layer(self, layer: _EncoderLayerWeights, attended: Tensor, x: Tensor) -> Tensor:
        if self.spec.pre_norm:
            attention_scale, mlp_scale = layer.scales
            normed, x = self._add_and_norm(_scale_channels(attended, attention_scale), x, layer.mlp_norm)
            return x + _scale_channels(self._feed_forward(layer, normed), mlp_scale)
        assert layer.attention_norm is not None
        x, _ = self._add_and_norm(attended, x, layer.attention_norm)
        return self._add_and_norm(self._feed_forward(layer, x), x, layer.mlp_norm)[0]

    def _feed_forward(self, layer: _EncoderLayerWeights, x: Tensor) -> Tensor:
        wide, backend = layer.up.packed_linear(x, NO_ADAPTERS), self._backend
        match self.spec.activation, self.spec.gated:
            case "silu", True:
                wide = backend.silu_mul(wide)
            case "gelu_tanh", True:
                wide = backend.gelu_mul(wide)
            case "gelu", True:
                gate, up = wide.chunk(2, dim=-1)
                wide = backend.apply_activation(gate.contiguous(), GELU).mul_(up)
            case ("gelu" | "gelu_tanh" | "relu") as kind, False:
                wide = backend.apply_activation(wide, Elementwise(kind))
            case "quick_gelu", False:
                wide = wide.mul_(sigmoid(1.702 * wide))
            case "silu", False:
                wide = silu(wide)
            case unknown, _:
                raise AssertionError(unknown)  # base_encoder_spec raises ModelError for others
        return layer.down.packed_linear(wide, NO_ADAPTERS)

    def _add_and_norm(self, x: Tensor, residual: Tensor, norm: LayerNormWeights) -> tuple[Tensor, Tensor]:
        if self.spec.has_rms_norms:
            return self._backend.add_rms_norm(x, residual, norm.weight, self.spec.eps)
        return self._backend.add_layer_norm(x, residual, norm.weight, norm.bias, self.spec.eps)

    def _apply_norm(self, x: Tensor, norm: LayerNormWeights) -> Tensor:
        if self.spec.has_rms_norms:
            return self._backend.rms_norm(x, norm.weight, self.spec.eps)
        return self._backend.layer_norm(x, norm.weight, norm.bias, self.spec.eps)

    def _embed_tokens(self, token_ids: Tensor, segments: Tensor | None, positions: Tensor) -> Tensor:
        names, tables = self.spec.names, self._embedding_tables
        x = F.embedding(token_ids, tables[names.word_embeddings])
        if names.position_embeddings is not None:
            x += F.embedding(positions + self.spec.first_position, tables[names.position_embeddings])
        if names.token_type_embeddings is not None and self.spec.segments:
            table = tables[names.token_type_embeddings]
            x += table[0] if segments is None or self.spec.segments < 2 else F.embedding(segments, table)
        return x if self._embedding_norm is None else self._apply_norm(x, self._embedding_norm)

    def _expand_relative_bias(self, tensor: Tensor) -> Tensor:
        """Convert [buckets, heads] to AttentionParams.relative_bias."""
        max_len = self.max_model_len
        distances = torch.arange(-(max_len - 1), max_len, device=tensor.device)
        return F.pad(tensor[relative_buckets(distances, self.spec.num_buckets)].T, (0, 16)).contiguous()


def _scale_channels(x: Tensor, factors: Tensor | None) -> Tensor:
    return x if factors is None else (x * factors).to(x.dtype)


def relative_buckets(distances: Tensor, num_buckets: int) -> Tensor:
    """Return buckets (Raffel et al., 2020). Half of them are for keys after the query."""
    half = num_buckets // 2
    num_exact = half // 2
    distance = distances.abs()
    scaled = torch.log(distance.float() / num_exact) / math.log(MAX_BUCKET_DISTANCE / num_exact) * (half - num_exact)
    far = (num_exact + scaled.clamp(min=0).long()).clamp(max=half - 1)
    return torch.where(distance < num_exact, distance, far) + (distances > 0) * half
