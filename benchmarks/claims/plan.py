"""Planned figures against those published for the same model and GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.claims.run import Row
from benchmarks.common.engines import folder_of

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
_DEEPSEEK_CODER = _LLAMA | {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32256,
    "max_position_embeddings": 16384,
}
_TINY_LLAMA = _LLAMA | {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}


def plans() -> Iterator[Row]:
    coder = _plan(_DEEPSEEK_CODER, "--gpu", "A100-80GB")
    kv, tokens = coder["kv"], coder["max_position"]
    page = kv["page_bytes_per_layer"] // kv["block_size"] * 16
    yield Row(
        "a page of 16 tokens of deepseek-coder-6.7b, a layer",
        "256 KB; 8 GB for a context of 16,384 tokens",
        f"{page / 2**10:.0f} KiB; {tokens * kv['bytes_per_token'] / 2**30:.2f} GiB",
        "",
    )
    tiny = _plan(_TINY_LLAMA, "--gpu", "T4", "--kv-offload-memory", "4")
    host = tiny["tiers"][0]["tokens"] // tiny["kv"]["block_size"]
    yield Row(
        "pages of TinyLlama on a T4, 4 GiB of the host's",
        "32,350 in 10.86 GiB, 11,915 of the host's (vLLM's log)",
        f"{tiny['kv']['num_blocks']:,} in {tiny['kv']['budget_bytes'] / 2**30:.2f} GiB, {host:,} of the host's",
        "",
    )


def _plan(config: dict[str, object], *flags: str) -> dict[str, Any]:
    with folder_of(config) as folder:
        program = [str(Path(sys.executable).with_name("quire")), "plan", str(folder), *flags, "--json"]
        found: dict[str, Any] = json.loads(subprocess.run(program, check=True, capture_output=True).stdout)
        return found
