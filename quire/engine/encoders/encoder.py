"""One bidirectional transformer with parameters for what the families differ in: every token sees all of its prompt.

Layers of attention and a feed-forward part as in Devlin et al. (2019), with norms behind both, or before both. Keys and
values are kept for one layer's time only, in pages that all layers share, so that the kernels of decoders compute them
too. A prompt must be computed in one step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.encoders.pieces import BEFORE, ROWS, finished, pages_of, parts_of, positions_of, weight
from quire.engine.errors import ModelError
from quire.engine.layers.heads import Stage
from quire.engine.layers.linear import JoinedLinear
from quire.engine.layers.norm import LayerNormWeights
from quire.engine.layers.parameters import Parameter, ParameterTable, held, parameters_of
from quire.engine.layers.rope import rope_table
from quire.engine.layers.schemes import Scheme
from quire.kernels.activation import GELU, sigmoid, silu
from quire.kernels.activation import Activation as Elementwise
from quire.kernels.backend import NO_ADAPTERS, Backend
from quire.kernels.gpu.transfer import upload
from quire.kernels.rotation import Rope
from quire.kernels.softmax import Softmax

Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "silu"]
_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swiglu": "silu",
}
FARTHEST = 128
"""The distance from which on relative positions share one bucket (Raffel et al., 2020)."""


@dataclass(frozen=True, slots=True)
class EncoderNames:
    """What a checkpoint names its tensors. Those of a layer follow its own name."""

    words: str
    layer: str
    """With {} for the layer's number."""
    qkv: tuple[str, ...]
    out: str
    attention_norm: str
    up: tuple[str, ...]
    """One, or a gate and what it gates."""
    down: str
    mlp_norm: str
    positions: str | None = None
    segments: str | None = None
    embedding_norm: str | None = None
    final_norm: str | None = None
    relative: str | None = None
    """Of the table of relative positions: [buckets, heads]."""
    scales: tuple[str, str] | None = None
    """Of what the two parts of a layer give, a factor for each channel."""
    qk_norms: tuple[str, str] | None = None
    """Of queries and keys, each of all heads as one; they are RMSNorms."""


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """An encoder's shape, and the switches by which families differ."""

    names: EncoderNames
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    head_dim: int
    eps: float
    ropes: tuple[dict[str, Any] | None, ...]
    """Per layer: how positions are rotated in; None: not at all."""
    windows: tuple[int | None, ...]
    """Per layer: keys a query sees on either side of itself; None: all."""
    classifier: Callable[[int, int], Sequence[Stage]]
    """The linears of ForSequenceClassification, by hidden size and number of labels."""
    activation: Activation
    positions: int = 0
    """Rows of the table of positions."""
    first_position: int = 0
    """The row of a prompt's first token."""
    segments: int = 0
    buckets: int = 0
    """Of relative positions, whose table all layers share."""
    bias: bool = True
    """Of linears."""
    qkv_bias: bool = True
    """The same of those alone that make queries, keys and values."""
    up_bias: bool = True
    """Of the linear into the feed-forward part, where linears have one."""
    norm_bias: bool = True
    gated: bool = False
    """The feed-forward part is gated (Shazeer, 2020)."""
    gate_last: bool = False
    """The checkpoint's one tensor of both has the gate behind what it gates."""
    pre_norm: bool = False
    """Norms stand before the parts of a layer; the first layer lacks the one before its attention, unless"""
    first_norm: bool = False
    """it has that too."""
    root_mean_square: bool = False
    """Norms are RMSNorm (Zhang and Sennrich, 2019)."""
    groups: tuple[int, ...] = ()
    """Per layer: which of the metadata's groups it computes; (): the first."""
    causal: bool = False
    """A token sees what is before it alone."""
    filled: bool = False
    """Prompts are filled up to the longest with padding, which is seen as all else."""
    projection: tuple[Stage, ...] = ()
    """What follows the pooling."""
    unused: tuple[str, ...] = ()
    """How the names of tensors begin that are not needed."""

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def longest(self) -> int | None:
        """Tokens of the longest prompt that the table of positions has room for."""
        return self.positions - self.first_position if self.positions else None


