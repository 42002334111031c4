"""A mixture of experts in an MLP's place (Shazeer et al., 2017): a router chooses some MLPs for each token."""

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
    """An MLP beside the experts, which every token has; it has a gate where they have."""

    intermediate_size: int
    name: str
    """In a checkpoint, behind the layer's."""
    gate_name: str | None = None
    """A linear of one output, behind the layer's name: what the MLP gives is multiplied with its sigmoid."""
    bias: bool = False


@dataclass(frozen=True, slots=True)
class LatentMoESpec:
    """Experts that read and give smaller vectors than the layer has: a linear makes those of what the layer reads, and
    another one makes the layer's of what the experts give together (Nemotron 3 Super, NVIDIA, 2026)."""

    latent_size: int
    projection_names: tuple[str, str]
    """Of the two linears in a checkpoint, behind the layer's."""
    bias: bool = False


@dataclass(frozen=True, slots=True)
class MoELayerSpec(SublayerSpec):
    """The shape of one layer's experts, and the switches by which families differ."""

    num_experts: int
    routing: Routing
    intermediate_size: int
    """Of one expert."""
    norm: NormSpec
    shared_expert: SharedExpertSpec | None = None
    latent: LatentMoESpec | None = None
    """None: experts read what the router does, as wide as the layer."""
    input_norm: bool = True
    """Norm of what is read."""
    output_norm: bool = False
    """Norm of what the experts give together, before it joins the residual stream."""
    router_bias: bool = False
    float_router: bool = False
    """The router's weights are float32, whatever the model's type."""
    correction: str | None = None
    """The name, below the experts', of what is added to weights for the choice alone; None: nothing is."""
    correction_row: bool = False
    """It is stored as [1, experts]."""
    bias: bool = False
    """Of the experts' linears."""
    clamp: ClampedSwiGLU | None = None
    gated: bool = True
    """Without gates their function, and that of shared ones, is the square of ReLU."""
    shares_norm: bool = False
    """The norm of what is read is attention's."""
    parallel: bool = False
    """They read the residual stream as the part before has read it, and what they give is added to what that gives."""
    norm_names: tuple[str, str] = ("post_attention_layernorm", "post_feedforward_layernorm")
    """What the norms of what is read and of what is given are called, behind the layer's name."""
    gelu: bool = False
    """Gates are GELU in its tanh approximation, not SiLU."""
    router_scale: str | None = None
    """The name, below the experts', of what the router's input is multiplied with, and with hidden^-0.5, behind a norm
    of its own without weights; None: the router reads what the experts do."""
    expert_scales: str | None = None
    """The name, below the experts', of factors of their weights; None: there are none."""
    is_expert_parallel: bool = False
    """Each is whole on one of the ranks that divide a layer, instead of divided among all of them."""
    name: str = "mlp"
    """In a checkpoint, behind the layer's ("": that itself); and below it the names of the router and, below each
    expert's, those of its linears."""
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    def parameter_shapes(self, layer: str, hidden_size: int) -> ParameterShapes:
        prefix = self.prefix(layer)
        shapes = linear_shapes([f"{prefix}.{self.router}"], self.num_experts, hidden_size, bias=self.router_bias)
        shapes |= self.expert_shapes(layer, hidden_size)
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
        experts = count_parameters(self.expert_shapes(layer, hidden_size))
        return StepCosts(
            dense_parameters=count_parameters(self.parameter_shapes(layer, hidden_size)) - experts,
            num_experts=self.num_experts,
            experts_per_token=self.routing.top_k,
            expert_parameters=experts,
        )

    def adaptable_linears(self, layer: str, hidden_size: int) -> LinearSizes:
        """Those that every token has, without the shared experts' gate."""
        return linear_sizes(self._dense_shapes(layer, hidden_size))

    def _dense_shapes(self, layer: str, hidden_size: int) -> ParameterShapes:
        """What every token has: shared experts, and the projections around experts of smaller vectors."""
        shapes = ParameterShapes()
        if (shared := self.shared_expert) is not None:
            prefix, size = f"{layer}.{shared.name}", shared.intermediate_size
            shapes |= mlp_shapes(prefix, size, hidden_size, gated=self.gated, bias=shared.bias)
        if (latent := self.latent) is not None:
            into, out_of = (f"{layer}.{name}" for name in latent.projection_names)
            shapes |= linear_shapes([into], latent.latent_size, hidden_size, bias=latent.bias)
            shapes |= linear_shapes([out_of], hidden_size, latent.latent_size, bias=latent.bias)
        return shapes

    def expert_shapes(self, layer: str, hidden_size: int) -> ParameterShapes:
        """The parameters of the routed experts alone."""
        width = hidden_size if self.latent is None else self.latent.latent_size
        up_names = (self.gate, self.up) if self.gated else (self.up,)
        shapes = ParameterShapes()
        for index in range(self.num_experts):
            expert = f"{self.prefix(layer)}.experts.{index}"
            names = [f"{expert}.{name}" for name in up_names]
            shapes |= linear_shapes(names, self.intermediate_size, width, bias=self.bias)
            shapes |= linear_shapes([f"{expert}.{self.down}"], width, self.intermediate_size, bias=self.bias)
        return shapes

    @property
    def input_norm_name(self) -> str:
        """In a checkpoint, behind the layer's."""
        return "input_layernorm" if self.shares_norm else self.norm_names[0]

    @property
    def output_norm_name(self) -> str:
        return self.norm_names[1]

    def prefix(self, layer: str) -> str:
        """What the names of the router and of the experts begin with."""
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
