"""MLPs, gated (Shazeer, 2020) or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.engine.architecture.norm import NormSpec
from quire.engine.architecture.parameter_shapes import ParameterShapes, mlp_shapes, norm_shapes
from quire.engine.architecture.sublayer import SublayerSpec, divisibility_error


@dataclass(frozen=True, slots=True)
class MLPSpec(SublayerSpec):
    intermediate_size: int
    norm: NormSpec
    bias: bool = False
    gated: bool = True
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu"] = "silu"
    """Gated MLPs use silu or gelu_tanh, ungated ones any other than silu."""
    input_norm: bool = True
    output_norm: bool = False
    parallel: bool = False
    """The MLP reads the stream before attention's output is added."""
    shares_norm: bool = False
    multipliers: tuple[float, float] = (1.0, 1.0)
    """Factors of the gate's input and of the MLP's output."""
    name: str = "mlp"
    output_norm_name: str = "post_feedforward_layernorm"

    def parameter_shapes(self, layer: str, hidden_size: int) -> ParameterShapes:
        prefix = f"{layer}.{self.name}"
        shapes = mlp_shapes(prefix, self.intermediate_size, hidden_size, gated=self.gated, bias=self.bias)
        if self.activation == "xielu":
            shapes |= {f"{prefix}.act_fn.alpha_p": (1,), f"{prefix}.act_fn.alpha_n": (1,), f"{prefix}.act_fn.beta": ()}
        norms = {}
        if self.input_norm:
            norms[f"{layer}.{self.input_norm_name}"] = hidden_size
        if self.output_norm:
            norms[f"{layer}.{self.output_norm_name}"] = hidden_size
        return shapes | norm_shapes(norms, self.norm)

    @property
    def input_norm_name(self) -> str:
        if self.shares_norm:
            return "input_layernorm"
        # With output norms, post_attention_layernorm is attention's output norm.
        return "pre_feedforward_layernorm" if self.output_norm else "post_attention_layernorm"

    def tensor_parallel_error(self, ranks: int) -> str | None:
        return divisibility_error(self.intermediate_size, f"intermediate_size {self.intermediate_size}", ranks)
