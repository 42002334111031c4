"""Sublayers with a state of constant size."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple

from quire.engine.architecture.kv_cache_spec import RecurrentStateSpec, ShortConvStateSpec
from quire.engine.architecture.norm import NormSpec
from quire.engine.architecture.parameter_shapes import ParameterShapes, linear_shapes, norm_shapes
from quire.engine.architecture.sublayer import SublayerSpec, divisibility_error

CONV_WEIGHT, CONV_BIAS = "conv1d.weight", "conv1d.bias"


@dataclass(frozen=True, slots=True)
class MatrixStateSpec(SublayerSpec):
    """The state is a [key, value] matrix per head, and a convolution's last columns."""

    num_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    norm: NormSpec

    @property
    @abstractmethod
    def conv_input_shapes(self) -> tuple[tuple[int, int], ...]:
        """(heads, channels per head) of each convolution input. Ranks divide the heads."""

    @abstractmethod
    def extra_values_per_draft(self, heads: int) -> int:
        """Elements stored for a draft token in addition to its column."""

    @property
    def num_channels(self) -> int:
        return sum(heads * size for heads, size in self.conv_input_shapes)

    @property
    def kv_cache_spec(self) -> RecurrentStateSpec:
        num_extra_values = self.extra_values_per_draft(self.num_heads)
        return RecurrentStateSpec(
            self.num_channels, self.conv_width - 1, self.num_heads, self.key_dim, self.value_dim, num_extra_values
        )

    def _conv_shapes(self, prefix: str, *, bias: bool) -> ParameterShapes:
        shapes: ParameterShapes = {f"{prefix}.{CONV_WEIGHT}": (self.num_channels, 1, self.conv_width)}
        return shapes | ({f"{prefix}.{CONV_BIAS}": (self.num_channels,)} if bias else {})


@dataclass(frozen=True, slots=True)
class DeltaNetSpec(MatrixStateSpec):
    """`num_heads` counts value heads. The output norm has no weight offset."""

    num_key_heads: int
    """Each key head serves equally many value heads."""

    @property
    def conv_input_shapes(self) -> tuple[tuple[int, int], ...]:
        return (self.num_key_heads, self.key_dim), (self.num_key_heads, self.key_dim), (self.num_heads, self.value_dim)

    def extra_values_per_draft(self, heads: int) -> int:
        return 2 * heads

    def parameter_shapes(self, layer: str, hidden_size: int) -> ParameterShapes:
        prefix = f"{layer}.linear_attn"
        key_size, value_size = self.num_key_heads * self.key_dim, self.num_heads * self.value_dim
        shapes = ParameterShapes()
        sizes = {
            "q": key_size,
            "k": key_size,
            "v": value_size,
            "z": value_size,
            "b": self.num_heads,
            "a": self.num_heads,
        }
        for name, size in sizes.items():
            shapes |= linear_shapes([f"{prefix}.in_proj_{name}"], size, hidden_size)
        shapes |= linear_shapes([f"{prefix}.out_proj"], hidden_size, value_size)
        shapes |= {f"{prefix}.A_log": (self.num_heads,), f"{prefix}.dt_bias": (self.num_heads,)}
        shapes |= self._conv_shapes(prefix, bias=False)
        shapes |= norm_shapes({f"{layer}.input_layernorm": hidden_size}, self.norm)
        return shapes | norm_shapes({f"{prefix}.norm": self.value_dim}, NormSpec(self.norm.eps))

    def tensor_parallel_error(self, ranks: int) -> str | None:
        return divisibility_error(self.num_key_heads, f"{self.num_key_heads} key heads of delta nets", ranks)


