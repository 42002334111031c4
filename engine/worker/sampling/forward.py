"""The log probabilities of a prompt's tokens by one forward pass, on pages of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.engine.errors import InvalidRequest
from quire.engine.models.decoder import Decoder
from quire.engine.worker.memory import allocate_pages, allocate_states, layers_of, prompts

_LOGIT_ROWS = 256
"""How many rows of logits are held at once."""


@torch.inference_mode()
def prompt_logprobs(
    model: Decoder, block_size: int, token_ids: Sequence[int], *, full_vocabulary: bool = False
) -> Tensor:
    """Of each token behind those before it, [n - 1] float32; with `full_vocabulary` of all tokens, [n - 1, vocab].
    Raises InvalidRequest for token ids that are no sequence of the model's."""
    ids, device = _checked(token_ids, model), model.device
    metadata = prompts(1, len(ids), block_size, device, model.groups.count)
    pages = allocate_pages(model, metadata.block_table.numel() * model.groups.count)
    cache = layers_of(model, pages, allocate_states(model, 1, 0))
    tokens = torch.tensor(ids, dtype=torch.int32, device=device)
    hidden = model.forward(tokens, metadata, cache, torch.arange(len(ids) - 1, device=device))
    found: list[Tensor] = []
    for first in range(0, len(hidden), _LOGIT_ROWS):
        part = torch.log_softmax(model.logits(hidden[first : first + _LOGIT_ROWS]), dim=-1)
        following = tokens[first + 1 : first + 1 + len(part), None].long()
        found.append(part if full_vocabulary else part.gather(-1, following).squeeze(-1))
    return torch.cat(found).cpu()


def _checked(token_ids: Sequence[int], model: Decoder) -> list[int]:
    ids = [int(each) for each in token_ids]
    vocab, longest = model.spec.vocab_size, model.max_model_len
    if not 2 <= len(ids) <= longest:
        raise InvalidRequest(f"token_ids: {len(ids)} tokens; a forward pass takes 2 to {longest}", param="token_ids")
    if outside := [each for each in ids if not 0 <= each < vocab]:
        raise InvalidRequest(f"token_ids: {outside[0]} is outside the vocabulary, {vocab} tokens", param="token_ids")
    return ids
