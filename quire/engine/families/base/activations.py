from quire.engine.common.errors import ModelError
from quire.engine.families.base.model_config import ModelConfig

_ACTIVATION_KINDS = {
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
    "xielu": "xielu",
}


def hidden_activation(config: ModelConfig) -> str | None:
    """Raises ModelError."""
    name = config.raw.get("hidden_activation") or config.raw.get("hidden_act")
    if name is not None and name not in _ACTIVATION_KINDS:
        raise ModelError(f"model: hidden_act {name!r} is not supported")
    return None if name is None else _ACTIVATION_KINDS[name]
