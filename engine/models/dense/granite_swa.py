"""Granite with sliding windows (IBM, 2026): each layer may have a rotation of its own, or none, and every
head has a sink."""

from quire.engine.checkpoint.families import layer_windows
from quire.engine.checkpoint.files import ModelConfig
from quire.engine.errors import ModelError
from quire.engine.layers.attention import AttentionSpec
from quire.engine.models.dense import granite
from quire.engine.models.spec import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    raw, layers = config.raw, config.num_layers
    thetas = raw.get("layer_rope_theta") or [config.rope["rope_theta"]] * layers
    if not raw.get("layer_types"):
        raise ModelError("model: config.json of a 'granite_swa' lacks layer_types, needed to know its windows")
    if len(thetas) != layers or any(0 < theta < 1 for theta in thetas):
        raise ModelError(
            f"model: config.json: layer_rope_theta: {len(thetas)} entries, 0 or from 1 on, for {layers} layers"
        )
    ropes = [config.rope | {"rope_theta": theta} if theta else None for theta in thetas]
    return granite.spec(config).having(AttentionSpec, window=layer_windows(raw, layers), rope=ropes, sinks=True)