def base_spec(config: ModelConfig, **own: Any) -> EncoderSpec:
    """With the fields that nearly every family reads alike, and the family's `own`."""
    alike: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_heads,
        "head_dim": config.head_dim,
        "eps": config.raw.get("layer_norm_eps") or 1e-12,
        "ropes": (None,) * config.num_layers,
        "windows": (None,) * config.num_layers,
        "activation": activation_of(config.raw.get("hidden_act") or "gelu"),
    }
    spec = EncoderSpec(**alike | own)
    if spec.gated and spec.activation in ("quick_gelu", "relu"):
        raise ModelError(f"model: hidden_act {spec.activation!r} is not supported in a {config.model_type!r}")
    return spec


def two_stages(first: str, activation: str, last: str) -> Callable[[int, int], list[Stage]]:
    """A classifier of two linears of these names, with an activation between them."""
    return lambda hidden, labels: [Stage(first, hidden, hidden, activation=activation), Stage(last, hidden, labels)]


def activation_of(name: str) -> Activation:
    if name not in _ACTIVATIONS:
        raise ModelError(f"model: hidden_act {name!r} is not supported")
    return _ACTIVATIONS[name]


class _Layer:
    """Weights of one layer."""

    def __init__(self, spec: EncoderSpec, scheme: Scheme, index: int, cos_sin: Tensor | None) -> None:
        names, hidden, width = spec.names, spec.hidden_size, spec.num_heads * spec.head_dim
        self.hidden = hidden
        name = names.layer.format(index)

        def linear(size: int, parts: Sequence[str], out: int, *, bias: bool = True) -> JoinedLinear:
            sizes = {f"{name}.{part}": out // len(parts) for part in parts}
            return JoinedLinear(scheme, size, sizes, bias=spec.bias and bias)

        self.qkv = linear(hidden, names.qkv, 3 * width, bias=spec.qkv_bias)
        self.out = linear(width, [names.out], hidden)
        self.up = linear(hidden, names.up, spec.intermediate_size * (2 if spec.gated else 1), bias=spec.up_bias)
        self.gate_last = spec.gate_last
        self.down = linear(spec.intermediate_size, [names.down], hidden)
        self.attention_norm: LayerNormWeights | None = None
        if not (spec.pre_norm and index == 0) or spec.first_norm:
            self.attention_norm = LayerNormWeights(f"{name}.{names.attention_norm}", hidden, bias=spec.norm_bias)
        self.mlp_norm = LayerNormWeights(f"{name}.{names.mlp_norm}", hidden, bias=spec.norm_bias)
        self.scales: list[Tensor | None] = [None, None]
        self._scale_names = () if names.scales is None else tuple(f"{name}.{each}" for each in names.scales)
        norms = names.qk_norms or ()
        self._head_norms = [LayerNormWeights(f"{name}.{norm}", width, bias=False) for norm in norms]
        self._rope = Rope(spec.head_dim, cos_sin, eps=spec.eps, norm="whole")
        window = spec.windows[index]
        self.window = None if window is None else window + 1
        self.ahead = 0 if spec.causal else window

    @property
    def rope(self) -> Rope:
        if not self._head_norms:
            return self._rope
        q_norm, k_norm = self._head_norms
        return replace(self._rope, q_norm=q_norm.weight, k_norm=k_norm.weight)

    def parameters(self) -> ParameterTable:
        norms = (self.attention_norm, self.mlp_norm, *self._head_norms)
        table = parameters_of(self.qkv, self.out, self.down, *norms)
        for place, name in enumerate(self._scale_names):
            table[name] = held(self.scales, place, (self.hidden,), torch.float32)
        up = self.up.parameters()
        return table | ({name: _halves_swapped(each) for name, each in up.items()} if self.gate_last else up)


def _halves_swapped(parameter: Parameter) -> Parameter:
    """One whose tensor's second half of rows comes first in the checkpoint."""

    def put(tensor: Tensor) -> None:
        last, first = tensor.chunk(2)
        parameter.put(torch.cat((first, last)))

    return replace(parameter, put=put)


class Encoder:
    """Weights and the forward pass. Fill it by way of `parameters()` before use."""

    def __init__(
        self,
        spec: EncoderSpec,
        backend: Backend,
        scheme: Scheme,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        progress: Callable[[], None],
    ) -> None:
        """`progress` is called after every layer."""
        self.spec = spec
        self.dtype = dtype
        self.device = device
        self.max_model_len = max_model_len
        self._backend = backend
        self._progress = progress
        ropes = {str(rope): rope for rope in spec.ropes if rope is not None}
        tables = {key: rope_table(rope, spec.head_dim, max_model_len).to(device) for key, rope in ropes.items()}
        self._layers = [_Layer(spec, scheme, i, tables.get(str(rope))) for i, rope in enumerate(spec.ropes)]
        self._tables: dict[str, Tensor] = {}
        """Embeddings of words, positions and segments, and of relative positions, by their names."""
        names = spec.names
        self._embedding_norm, self._final_norm = (
            None if name is None else LayerNormWeights(name, spec.hidden_size, bias=spec.norm_bias)
            for name in (names.embedding_norm, names.final_norm)
        )

    def parameters(self) -> ParameterTable:
        """Every tensor the model takes, by its name in the checkpoint."""
        spec, names, table = self.spec, self.spec.names, ParameterTable()
        sizes = ((names.words, spec.vocab_size), (names.positions, spec.positions), (names.segments, spec.segments))
        for name, rows in sizes:
            if name is not None and rows:
                table[f"{name}.weight"] = held(self._tables, name, (rows, spec.hidden_size), self.dtype)
        if names.relative is not None:
            shape = (spec.buckets, spec.num_heads)
            table[f"{names.relative}.weight"] = held(
                self._tables, names.relative, shape, torch.float32, self._by_distance
            )
        return table | parameters_of(self._embedding_norm, self._final_norm, *self._layers)

    def forward(self, token_ids: Tensor, segments: Tensor | None, lengths: np.ndarray) -> Tensor:
        """Hidden states [T, hidden] of whole prompts of these lengths [S] int64. segments [T] int64: which of two texts
        a token is of; None: all are of the first."""
        (positions,) = upload([positions_of(lengths)], self.device)
        return finished(self.pieces(self._embedded(token_ids, segments, positions), [lengths], cut=False))[0]

    def pieces(
        self,
        x: Tensor,
        lengths: Sequence[np.ndarray],
        turns: Tensor | None = None,
        taps: Sequence[int] = (),
        *,
        cut: bool = True,
    ) -> Generator[float, None, tuple[Tensor, list[Tensor]]]:
        """The same of images' patches, in pieces (engine/encoders/pieces.py); and what the layers `taps` give,
        ascending. lengths: for each group of layers, of the sequences whose tokens see each other. turns [T, head_dim]
        float32: of each patch, as Rope.cos_sin has it for a position. All pieces together weigh what `weight` says of
        the patches. cut: a piece may be some of the tokens, all of which see each other then, wherever they stand."""
        backend, spec, tapped = self._backend, self.spec, list[Tensor]()
        bias, size = self._tables.get(spec.names.relative or ""), self._backend.block_size
        pages = max(pages_of(each, size) for each in lengths)
        shape = backend.kv_cache_shape(pages, spec.num_heads, spec.head_dim, self.dtype)
        keys, values = (torch.empty(shape, dtype=self.dtype, device=self.device) for _ in range(2))
        most, turned = ROWS if cut else None, turns is not None
        groups = [(parts_of(each, size, self.device, most, turned=turned), int(each.max())) for each in lengths]
        for index, layer in enumerate(self._layers):
            parts, seen = groups[spec.groups[index] if spec.groups else 0]
            rope = layer.rope if turns is None else replace(layer.rope, cos_sin=turns)
            softmax = Softmax(spec.head_dim**-0.5, layer.window, ahead=layer.ahead, bias=bias)
            queries, found = list[Tensor](), list[Tensor]()
            for rows, where in parts:
                queries.append(backend.rope_store(self._projected(layer, x[rows]), rope, keys, values, where))
                yield BEFORE * len(queries[-1]) / spec.num_layers
            for (rows, where), q in zip(parts, queries, strict=True):
                attended = backend.paged_attention(q, keys, values, where, softmax).flatten(1)
                found.append(self._mlp(layer, layer.out.packed(attended, NO_ADAPTERS), x[rows]))
                yield (weight(len(q), seen, spec.hidden_size) - BEFORE * len(q)) / spec.num_layers
            x = found[0] if len(found) == 1 else torch.cat(found)
            if index in taps:
                tapped.append(x.clone())  # a backend may overwrite it
            self._progress()
        return x if self._final_norm is None else self._normed(x, self._final_norm), tapped

    def _projected(self, layer: _Layer, x: Tensor) -> Tensor:
        """Queries, keys and values."""
        normed = x if layer.attention_norm is None or not self.spec.pre_norm else self._normed(x, layer.attention_norm)
        return layer.qkv.packed(normed, NO_ADAPTERS)

    def _mlp(self, layer: _Layer, attended: Tensor, x: Tensor) -> Tensor:
        """The layer's output, for what its attention gives and the stream x that this is added to."""
        if self.spec.pre_norm:
            first, second = layer.scales
            normed, x = self._added(_scaled(attended, first), x, layer.mlp_norm)
            return x + _scaled(self._fed_forward(layer, normed), second)
        assert layer.attention_norm is not None
        x, _ = self._added(attended, x, layer.attention_norm)
        return self._added(self._fed_forward(layer, x), x, layer.mlp_norm)[0]

    def _fed_forward(self, layer: _Layer, x: Tensor) -> Tensor:
        wide, backend = layer.up.packed(x, NO_ADAPTERS), self._backend
        match self.spec.activation, self.spec.gated:
            case "silu", True:
                wide = backend.silu_mul(wide)
            case "gelu_tanh", True:
                wide = backend.gelu_mul(wide)
            case "gelu", True:
                gate, up = wide.chunk(2, dim=-1)
                wide = backend.activate(gate.contiguous(), GELU).mul_(up)
            case ("gelu" | "gelu_tanh" | "relu") as kind, False:
                wide = backend.activate(wide, Elementwise(kind))
            case "quick_gelu", False:
                wide = wide.mul_(sigmoid(1.702 * wide))
            case "silu", False:
                wide = silu(wide)
            case unknown, _:
                raise AssertionError(unknown)  # base_spec refuses it
        return layer.down.packed(wide, NO_ADAPTERS)

    def _added(self, x: Tensor, residual: Tensor, norm: LayerNormWeights) -> tuple[Tensor, Tensor]:
        if self.spec.root_mean_square:
            return self._backend.add_rms_norm(x, residual, norm.weight, self.spec.eps)
        return self._backend.add_layer_norm(x, residual, norm.weight, norm.bias, self.spec.eps)

    def _normed(self, x: Tensor, norm: LayerNormWeights) -> Tensor:
        if self.spec.root_mean_square:
            return self._backend.rms_norm(x, norm.weight, self.spec.eps)
        return self._backend.layer_norm(x, norm.weight, norm.bias, self.spec.eps)

    def _embedded(self, token_ids: Tensor, segments: Tensor | None, positions: Tensor) -> Tensor:
        names, tables = self.spec.names, self._tables
        x = F.embedding(token_ids, tables[names.words])
        if names.positions is not None:
            x += F.embedding(positions + self.spec.first_position, tables[names.positions])
        if names.segments is not None and self.spec.segments:
            table = tables[names.segments]
            x += table[0] if segments is None or self.spec.segments < 2 else F.embedding(segments, table)
        return x if self._embedding_norm is None else self._normed(x, self._embedding_norm)

    def _by_distance(self, tensor: Tensor) -> Tensor:
        """[buckets, heads] to what is added to scores by distance: see Softmax.bias."""
        longest = self.max_model_len
        distances = torch.arange(-(longest - 1), longest, device=tensor.device)
        return F.pad(tensor[relative_buckets(distances, self.spec.buckets)].T, (0, 16)).contiguous()


def _scaled(x: Tensor, factors: Tensor | None) -> Tensor:
    return x if factors is None else (x * factors).to(x.dtype)


def relative_buckets(distances: Tensor, buckets: int) -> Tensor:
    """The bucket of each distance, key less query: half of them for keys behind the query, the nearest exact, farther
    ones on a logarithmic scale up to FARTHEST (Raffel et al., 2020)."""
    half = buckets // 2
    exact = half // 2
    apart = distances.abs()
    scaled = torch.log(apart.float() / exact) / math.log(FARTHEST / exact) * (half - exact)
    far = (exact + scaled.clamp(min=0).long()).clamp(max=half - 1)
    return torch.where(apart < exact, apart, far) + (distances > 0) * half
