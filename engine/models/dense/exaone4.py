"""EXAONE 4 (LG AI Research, 2025): norms behind attention and the MLP, of every query and key head, and, in models with
sliding windows, no positions in the layers without one."""

from quire.engine.checkpoint.families import layer_windows
from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.attention import AttentionSpec
from quire.engine.layers.mlp import MlpSpec
from quire.engine.models.spec import DecoderSpec, base_spec


def spec(config: ModelConfig) -> DecoderSpec:
    windows = layer_windows(config.raw, config.num_layers)
    slides = config.raw.get("sliding_window", 4096) is not None
    ropes = [None if slides and window is None else config.rope for window in windows]
    behind = {"input_norm": False, "output_norm": True}
    base = base_spec(config).having(AttentionSpec, qk_norm="heads", window=windows, rope=ropes, **behind)
    return base.having(MlpSpec, **behind)
