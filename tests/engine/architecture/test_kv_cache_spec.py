"""The bytes that specs say are those of the tensors that sublayers allocate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from quire.engine.architecture.kv_cache_spec import (
    HASH_BLOCK_SIZE,
    FullAttentionSpec,
    KVCacheSpec,
    KVElementSizes,
    SharedKVSpec,
    SlidingWindowSpec,
)
from quire.engine.checkpoint.model_resolver import read_model_config
from quire.engine.layers.builders import build_sublayer
from quire.engine.layers.schemes import UnquantizedScheme
from quire.engine.layers.sublayer import BuildContext
from quire.engine.models import decoder_spec
from quire.kernels.reference import ReferenceBackend
from tests.tiny_models import FAMILIES, SHAPE

NUM_DRAFT_TOKENS = 3
SIZES = KVElementSizes(kv=4, model=2)
CPU = torch.device("cpu")


@pytest.mark.few(12)
@pytest.mark.parametrize("family", FAMILIES)
def test_kv_cache_spec_gives_bytes_of_sublayer_tensors(family: str, tmp_path: Path) -> None:
    options = SHAPE | FAMILIES[family]
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    (tmp_path / "config.json").write_text(json.dumps(json.loads(config.to_json_string(use_diff=False))))
    spec = decoder_spec(read_model_config(tmp_path))
    backend = ReferenceBackend()
    context = BuildContext(
        backend,
        UnquantizedScheme(backend, torch.bfloat16),
        spec.hidden_size,
        torch.bfloat16,
        torch.float32,
        CPU,
        max_model_len=64,
    )
    for index, layer in enumerate(spec.layers):
        for each in layer:
            sublayer = build_sublayer(each, context, f"model.layers.{index}")
            blocks = sum(tensor.total_bytes for tensor in sublayer.block_tensor_specs(1))
            slots = sum(tensor.total_bytes for tensor in sublayer.slot_tensor_specs(1, NUM_DRAFT_TOKENS))
            kept = each.kv_cache_spec or KVCacheSpec()
            assert blocks == kept.page_size_bytes(backend.block_size, SIZES)
            assert slots == kept.slot_bytes(NUM_DRAFT_TOKENS, SIZES)


def test_max_memory_usage_counts_blocks_that_window_touches() -> None:
    full, sliding = FullAttentionSpec(8, 4), SlidingWindowSpec(8, 4, sliding_window=20)
    page = full.page_size_bytes(HASH_BLOCK_SIZE, SIZES)
    assert page == sliding.page_size_bytes(HASH_BLOCK_SIZE, SIZES) == 8 * 4 * HASH_BLOCK_SIZE
    assert full.max_memory_usage_bytes(1000, HASH_BLOCK_SIZE, SIZES) == 63 * page
    # 20 tokens lie in 3 blocks at most
    assert sliding.max_memory_usage_bytes(1000, HASH_BLOCK_SIZE, SIZES) == 3 * page
    assert sliding.max_memory_usage_bytes(17, HASH_BLOCK_SIZE, SIZES) == 2 * page
    assert SharedKVSpec(0, 20).max_memory_usage_bytes(1000, HASH_BLOCK_SIZE, SIZES) == 0


def test_specs_equal_without_window_only_if_blocks_hold_the_same() -> None:
    assert SlidingWindowSpec(8, 4, sliding_window=20).without_window() == FullAttentionSpec(8, 4)
    assert SlidingWindowSpec(8, 2, sliding_window=20).without_window() != FullAttentionSpec(8, 4)
