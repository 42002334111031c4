from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import torch

from quire.engine.architecture.encoder import EncoderSpec
from quire.engine.architecture.pooler_head import HeadLayerSpec
from quire.engine.checkpoint.model_resolver import resolve_model
from quire.engine.checkpoint.pooling import PoolingConfig
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError
from quire.engine.common.request_params import Task
from quire.engine.layers.pooler_head import PoolerHead
from quire.engine.layers.pooling import Pooler, PoolerHeadFunction, make_pooler_head
from quire.engine.models.decoder import Decoder
from quire.engine.text.tokenizer import Tokenizer
from quire.engine.worker.loading.model.loaded_model import LoadedModel
from quire.kernels.backend import Backend


def make_pooler(config: EngineConfig, path: Path, loaded: LoadedModel) -> Pooler | None:
    if loaded.tasks == ("generate",):
        return None
    model, pooling = loaded.model, loaded.pooling
    vector_of = choose_pooler_head(model, pooling, loaded.pooling_head, lambda: read_tokenizer(config, path))
    return Pooler(pooling, vector_of, config.max_num_seqs, model.spec.hidden_size, model.device)


def choose_pooler_head(
    model: Decoder, pooling: PoolingConfig, head: PoolerHead, tokenizer: Callable[[], Tokenizer]
) -> PoolerHeadFunction:
    """Raises ConfigError for an unknown token."""
    if pooling.classifier_tokens is None:
        return head
    to_id = tokenizer().backend.token_to_id
    ids = [to_id(token) for token in pooling.classifier_tokens]
    if None in ids:
        unknown = pooling.classifier_tokens[ids.index(None)]
        wrong = f"classifier_from_token: the tokenizer has no token {unknown!r}"
        raise ConfigError(wrong, param="classifier_from_token")

    def score_logit_difference(pooled: torch.Tensor) -> torch.Tensor:
        first, second = model.compute_logits(pooled)[:, ids].unbind(1)
        return (second - first)[:, None]

    return score_logit_difference


def read_tokenizer(config: EngineConfig, path: Path) -> Tokenizer:
    return Tokenizer.from_pretrained(
        path if config.tokenizer is None else resolve_model(config.tokenizer, config.revision)
    )


def needs_lm_head(pooling: PoolingConfig, tasks: Collection[Task]) -> bool:
    return "generate" in tasks or pooling.classifier_tokens is not None


def make_encoder_pooler_head(spec: EncoderSpec, pooling: PoolingConfig, backend: Backend) -> PoolerHead:
    if spec.projection:
        return PoolerHead(spec.projection, backend)
    return make_pooler_head(pooling, backend, spec.classifier, spec.hidden_size)


def make_decoder_pooler_head(pooling: PoolingConfig, backend: Backend, hidden_size: int) -> PoolerHead:
    return make_pooler_head(pooling, backend, _score_head_layer_specs, hidden_size)


def _score_head_layer_specs(hidden: int, labels: int) -> list[HeadLayerSpec]:
    return [HeadLayerSpec("score", hidden, labels, bias=False)]
