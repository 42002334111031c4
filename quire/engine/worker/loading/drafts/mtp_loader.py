"""Loads heads that draft from hidden states. The served checkpoint's MTP layer has the same shape as its last layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from quire.engine.architecture.draft_heads import MTPSpec
from quire.engine.checkpoint.model_resolver import resolve_weights
from quire.engine.checkpoint.mtp_names import find_mtp_names, mtp_layer_config
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError, QuireError
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.families.base.schema.config_schema import FamilyConfigFields
from quire.engine.models import decoder_spec
from quire.engine.models.decoder import Decoder
from quire.engine.models.heads.mtp import MTPHead
from quire.engine.worker.loading.checkpoint_weights import open_weights
from quire.engine.worker.loading.drafts.draft_head_loader import LoadedDraftHead, load_draft_head
from quire.engine.worker.loading.model.weight_sizes import weight_bytes_in_memory
from quire.engine.worker.loading.weight_loader import dummy_stream, load_weights
from quire.kernels.backend import Backend


def load_head_drafter(
    config: EngineConfig, target_config: ModelConfig, backend: Backend, decoder: Decoder
) -> LoadedDraftHead:
    """Raises ConfigError."""
    assert config.speculative_config is not None
    is_mtp = config.speculative_config.method == "mtp"
    try:
        return (
            _load_mtp(config, target_config, backend, decoder) if is_mtp else load_draft_head(config, backend, decoder)
        )
    except (QuireError, ValueError) as error:
        what = "speculative_config: mtp" if is_mtp else "speculative_config.model"
        raise ConfigError(f"{what}: {error}", param="speculative_config") from error


def _load_mtp(config: EngineConfig, target_config: ModelConfig, backend: Backend, decoder: Decoder) -> LoadedDraftHead:
    path, dummy = resolve_weights(config), config.load_format == "dummy"
    fields = cast(FamilyConfigFields, mtp_layer_config(target_config.raw, target_config.num_layers))
    mtp_config = replace(
        target_config, num_layers=fields["num_hidden_layers"] or 1, raw=fields, max_model_len=decoder.max_model_len
    )
    names = None if dummy else find_mtp_names(path, target_config.num_layers)
    weights = open_weights(config, path, mtp_config, backend, decoder.dtype, mtp=names)
    head = MTPHead(MTPSpec.from_decoder(decoder_spec(mtp_config)), weights.scheme, decoder, backend)
    table = head.parameters()
    stream: Iterable[tuple[str, Tensor]] = dummy_stream(table, config.seed, decoder.device) if dummy else weights.stream
    with torch.inference_mode():
        read = load_weights(table, stream, device=decoder.device)
    return LoadedDraftHead(head, weight_bytes_in_memory(table, config, backend, read), decoder)
