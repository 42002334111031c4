"""Mixture of experts (Shazeer et al., 2017)."""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine.architecture.norm import NormSpec
from quire.engine.architecture.parameter_shapes import (
    LinearSizes,
    ParameterShapes,
    count_parameters,
    linear_shapes,
    linear_sizes,
    mlp_shapes,
    norm_shapes,
)
from quire.engine.architecture.sublayer import StepCosts, SublayerSpec, divisibility_error
from quire.kernels.parameters.activation import ClampedSwiGLU
from quire.kernels.parameters.routing import Routing


@dataclass(frozen=True, slots=True)
class SharedExpertSpec:
    intermediate_size: int
    name: str
    gate_name: str | None = None
    """Linear with one output, whose sigmoid scales the expert's output."""
    bias: bool = False


@dataclass(frozen=True, slots=True)
class LatentMoESpec:
    """Experts in a smaller latent space, between two linears (Nemotron 3 Super, NVIDIA, 2026)."""

    latent_size: int
    projection_names: tuple[str, str]
    bias: bool = False


@dataclass(frozen=True, slots=True)
class MoELayerSpec(SublayerSpec):
    num_experts: int
    routing: Routing
    intermediate_size: int
    norm: NormSpec
    shared_expert: SharedExpertSpec | None = None
    latent: LatentMoESpec | None = None
    """If None, experts use the hidden size."""
    input_norm: bool = True
    output_norm: bool = False
    router_bias: bool = False
    float_router: bool = False
    """Router weights are always float32."""
    correction: str | None = None
    """Name of a bias that affects only the choice of experts."""
    correction_row: bool = False
    """`correction` is stored as [1, experts]."""
    bias: bool = False
    clamp: ClampedSwiGLU | None = None
    gated: bool = True
    """If False, all experts use squared ReLU."""
    shares_norm: bool = False
    parallel: bool = False
    """Experts read the previous sublayer's input, and both sublayers' outputs are added."""
    norm_names: tuple[str, str] = ("post_attention_layernorm", "post_feedforward_layernorm")
    gelu: bool = False
    """If True, gates use GELU with tanh, otherwise SiLU."""
    router_scale: str | None = None
    """Name of a tensor that scales the router's input after a norm without weights and multiplication by
    hidden_size^-0.5.
    """
    expert_scales: str | None = None
    is_expert_parallel: bool = False
    """If False, ranks divide each expert's linears."""
    name: str = "mlp"
    """Module with router and linears; "" for the layer itself."""
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    def parameter_shapes(self, layer: str, hidden_size: int) -> ParameterShapes:
        shapes = self._shapes_without_experts(layer, hidden_size)
        for index in range(self.num_experts):
            shapes |= self._expert_shapes(layer, index, hidden_size)
        return shapes

    def _shapes_without_experts(self, layer: str, hidden_size: int) -> ParameterShapes:
        prefix = self.prefix(layer)
        shapes = linear_shapes([f"{prefix}.{self.router}"], self.num_experts, hidden_size, bias=self.router_bias)
        norms = {}
        if self.input_norm:
            norms[f"{layer}.{self.input_norm_name}"] = hidden_size
        if self.output_norm:
            norms[f"{layer}.{self.output_norm_name}"] = hidden_size
        shapes |= norm_shapes(norms, self.norm)
        if self.correction is not None:
            shapes[f"{prefix}.{self.correction}"] = (1,) * self.correction_row + (self.num_experts,)
        if self.expert_scales is not None:
            shapes[f"{prefix}.{self.expert_scales}"] = (self.num_experts,)
        if self.router_scale is not None:
            shapes[f"{prefix}.{self.router_scale}"] = (hidden_size,)
        if self.shared_expert is not None and self.shared_expert.gate_name is not None:
            shapes |= linear_shapes([f"{layer}.{self.shared_expert.gate_name}"], 1, hidden_size)
        return shapes | self._dense_shapes(layer, hidden_size)

    def step_costs(self, layer: str, hidden_size: int) -> StepCosts:
        return StepCosts(
            dense_parameters=count_parameters(self._shapes_without_experts(layer, hidden_size)),
            num_experts=self.num_experts,
            experts_per_token=self.routing.top_k,
            expert_parameters=self.num_experts * count_parameters(self._expert_shapes(layer, 0, hidden_size)),
        )

    def adaptable_linears(self, layer: str, hidden_size: int) -> LinearSizes:
        """Excludes the router and the shared expert's gate."""
        return linear_sizes(self._dense_shapes(layer, hidden_size))

    def _dense_shapes(self, layer: str, hidden_size: int) -> ParameterShapes:
        shapes = ParameterShapes()
        if (shared := self.shared_expert) is not None:
            prefix, size = f"{layer}.{shared.name}", shared.intermediate_size
            shapes |= mlp_shapes(prefix, size, hidden_size, gated=self.gated, bias=shared.bias)
        if (latent := self.latent) is not None:
            into, out_of = (f"{layer}.{name}" for name in latent.projection_names)
            shapes |= linear_shapes([into], latent.latent_size, hidden_size, bias=latent.bias)
            shapes |= linear_shapes([out_of], hidden_size, latent.latent_size, bias=latent.bias)
        return shapes

    def _expert_shapes(self, layer: str, index: int, hidden_size: int) -> ParameterShapes:
        width = hidden_size if self.latent is None else self.latent.latent_size
        expert = f"{self.prefix(layer)}.experts.{index}"
        names = [f"{expert}.{name}" for name in ((self.gate, self.up) if self.gated else (self.up,))]
        shapes = linear_shapes(names, self.intermediate_size, width, bias=self.bias)
        return shapes | linear_shapes([f"{expert}.{self.down}"], width, self.intermediate_size, bias=self.bias)

    @property
    def input_norm_name(self) -> str:
        return "input_layernorm" if self.shares_norm else self.norm_names[0]

    @property
    def output_norm_name(self) -> str:
        return self.norm_names[1]

    def prefix(self, layer: str) -> str:
        return f"{layer}.{self.name}" if self.name else layer

    def tensor_parallel_error(self, ranks: int) -> str | None:
        if self.is_expert_parallel and ranks > self.num_experts:
            return f"{ranks} ranks cannot have some of a layer's {self.num_experts} experts each"
        widths = {} if self.is_expert_parallel else {"experts' width": self.intermediate_size}
        if self.shared_expert is not None:
            widths["shared experts' width"] = self.shared_expert.intermediate_size
        return next(
            filter(None, (divisibility_error(size, f"{name} {size}", ranks) for name, size in widths.items())), None
        )