@dataclass(frozen=True, slots=True)
class KimiDeltaAttentionSpec(MatrixStateSpec):
    """Kimi Delta Attention (KDA): a delta net with a decay per key channel."""

    low_rank: int

    @property
    def conv_input_shapes(self) -> tuple[tuple[int, int], ...]:
        return (self.num_heads, self.key_dim), (self.num_heads, self.key_dim), (self.num_heads, self.value_dim)

    def extra_values_per_draft(self, heads: int) -> int:
        return heads * (1 + self.key_dim)

    def parameter_shapes(self, layer: str, hidden_size: int) -> ParameterShapes:
        prefix = f"{layer}.self_attn"
        keys, values = self.num_heads * self.key_dim, self.num_heads * self.value_dim
        shapes = ParameterShapes()
        for name, size in {"q": keys, "k": keys, "v": values}.items():
            shapes |= linear_shapes([f"{prefix}.{name}_proj"], size, hidden_size)
            shapes[f"{prefix}.{name}_conv1d.weight"] = (size, 1, self.conv_width)
        shapes |= linear_shapes([f"{prefix}.f_a_proj", f"{prefix}.g_a_proj"], self.low_rank, hidden_size)
        shapes |= linear_shapes([f"{prefix}.f_b_proj"], keys, self.low_rank)
        shapes |= linear_shapes([f"{prefix}.g_b_proj"], values, self.low_rank)
        shapes |= linear_shapes([f"{prefix}.b_proj"], self.num_heads, hidden_size)
        shapes |= linear_shapes([f"{prefix}.o_proj"], hidden_size, values)
        shapes |= {f"{prefix}.A_log": (1, 1, self.num_heads, 1), f"{prefix}.dt_bias": (keys,)}
        shapes |= norm_shapes({f"{layer}.input_layernorm": hidden_size}, self.norm)
        return shapes | norm_shapes({f"{prefix}.o_norm": self.value_dim}, NormSpec(self.norm.eps))

    def tensor_parallel_error(self, ranks: int) -> str | None:
        return divisibility_error(self.num_heads, f"{self.num_heads} heads of Kimi Delta Attention", ranks)


class ProjectionMultipliers(NamedTuple):
    z: float = 1.0
    x: float = 1.0
    b: float = 1.0
    c: float = 1.0
    dt: float = 1.0
    out: float = 1.0


_UNIT_MULTIPLIERS = ProjectionMultipliers()


@dataclass(frozen=True, slots=True)
class Mamba2LayerSpec(MatrixStateSpec):
    """`key_dim` is the size of b and c per group, `value_dim` of x per head."""

    num_groups: int
    result_eps: float
    bias: bool = False
    """in_proj has biases. For others see out_bias and conv_bias."""
    out_bias: bool = False
    conv_bias: bool = True
    result_norm: Literal["behind", "before"] | None = "behind"
    """Normalizes each group after ("behind") or before the gate."""
    dt_limits: tuple[float, float] = (0.0, float("inf"))
    multipliers: ProjectionMultipliers = _UNIT_MULTIPLIERS
    parallel: bool = False
    """Mamba-2 reads the same normed input as the layer's attention."""
    joins_input_only: bool = False
    """The previous sublayer's output is added to this sublayer's input only, not to the stream."""
    parent_module: str = ""
    """Checkpoint module in the layer that contains this sublayer; "" for the layer itself."""

    @property
    def conv_input_shapes(self) -> tuple[tuple[int, int], ...]:
        return (self.num_heads, self.value_dim), (self.num_groups, self.key_dim), (self.num_groups, self.key_dim)

    def extra_values_per_draft(self, heads: int) -> int:
        return heads

    def parameter_shapes(self, layer: str, hidden_size: int) -> ParameterShapes:
        if self.parent_module:
            layer = f"{layer}.{self.parent_module}"
        prefix = f"{layer}.mamba"
        values, keys = self.num_heads * self.value_dim, self.num_groups * self.key_dim
        shapes = ParameterShapes()
        for name, size in {"z": values, "x": values, "b": keys, "c": keys, "dt": self.num_heads}.items():
            shapes |= linear_shapes([f"{prefix}.in_proj_{name}"], size, hidden_size, bias=self.bias)
        shapes |= linear_shapes([f"{prefix}.out_proj"], hidden_size, values, bias=self.out_bias)
        shapes |= {f"{prefix}.{name}": (self.num_heads,) for name in ("A_log", "dt_bias", "D")}
        if self.result_norm is not None:
            shapes[f"{prefix}.norm.weight"] = (values,)
        shapes |= self._conv_shapes(prefix, bias=self.conv_bias)
        return shapes | norm_shapes({f"{layer}.input_layernorm": hidden_size}, self.norm)

    def tensor_parallel_error(self, ranks: int) -> str | None:
        return divisibility_error(self.num_groups, f"{self.num_groups} groups of a state space's heads", ranks)


