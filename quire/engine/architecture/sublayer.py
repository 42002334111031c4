"""What every sublayer's spec says."""

from __future__ import annotations

from quire.engine.architecture.kv_cache_spec import State
from quire.engine.architecture.parameter_shapes import LinearSizes, ParameterShapes, linear_sizes


class SublayerSpec:
    """The shape of a part, and the switches by which families differ. Frozen."""

    __slots__ = ()

    @property
    def kv_cache_spec(self) -> State | None:
        """What it keeps of a sequence; None: nothing."""
        return None

    def parameter_shapes(self, layer: str, hidden_size: int) -> ParameterShapes:
        """`layer`: the layer's name in the checkpoint. `hidden_size`: the width of the residual stream."""
        raise NotImplementedError(f"{type(self).__name__} does not say its parameters")

    def adaptable_linears(self, layer: str, hidden_size: int) -> LinearSizes:
        """The linears that may have LoRA adapters. `layer`, `hidden_size`: as in `parameter_shapes`."""
        return linear_sizes(self.parameter_shapes(layer, hidden_size))

    def tensor_parallel_error(self, ranks: int) -> str | None:
        """What of it cannot be divided among so many ranks; None: all can."""
        return None


def divisibility_error(size: int, description: str, ranks: int) -> str | None:
    """What SublayerSpec.tensor_parallel_error says where so many, which messages call `description`, are no equal
    parts."""
    return f"the model's {description} cannot be divided among {ranks} ranks" if size % ranks else None
