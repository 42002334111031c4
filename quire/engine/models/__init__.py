"""The model families: rows of tables, and thin files where a row cannot say it. engine/checkpoint/families.py lists
them by config.json's model_type."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from quire.engine.checkpoint.alike.told import told_as_in_file
from quire.engine.checkpoint.families import FAMILIES
from quire.engine.checkpoint.files import ModelConfig
from quire.engine.errors import ModelError
from quire.engine.layers.mlp import MlpSpec
from quire.engine.layers.moe import ExpertsSpec
from quire.engine.layers.stream.shared_block import SharedBlockSpec
from quire.engine.models.activations import activation_of

if TYPE_CHECKING:
    from quire.engine.models.spec import DecoderSpec


def decoder_spec(config: ModelConfig) -> DecoderSpec:
    """The spec of a model, by its family, or by transformers' class. Raises ModelError where neither serves it."""
    if config.given is not None:
        adapted: DecoderSpec = import_module("quire.engine.models.adapted.spec").adapted_spec(config)
        return adapted
    with told_as_in_file(config.names):
        return _by_family(config)


def _by_family(config: ModelConfig) -> DecoderSpec:
    if config.model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ModelError(f"model: model_type {config.model_type!r} is not supported; supported: {known}")
    spec = _spec_as(config.model_type, config)
    experts = {"silu" if each.gated else "relu2" for each in spec.parts(ExpertsSpec)}
    gates = {each.activation.kind for each in spec.parts(SharedBlockSpec)}
    activations = {each.activation for each in spec.parts(MlpSpec)} or experts or gates or {"silu"}
    named = activation_of(config)
    # Old Gemma files say gelu but mean its tanh form.
    if named not in {*activations, None} and (named, activations) != ("gelu", {"gelu_tanh"}):
        raise ModelError(f"model: hidden_act {named!r} is not supported in a {config.model_type!r}")
    return spec


def _spec_as(kind: str, config: ModelConfig) -> DecoderSpec:
    """As a family's row, or its file's function `spec`, makes it."""
    module = import_module(f"quire.engine.models.{FAMILIES[kind]}")
    made: DecoderSpec = module.TABLE[kind](config, _spec_as) if hasattr(module, "TABLE") else module.spec(config)
    return made
