"""Calls the backend on flash-attn 4 as it is installed, for a GPU that is not here: it compiles its kernels from fake
tensors and starts none. One line of JSON for each case, its error or null:
    python -m tests.kernels.compile_flash4 FOLDER
with FLASH_ATTENTION_ARCH and CUTE_DSL_ARCH (sm_90a) and FLASH_ATTENTION_NUM_SMS (132) in the environment. The folder
takes temporary files.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import product
from pathlib import Path

import torch
from torch._subclasses import FakeTensorMode

from quire.kernels.attention_params import AttentionParams
from quire.kernels.backend import AttentionMetadata
from quire.kernels.gpu.libraries.flash4 import Flash4Backend
from quire.kernels.reference import ReferenceBackend
from tests.engine.worker.fake_cuda import DEVICE, load_guard

HEADS, KV_HEADS = 32, 8
CASES = ((3, 1, 4000), (300, 1, 500), (3, 80, 700), (3, 5, 700))
"""Sequences, queries of each, the longest context."""
RULES = (AttentionParams(0.1), AttentionParams(0.1, window=300), AttentionParams(0.1, softcap=30.0))


def call(
    backend: Flash4Backend, dim: int, softmax: AttentionParams, seqs: int, queries: int, longest: int
) -> torch.Size:
    def new(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=DEVICE)

    tokens, page = seqs * queries, backend.block_size
    metadata = AttentionMetadata(
        query_start=new(seqs + 1),
        context_lens=new(seqs),
        key_start=new(seqs + 1),
        block_table=new(seqs, -(-longest // page)),
        positions=new(tokens, dtype=torch.int64),
        slot_mapping=new(tokens, dtype=torch.int64),
        max_query_len=queries,
        max_context_len=longest,
    )
    k_cache, v_cache = new(2, 50, page, KV_HEADS, dim, dtype=torch.bfloat16)
    q = new(tokens, HEADS, dim, dtype=torch.bfloat16)
    return backend.paged_attention(q, k_cache, v_cache, metadata, softmax).shape


def main() -> None:
    major = int(os.environ["FLASH_ATTENTION_ARCH"].removeprefix("sm_").rstrip("a")) // 10
    load_guard(Path(sys.argv[1]))
    torch.cuda.get_device_capability = lambda device=None: (major, 0)
    backend = Flash4Backend()
    backend.fused_ops = ReferenceBackend()  # so that decodes are flash-attn's everywhere
    assert backend.unsupported_reason(DEVICE, torch.bfloat16, 64) is None
    assert backend.can_split_keys(DEVICE) == (major == 10)
    for dim, softmax, case in product((64, 128), RULES, CASES):
        error = None
        try:
            with torch.inference_mode(), FakeTensorMode():
                assert call(backend, dim, softmax, *case) == (case[0] * case[1], HEADS, dim)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        print(json.dumps({"case": [dim, str(softmax), *case], "error": error}), flush=True)


if __name__ == "__main__":
    main()
