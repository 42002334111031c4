"""Cost of layers on disk: `python -m benchmarks.on_disk.layers FOLDER`; FOLDER selects the disk.

A dense random-weight model decodes one stream, then sixteen, and computes a prompt: in memory, and with bounds on its
layers' bytes. Each run is a process whose private memory (RLIMIT_DATA) is limited to what it had before loading, the
bound and some room. VmHWM is the peak, of which RssAnon cannot be reclaimed.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import resource
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.common.engines import at_once, dummy, folder_of, random_prompt, request
from benchmarks.common.options import options

SHAPE: dict[str, Any] = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "vocab_size": 8192},
    **{"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 4},
    **{"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, "eos_token_id": 2},
    "max_position_embeddings": 4096,
}
STEPS, PROMPT = 16, 1024
ROOM = 0.75
"""GiB besides layers: embedding and head, KV blocks, buffers, threads."""


def memory(field: str) -> float:
    """Memory in GiB."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 0.0 if found is None else int(found[1]) / 2**20


def measured(model: Path, folder: Path | None, bound: float | None, queue: Any) -> None:
    settings: dict[str, Any] = {"kv_cache_memory": 0.125}
    if folder is not None:
        settings |= {"weights_on_disk": str(folder), "weights_in_memory": bound}
        assert bound is not None
        limit = int((memory("VmData") + bound + ROOM) * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    made = dummy(model, **settings)
    note = next((each for each in made.info.notes if each.startswith("layers:")), "layers: all are in memory")
    before = made.engine_stats.disk_bytes
    alone = at_once(made, [request("a", range(10, 26), STEPS + 1)])["a"]
    read = (made.engine_stats.disk_bytes - before) / 2**30 / (STEPS + 1)
    many = [request(f"m{each}", random_prompt(16, each, range(1, 8000)), STEPS) for each in range(16)]
    began = time.perf_counter()
    batch = at_once(made, many)
    took = time.perf_counter() - began
    prompt = at_once(made, [request("p", random_prompt(PROMPT, "p", range(1, 8000)), 1)])["p"]
    told = {
        "note": note,
        "token": statistics.median(alone.gaps),
        "read": read,
        "batch": sum(len(each.ids) for each in batch.values()) / took,
        "prompt": prompt.first,
        "most": memory("VmHWM"),
        "private": memory("RssAnon"),
        "ids": [each.ids for each in (alone, prompt, *batch.values())],
    }
    queue.put(json.dumps(told))


def main() -> None:
    args = options(__doc__, {"folder": Path, "--layers": 24, "--shares": "1.05,0.5,0.25"})
    spawn, found = multiprocessing.get_context("spawn"), list[Any]()
    with folder_of(SHAPE | {"num_hidden_layers": args.layers}) as model:
        size = 0.0
        for share in (None, *map(float, args.shares.split(","))):
            queue = spawn.SimpleQueue()
            bound = None if share is None else share * size
            process = spawn.Process(target=measured, args=(model, None if share is None else args.folder, bound, queue))
            process.start()
            while queue.empty() and process.is_alive():
                time.sleep(0.1)
            if queue.empty():
                raise SystemExit(f"a bound of {bound} GiB failed")
            told = json.loads(queue.get())
            process.join()
            found.append(told["ids"])
            name = "in memory" if bound is None else f"{bound:.2f} GiB for layers"
            print(
                f"{name:<22} {1000 * told['token']:8.1f} ms a token, {told['read']:5.2f} GiB of the disk; 16 streams "
                f"{told['batch']:6.1f} tokens/s; prompt of {PROMPT:,} {told['prompt']:5.2f} s; "
                f"at most {told['most']:.2f} GiB, private {told['private']:.2f}; {told['note']}",
                flush=True,
            )
            if share is None:
                numbers = SHAPE["hidden_size"] * (SHAPE["hidden_size"] * 2.5 + 3 * SHAPE["intermediate_size"])
                size = numbers * 1.5 * args.layers / 2**30
    print("the same tokens:", all(ids == found[0] for ids in found))


if __name__ == "__main__":
    main()
