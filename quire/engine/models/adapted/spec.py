"""A DecoderSpec of a model that transformers' class computes: what its layers keep, as the class itself says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.errors import ModelError
from quire.engine.layers.shard import Shard
from quire.engine.models.adapted.build import build
from quire.engine.models.adapted.probe import NO_NORM, AdaptedAttention, called, check_head, probe
from quire.engine.models.adapted.ranks import divided_attention
from quire.engine.models.spec import DecoderSpec

ROUTERS = (".gate", ".router", ".shared_expert_gate")
"""What the names of linears end with that choose experts."""


@dataclass(frozen=True, slots=True)
class AdaptedSpec(DecoderSpec):
    given: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """config.json, of which much means nothing here."""
    made_by: str = ""
    """The class's name."""
    rope_context: int | None = None
    """As the model's config has it."""
    longest: int = 0
    """Tokens of contexts."""
    called: frozenset[str] = frozenset()
    """The names of modules that it calls; of others it may use the weights in other ways."""

    @property
    def attention(self) -> list[AdaptedAttention]:
        """By call."""
        return self.parts(AdaptedAttention)

    def of_rank(self, shard: Shard) -> list[AdaptedAttention]:
        """The same of a rank's part. Raises ModelError where the class's plan cannot divide it."""
        if shard.count == 1:
            return self.attention
        return divided_attention(self.given, self.longest, shard)

    def undivided_tokens(self) -> str | None:
        return "a model by transformers' classes keeps its own keys and values; see --model-impl"

    def indivisible(self, ranks: int) -> str | None:
        try:
            self.of_rank(Shard(0, ranks))
        except ModelError as error:
            return str(error)
        return None


def adapted_spec(config: ModelConfig) -> AdaptedSpec:
    """Builds the class without weights. Raises ModelError where pages do not serve it."""
    assert config.given is not None
    model = build(config.given, torch.float32)
    with called(model) as names:
        calls = probe(model, longest := config.context or config.max_position)
        check_head(model, config.vocab_size, config.hidden_size)
    return AdaptedSpec(
        config.vocab_size,
        config.hidden_size,
        tuple((each,) for each in calls),
        NO_NORM,
        tie_embeddings=config.tie_embeddings,
        given=config.given,
        made_by=type(model).__name__,
        rope_context=config.rope_context,
        longest=longest,
        called=frozenset(names),
        linears=_linears(model, names),
    )


def _linears(model: PreTrainedModel, called: Mapping[str, bool]) -> dict[str, tuple[int, int]]:
    """(in, out) of those that may have adapters, which PEFT knows by these names: what multiplies each token of a step
    once, and chooses no experts."""
    found = {}
    for name, module in model.named_modules():
        if called.get(name) and not name.endswith(ROUTERS):
            if type(module) is nn.Linear:
                found[name] = module.in_features, module.out_features
            elif type(module) is Conv1D:
                found[name] = module.weight.shape[0], module.weight.shape[1]
    return found
