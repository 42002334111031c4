from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from quire.engine.architecture.decoder import DecoderSpec
from quire.engine.common.errors import ModelError
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.layers.shard import ModelShard
from quire.engine.models.transformers_backend.model_builder import build_model
from quire.engine.models.transformers_backend.probe import (
    NO_NORM,
    TransformersAttentionSpec,
    called_modules_recorder,
    check_lm_head,
    probe_attention,
)
from quire.engine.models.transformers_backend.tensor_parallel import probe_sharded_attention

ROUTERS = (".gate", ".router", ".shared_expert_gate")


@dataclass(frozen=True, slots=True)
class TransformersSpec(DecoderSpec):
    config_fields: Mapping[str, Any] = field(default_factory=dict, compare=False)
    transformers_class: str = ""
    rope_context: int | None = None
    max_len: int = 0
    """Context length in tokens."""
    called_modules: frozenset[str] = frozenset()
    """Linears of other modules are not replaced, because the class may use a module's weights without calling the
    module.
    """

    @property
    def attention_specs(self) -> list[TransformersAttentionSpec]:
        return self.sublayers_of_kind(TransformersAttentionSpec)

    def rank_attention_specs(self, shard: ModelShard) -> list[TransformersAttentionSpec]:
        """Raises ModelError if attention cannot be sharded."""
        if shard.world_size == 1:
            return self.attention_specs
        return probe_sharded_attention(self.config_fields, self.max_len, shard)

    def context_parallel_error(self) -> str | None:
        return "a model run by transformers' class keeps keys and values in its own type; see --model-impl"

    def tensor_parallel_error(self, ranks: int) -> str | None:
        try:
            self.rank_attention_specs(ModelShard(0, ranks))
        except ModelError as error:
            return str(error)
        return None


def transformers_spec(config: ModelConfig) -> TransformersSpec:
    """Raises ModelError if the class cannot be served."""
    assert config.transformers_config is not None
    model = build_model(config.transformers_config, torch.float32)
    with called_modules_recorder(model) as names:
        calls = probe_attention(model, longest := config.max_model_len or config.max_position)
        check_lm_head(model, config.vocab_size, config.hidden_size)
    return TransformersSpec(
        config.vocab_size,
        config.hidden_size,
        tuple((each,) for each in calls),
        NO_NORM,
        tie_embeddings=config.tie_embeddings,
        config_fields=config.transformers_config,
        transformers_class=type(model).__name__,
        rope_context=config.rope_context,
        max_len=longest,
        called_modules=frozenset(names),
        lora_target_sizes=_lora_target_sizes(model, names),
    )


def _lora_target_sizes(model: PreTrainedModel, called: Mapping[str, bool]) -> dict[str, tuple[int, int]]:
    """Returns (in, out) of the linears that multiply each token once, except routers."""
    sizes = {}
    for name, module in model.named_modules():
        if called.get(name) and not name.endswith(ROUTERS):
            if type(module) is nn.Linear:
                sizes[name] = module.in_features, module.out_features
            elif type(module) is Conv1D:
                sizes[name] = module.weight.shape[0], module.weight.shape[1]
    return sizes
