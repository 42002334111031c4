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
    model: Decoder
    pooling_head: PoolerHead
    pooling: PoolingConfig
    tasks: tuple[Task, ...]
    expected_weights: ExpectedWeights
    adapter_slots: AdapterManager | None
    quantization: str
    read_bytes: int
    """Bytes of the weights in files, before online quantization."""
    kv_groups: KVCacheGroups


@dataclass(frozen=True, slots=True)
class ModelPart:
    shard: ModelShard = UNSHARDED
    decoder_class: type[Decoder] = Decoder
    """Ignored by the transformers backend."""
    stage: int = -1
    """Index of a pipeline stage. The default is the last stage, which has all layers if there is no pipeline."""


WHOLE_MODEL = ModelPart()
