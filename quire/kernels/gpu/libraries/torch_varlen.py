"""PyTorch's copy of flash-attn 2. It takes block tables and splits from torch 2.13 on (2.12 rejects them), and has no
softcap.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from quire.kernels.attention_params import AttentionParams
from quire.kernels.backend import AttentionMetadata
from quire.kernels.gpu.libraries.flash2 import INSTALL
from quire.kernels.gpu.libraries.flash_backend import FlashPagedBackend, gather_step_kv, has_code_for

_MIN_TORCH_VERSION = (2, 13)
_NO_SOFTCAP = f"PyTorch's varlen attention has no softcap; install flash-attn ({INSTALL})"


class TorchVarlenBackend(FlashPagedBackend):
    name = "torch_varlen"

    def __init__(self, *, deterministic: bool = False) -> None:
        super().__init__(deterministic=deterministic)
        self._library = _find_varlen_attn()

    def description(self) -> str:
        return f"flash-attn as built into PyTorch {torch.__version__}"

    def unsupported_reason(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, softcap: bool = False
    ) -> str | None:
        if self._library is None:
            return f"PyTorch {torch.__version__} has no paged attention, 2.13 has"
        if (reason := super().unsupported_reason(device, dtype, head_dim, softcap)) is not None:
            return reason
        capability, built = torch.cuda.get_device_capability(device), torch.cuda.get_arch_list()
        if built and not has_code_for(capability, built):
            return f"this build of PyTorch has no kernels for compute capability {capability[0]}.{capability[1]}"
        return _NO_SOFTCAP if softcap else None

    def attend_batch_part(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, softmax: AttentionParams
    ) -> Tensor:
        """Raises NotImplementedError for a softcap.

        Never splits keys, because with pages and splits PyTorch leaves rows unwritten
        (https://github.com/pytorch/pytorch/issues/194167). Unsplit decodes fill few thread blocks, and a causal window
        prevents packing of query heads. Triton therefore computes decodes. If deterministic it does not, because a
        token needs the same bits in a decode and in a prefill chunk.
        """
        if softmax.softcap is not None:
            raise NotImplementedError(_NO_SOFTCAP)
        fallback = self._ops_for(q)
        if metadata.max_query_len == 1 and not self.deterministic and fallback.name == "triton":
            return fallback.paged_attention(q, k_cache, v_cache, metadata, softmax)
        assert self._library is not None
        window = softmax.window if self.deterministic else softmax.window_if_limiting(metadata.max_context_len)
        plain = metadata.is_full_prefill and not self.deterministic  # contiguous keys allow a faster kernel
        return self._library(
            q,
            gather_step_kv(k_cache, metadata) if plain else k_cache,
            gather_step_kv(v_cache, metadata) if plain else v_cache,
            metadata.query_start,
            metadata.key_start,
            metadata.max_query_len,
            metadata.max_context_len,
            scale=softmax.scale,
            # (left, right); -1 is unlimited; our window includes the query, left does not
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=q.shape[1] != k_cache.shape[2],
            seqused_k=None if plain else metadata.context_lens,
            block_table=None if plain else metadata.block_table,
            num_splits=None if plain else 1,
        )


def _find_varlen_attn() -> Callable[..., Tensor] | None:
    if tuple(int(number) for number in torch.__version__.split(".")[:2]) < _MIN_TORCH_VERSION:
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    paged = "block_table" in inspect.signature(varlen_attn).parameters
    return cast(Callable[..., Tensor], varlen_attn) if paged else None
