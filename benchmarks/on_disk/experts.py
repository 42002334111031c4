"""Cost of experts on disk: `python -m benchmarks.on_disk.experts FOLDER`; FOLDER selects the disk.

OLMoE's experts (64 of 2048 x 1024, 8 per token), few layers, random weights: all experts are used equally, the worst
case for caching. One stream decodes. `dropped` evicts the file from the page cache before each step, so that each
expert not kept comes from disk.
"""

from __future__ import annotations

import gc
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.common.engines import dummy, folder_of, request
from benchmarks.common.options import options
from quire.engine.engine_core import EngineCore
from quire.kernels.cpu.decoder.mapped_experts import MappedDiskExperts

SHAPE: dict[str, Any] = {
    **{"model_type": "olmoe", "architectures": ["OlmoeForCausalLM"], "torch_dtype": "bfloat16", "vocab_size": 4096},
    **{"hidden_size": 2048, "intermediate_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 16},
    **{"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False, "max_position_embeddings": 2048},
    **{"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, "eos_token_id": 2},
}
STEPS = 24


def decode(made: EngineCore, *, drop: bool) -> tuple[float, list[int]]:
    """Median milliseconds per token, and the tokens."""
    made.reset_prefix_cache()
    made.add_request(request("a", range(10, 26), STEPS + 1))
    store, took, ids = made.executor.model.offload, [], []  # type: ignore[attr-defined]
    while made.has_work:
        if drop and isinstance(store, MappedDiskExperts):
            store.drop_cached_pages()
        began = time.perf_counter()
        outputs = made.step()
        took.append(1000 * (time.perf_counter() - began))
        ids += [token for each in outputs for token in each.new_ids]
    return statistics.median(took[1:]), ids


def told(name: str, made: EngineCore, *, drop: bool, guesses: bool = True) -> list[int]:
    store = made.executor.model.offload  # type: ignore[attr-defined]
    if isinstance(store, MappedDiskExperts):
        store.set_prefetching(guesses)
    before = made.engine_stats
    took, ids = decode(made, drop=drop)
    now = made.engine_stats
    read, kept = now.experts_read - before.experts_read, now.experts_kept - before.experts_kept
    guessed, right = (
        now.experts_guessed - before.experts_guessed,
        now.experts_guessed_right - before.experts_guessed_right,
    )
    disk = (now.disk_bytes - before.disk_bytes) / 2**20 / (STEPS + 1)
    share = f"{kept / read:4.0%} kept" if read else ""
    right_share = f"{right / guessed:4.0%} of guesses right" if guessed else ""
    print(f"{name:<44} {took:8.1f} ms a token {disk:8.1f} MiB of the disk {share:>10} {right_share}", flush=True)
    return ids


def main() -> None:
    args = options(__doc__, {"folder": Path, "--layers": 4})
    with folder_of(SHAPE | {"num_hidden_layers": args.layers}) as model:
        made = dummy(model, kv_cache_memory=0.25)
        wanted = told("in memory", made, drop=False)
        del made
        gc.collect()
        on_disk: dict[str, Any] = {"kv_cache_memory": 0.25, "weights_on_disk": str(args.folder)}
        made = dummy(model, **on_disk)
        print(next(note for note in made.info.notes if note.startswith("experts:")))
        found = [told("on disk, dropped, no guesses", made, drop=True, guesses=False)]
        found.append(told("on disk, dropped", made, drop=True))
        found.append(told("on disk, the system keeps what it reads", made, drop=False))
        found.append(told("the same again", made, drop=False))
        size = made.executor.model.offload.total_bytes  # type: ignore[attr-defined]
        del made
        gc.collect()
        for share in (0.25, 0.75):
            made = dummy(model, **on_disk, weights_in_memory=share * size / 2**30)
            found.append(told(f"on disk, dropped, {share:.0%} kept in memory", made, drop=True))
            del made
            gc.collect()
        print("the same tokens:", all(ids == wanted for ids in found))


if __name__ == "__main__":
    main()
