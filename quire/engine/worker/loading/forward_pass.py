"""A forward pass without an engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.engine.checkpoint.model_resolver import read_model_config
from quire.engine.checkpoint.overrides import resolve_model_with_overrides
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import InvalidRequest, check_task
from quire.engine.models.decoder import Decoder
from quire.engine.worker.device_memory import (
    allocate_kv_blocks,
    allocate_slot_states,
    kv_cache_by_layer,
    prefill_metadata,
)
from quire.engine.worker.device_plan import choose_device_plan, configure_cpu
from quire.engine.worker.loading.model.loaded_model import LoadedModel
from quire.engine.worker.loading.model_loader import load_model
from quire.engine.worker.loading.weight_loader import NamedTensors
from quire.kernels.backend import Backend

_MAX_LOGIT_ROWS = 256
Logprobs = Tensor
"""float32 [n - 1]: the logprob of each token given the tokens before it. For the full vocabulary, [n - 1, vocab]."""


def load_standalone_model_and_backend(
    config: EngineConfig, tensors: NamedTensors | None = None
) -> tuple[LoadedModel, Backend]:
    """Raises ConfigError."""
    configure_cpu(config)
    path = resolve_model_with_overrides(config)
    model_config = read_model_config(path, config.model_impl)
    device_plan = choose_device_plan(config, model_config)
    return load_model(config, path, model_config, device_plan, lambda: None, tensors), device_plan.backend


def compute_hidden_states(model: Decoder, block_size: int, tokens: Tensor, num_states: int) -> Tensor:
    """Returns the first `num_states` hidden states of `tokens` [T] int32, as [num_states, hidden]."""
    metadata = prefill_metadata(1, len(tokens), block_size, model.device, model.groups.num_groups)
    kv_tensors = allocate_kv_blocks(model, metadata.block_table.numel() * model.groups.num_groups)
    cache = kv_cache_by_layer(model, kv_tensors, allocate_slot_states(model, 1, 0))
    return model.forward(tokens, metadata, cache, torch.arange(num_states, device=model.device))


class ForwardPass:
    def __init__(self, model: Decoder, block_size: int) -> None:
        self._model, self._block_size = model, block_size

    @classmethod
    def load_from_config(cls, config: EngineConfig, tensors: NamedTensors | None) -> ForwardPass:
        """Raises ConfigError, and InvalidRequest if the model does not generate."""
        loaded, backend = load_standalone_model_and_backend(config, tensors)
        check_task("generate", loaded.tasks)
        return cls(loaded.model, backend.block_size)

    @torch.inference_mode()
    def compute_logprobs(self, token_ids: Sequence[int], *, full_vocabulary: bool) -> Logprobs:
        """Raises InvalidRequest."""
        model, ids = self._model, self._validate_token_ids(token_ids)
        tokens = torch.tensor(ids, dtype=torch.int32, device=model.device)
        hidden = compute_hidden_states(model, self._block_size, tokens, len(ids) - 1)
        parts: list[Tensor] = []
        for first in range(0, len(hidden), _MAX_LOGIT_ROWS):
            part = torch.log_softmax(model.compute_logits(hidden[first : first + _MAX_LOGIT_ROWS]), dim=-1)
            following = tokens[first + 1 : first + 1 + len(part), None].long()
            parts.append(part if full_vocabulary else part.gather(-1, following).squeeze(-1))
        return torch.cat(parts).cpu()

    def _validate_token_ids(self, token_ids: Sequence[int]) -> list[int]:
        ids = [int(each) for each in token_ids]
        vocab, longest = self._model.spec.vocab_size, self._model.max_model_len
        if not 2 <= len(ids) <= longest:
            message = f"token_ids: {len(ids)} tokens; a forward pass takes 2 to {longest}"
            raise InvalidRequest(message, param="token_ids")
        if outside := [each for each in ids if not 0 <= each < vocab]:
            message = f"token_ids: {outside[0]} is outside the vocabulary of {vocab} tokens"
            raise InvalidRequest(message, param="token_ids")
        return ids
