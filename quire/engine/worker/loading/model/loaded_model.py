"""A loaded model, or a process's part of one, and what it was made of."""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine.checkpoint.kv_cache_groups import KVCacheGroups
from quire.engine.checkpoint.pooling import PoolingConfig
from quire.engine.common.request_params import Task
from quire.engine.layers.adapters import AdapterManager
from quire.engine.layers.pooler_head import PoolerHead
from quire.engine.layers.shard import UNSHARDED, ModelShard
from quire.engine.models.decoder import Decoder
from quire.engine.worker.loading.weight_check import ExpectedWeights


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, or a rank's part of one, and what it was made of."""

    model: Decoder
    pooling_head: PoolerHead
    """What makes vectors' numbers of hidden states."""
    pooling: PoolingConfig
    """How it makes vectors."""
    tasks: tuple[Task, ...]
    expected_weights: ExpectedWeights
    adapter_slots: AdapterManager | None
    quantization: str
    """How the weights are stored in few bits, for people to read."""
    read_bytes: int
    """Of all weights, as they were read."""
    kv_groups: KVCacheGroups
    """Of all layers of the model."""


@dataclass(frozen=True, slots=True)
class ModelPart:
    """What of a model a process has."""

    shard: ModelShard = UNSHARDED
    """Whose part of each layer."""
    decoder_class: type[Decoder] = Decoder
    """Of a model that transformers' class does not compute."""
    stage: int = -1
    """Which of a pipeline's; the last one alone has all layers where there is no pipeline."""


WHOLE_MODEL = ModelPart()