@dataclass(frozen=True, slots=True)
class MambaLayerSpec(MatrixStateSpec):
    """A head is a group of `value_dim` channels. A channel's state, b and c have `key_dim` elements. The convolution's
    output and the gate pass through SiLU.
    """

    dt_rank: int
    bias: bool = False
    conv_bias: bool = True
    inner_norm: Literal["learned", "plain"] | None = None
    """Norms of b, c, and the input of dt's projection. "plain" norms have no weights."""
    inner_eps: float = 1e-6

    @property
    def conv_input_shapes(self) -> tuple[tuple[int, int], ...]:
        return ((self.num_heads, self.value_dim),)

    def extra_values_per_draft(self, heads: int) -> int:
        return heads * self.value_dim + 2 * self.key_dim

    def parameter_shapes(self, layer: str, hidden_size: int) -> ParameterShapes:
        prefix, channels = f"{layer}.mamba", self.num_channels
        shapes = linear_shapes([f"{prefix}.in_proj_x", f"{prefix}.in_proj_z"], channels, hidden_size, bias=self.bias)
        shapes |= linear_shapes([f"{prefix}.x_proj_dt"], self.dt_rank, channels)
        shapes |= linear_shapes([f"{prefix}.x_proj_b", f"{prefix}.x_proj_c"], self.key_dim, channels)
        shapes |= linear_shapes([f"{prefix}.dt_proj"], channels, self.dt_rank, bias=True)
        shapes |= linear_shapes([f"{prefix}.out_proj"], hidden_size, channels, bias=self.bias)
        shapes |= {f"{prefix}.A_log": (channels, self.key_dim), f"{prefix}.D": (channels,)}
        shapes |= self._conv_shapes(prefix, bias=self.conv_bias)
        if self.inner_norm == "learned":
            sizes = {"dt": self.dt_rank, "b": self.key_dim, "c": self.key_dim}
            shapes |= {f"{prefix}.{name}_layernorm.weight": (size,) for name, size in sizes.items()}
        return shapes | norm_shapes({f"{layer}.input_layernorm": hidden_size}, self.norm)

    def tensor_parallel_error(self, ranks: int) -> str | None:
        channels = f"{self.num_channels} channels of selective scans, {self.value_dim} of which are computed together,"
        return divisibility_error(self.num_heads, channels, ranks)


@dataclass(frozen=True, slots=True)
class ShortConvSpec(SublayerSpec):
    num_channels: int
    conv_width: int
    norm: NormSpec
    bias: bool = False
    """Both linears and the convolution have biases."""
    output_norm: bool = False

    @property
    def kv_cache_spec(self) -> ShortConvStateSpec:
        return ShortConvStateSpec(self.num_channels, self.conv_width - 1)

    def parameter_shapes(self, layer: str, hidden_size: int) -> ParameterShapes:
        prefix, channels = f"{layer}.conv", self.num_channels
        names = [f"{prefix}.{name}_proj" for name in "bcx"]
        shapes = linear_shapes(names, channels, hidden_size, bias=self.bias)
        shapes |= linear_shapes([f"{prefix}.out_proj"], hidden_size, channels, bias=self.bias)
        shapes[f"{prefix}.conv.weight"] = (channels, 1, self.conv_width)
        if self.bias:
            shapes[f"{prefix}.conv.bias"] = (channels,)
        norms = {f"{layer}.input_layernorm": hidden_size}
        if self.output_norm:
            norms[f"{layer}.post_attention_layernorm"] = hidden_size
        return shapes | norm_shapes(norms, self.norm)

    def tensor_parallel_error(self, ranks: int) -> str | None:
        return divisibility_error(self.num_channels, f"{self.num_channels} channels of convolutions", ranks)
