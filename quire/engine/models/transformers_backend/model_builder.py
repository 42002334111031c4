from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quire.engine.common.errors import ModelError
from quire.engine.models.transformers_backend.interface import INTERFACE_NAME, register_interfaces


def build_model(config_fields: Mapping[str, Any], dtype: torch.dtype) -> PreTrainedModel:
    """Builds the model on the meta device. Raises ModelError."""
    register_interfaces()
    kind = str(config_fields.get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise ModelError(f"model: model_type {kind!r} is known neither to Quire nor to the transformers installed here")
    model_class = _find_model_class(config_fields)
    if model_class._is_stateful:
        raise make_stateful_model_error(model_class)
    try:
        config = CONFIG_MAPPING[kind].from_dict({**config_fields})
    except Exception as error:  # a hostile file may raise anything
        raise ModelError(f"model: config.json: transformers cannot read it: {describe_exception(error)}") from error
    if model_class.config_class is config.sub_configs.get("text_config"):
        config = config.get_text_config()
    try:
        with torch.device("meta"):
            model = model_class._from_config(
                config, attn_implementation=INTERFACE_NAME, experts_implementation=INTERFACE_NAME, dtype=dtype
            )
    except Exception as error:
        if isinstance(error, KeyError) and error.args == (INTERFACE_NAME,):
            raise _make_attention_interface_error(model_class) from None
        raise ModelError(
            f"model: transformers' {model_class.__name__} cannot be built from this file: {describe_exception(error)}"
        ) from error
    if not any(hasattr(sys.modules[type(each).__module__], "ALL_ATTENTION_FUNCTIONS") for each in model.modules()):
        raise _make_attention_interface_error(model_class)
    return model.eval().requires_grad_(False)


def _find_model_class(config_fields: Mapping[str, Any]) -> type[PreTrainedModel]:
    kind, architectures = str(config_fields["model_type"]), config_fields.get("architectures") or ()
    config = CONFIG_MAPPING[kind]
    if config in MODEL_FOR_CAUSAL_LM_MAPPING:
        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[config]
        return cast("type[PreTrainedModel]", model_class)
    for name in {*architectures} & {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}:
        if (model_class := getattr(transformers, name)).config_class is config:
            return model_class
    raise ModelError(f"model: transformers has no causal language model of a {kind!r}")


def find_body_and_name(model: PreTrainedModel) -> tuple[str, nn.Module]:
    """The body is the model without its LM head. Raises ModelError if there is none."""
    candidates = (model.get_decoder(), getattr(model, model.base_model_prefix, None), getattr(model, "model", None))
    names = {id(module): name for name, module in model.named_modules()}
    for body in candidates:
        if isinstance(body, PreTrainedModel) and body is not model:
            return names[id(body)], body
    raise ModelError(
        f"model: transformers' {type(model).__name__} does not say which part of it is the model without the head"
    )


def make_stateful_model_error(model_class: type) -> ModelError:
    state = "keeps a state other than keys and values (a recurrence or a convolution)"
    return ModelError(f"model: transformers' {model_class.__name__} {state}")


def _make_attention_interface_error(model_class: type) -> ModelError:
    return ModelError(
        f"model: transformers' {model_class.__name__} does not attend through transformers' attention interface"
    )


def describe_exception(error: Exception) -> str:
    """Joins all lines, because the first one often lacks the reason."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
