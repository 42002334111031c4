from __future__ import annotations

from dataclasses import dataclass

from quire.engine.architecture.kv_cache_spec import KVCacheSpec
from quire.engine.architecture.parameter_shapes import LinearSizes, ParameterShapes, count_parameters, linear_sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    dense_parameters: int
    """Excludes lookup tables and routed experts. A parameter that several layers read counts several times."""
    head_parameters: int = 0
    """Parameters that only sampled tokens are multiplied with."""
    num_experts: int = 0
    experts_per_token: int = 0
    expert_parameters: int = 0
    attention_width: int = 0

    def __add__(self, other: StepCosts) -> StepCosts:
        return StepCosts(
            dense_parameters=self.dense_parameters + other.dense_parameters,
            head_parameters=self.head_parameters + other.head_parameters,
            num_experts=max(self.num_experts, other.num_experts),
            experts_per_token=max(self.experts_per_token, other.experts_per_token),
            expert_parameters=self.expert_parameters + other.expert_parameters,
            attention_width=self.attention_width + other.attention_width,
        )

    def expert_parameters_read(self, tokens: int) -> float:
        """Assumes that all experts are chosen equally often."""
        share = 1 - (1 - self.experts_per_token / self.num_experts) ** tokens if self.num_experts else 0.0
        return self.expert_parameters * share

    def parameters_read(self, tokens: int) -> int:
        return round(self.dense_parameters + self.expert_parameters_read(tokens))

    @property
    def active_parameters(self) -> int:
        return self.parameters_read(1)

    def flops_per_token(self, context: int) -> int:
        """`context` is the number of preceding tokens."""
        return 2 * self.active_parameters + 4 * self.attention_width * context

    def prefill_flops(self, tokens: int) -> int:
        body = self.active_parameters - self.head_parameters
        return tokens * 2 * body + 2 * self.head_parameters + 2 * self.attention_width * tokens**2


class SublayerSpec:
    __slots__ = ()

    @property
    def kv_cache_spec(self) -> KVCacheSpec | None:
        """What the sublayer stores per sequence; None if nothing."""
        return None

    def parameter_shapes(self, layer: str, hidden_size: int) -> ParameterShapes:
        """`layer` is the layer's name in the checkpoint."""
        raise NotImplementedError(f"{type(self).__name__} does not say its parameters")

    @property
    def attention_width(self) -> int:
        """Query heads times head size; 0 without attention."""
        return 0

    def step_costs(self, layer: str, hidden_size: int) -> StepCosts:
        dense = count_parameters(self.parameter_shapes(layer, hidden_size))
        return StepCosts(dense_parameters=dense, attention_width=self.attention_width)

    def adaptable_linears(self, layer: str, hidden_size: int) -> LinearSizes:
        return linear_sizes(self.parameter_shapes(layer, hidden_size))

    def tensor_parallel_error(self, ranks: int) -> str | None:
        return None

    @property
    def gpu_error(self) -> str | None:
        return None


def divisibility_error(size: int, description: str, ranks: int) -> str | None:
    return f"the model's {description} cannot be divided among {ranks} ranks" if size % ranks else None
