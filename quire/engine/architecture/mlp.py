"""The feed-forward part of a layer: a gated MLP (Shazeer, 2020), or one without a gate, with the norms around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.engine.architecture.norm import NormSpec
from quire.engine.architecture.sublayer import SublayerSpec, divisibility_error


@dataclass(frozen=True, slots=True)
class MLPSpec(SublayerSpec):
    intermediate_size: int
    norm: NormSpec
    bias: bool = False
    gated: bool = True
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu"] = "silu"
    """Gates are silu or gelu_tanh; without one it is any but silu."""
    input_norm: bool = True
    """Norm of what is read."""
    output_norm: bool = False
    """Norm of what the MLP gives, before it joins the residual stream."""
    parallel: bool = False
    """It reads the residual stream as attention has read it, before what attention gives is added."""
    shares_norm: bool = False
    """The norm of what is read is attention's."""
    multipliers: tuple[float, float] = (1.0, 1.0)
    """Of what the gate's function takes, and of what the MLP gives."""
    name: str = "mlp"
    """In a checkpoint, behind the layer's; and what is called so there too,"""
    output_norm_name: str = "post_feedforward_layernorm"
    """the norm of what it gives."""

    def tensor_parallel_error(self, ranks: int) -> str | None:
        return divisibility_error(self.intermediate_size, f"intermediate_size {self.intermediate_size}", ranks)
