"""The model families: rows of tables, and thin files where a row cannot say it. engine/checkpoint/families.py lists
them by config.json's model_type. No torch."""

from __future__ import annotations

from importlib import import_module

from quire.engine.architecture.decoder import DecoderSpec
from quire.engine.architecture.mlp import MLPSpec
from quire.engine.architecture.moe import MoELayerSpec
from quire.engine.architecture.shared_transformer import SharedTransformerSpec
from quire.engine.checkpoint.alike.told import told_as_in_file
from quire.engine.checkpoint.families import FAMILIES
from quire.engine.checkpoint.files import ModelConfig
from quire.engine.errors import ModelError
from quire.engine.families.activations import hidden_activation


def family_decoder_spec(config: ModelConfig) -> DecoderSpec:
    """The spec of a model that a family of ours describes. Raises ModelError."""
    with told_as_in_file(config.names):
        return _checked_decoder_spec(config)


def _checked_decoder_spec(config: ModelConfig) -> DecoderSpec:
    if config.model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ModelError(f"model: model_type {config.model_type!r} is not supported; supported: {known}")
    spec = _build_family_spec(config.model_type, config)
    experts = {"silu" if each.gated else "relu2" for each in spec.sublayers_of_kind(MoELayerSpec)}
    shared_activations = {each.activation.kind for each in spec.sublayers_of_kind(SharedTransformerSpec)}
    activations = (
        {each.activation for each in spec.sublayers_of_kind(MLPSpec)} or experts or shared_activations or {"silu"}
    )
    activation = hidden_activation(config)
    # Old Gemma files say gelu but mean its tanh form.
    if activation not in {*activations, None} and (activation, activations) != ("gelu", {"gelu_tanh"}):
        raise ModelError(f"model: hidden_act {activation!r} is not supported in a {config.model_type!r}")
    return spec


def _build_family_spec(model_type: str, config: ModelConfig) -> DecoderSpec:
    """As a family's row, or its file's function `spec`, makes it."""
    module = import_module(f"quire.engine.families.{FAMILIES[model_type]}")
    spec: DecoderSpec = (
        module.TABLE[model_type](config, _build_family_spec) if hasattr(module, "TABLE") else module.spec(config)
    )
    return spec
