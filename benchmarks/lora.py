"""What adapters cost: tokens per second of many streams on the model alone, and on several adapters of it.

    python -m benchmarks.lora [--streams 32] [--adapters 8] [--rank 16] [--rounds 5] [--dtype bfloat16]

Random weights of smol-135m's shapes and random adapters of all linears: speed does not depend on the numbers. The two
kinds of run take turns in one engine, and the best of each counts, so that what else the machine does weighs on both.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from quire.engine.checkpoint.files import read_model_config
from quire.engine.config import EngineConfig
from quire.engine.loop import Engine
from quire.engine.lora.files import CONFIG, WEIGHTS
from quire.engine.lora.modules import EMBEDDING, HEAD, Modules, adaptable_modules
from quire.engine.lora.spool import Spool
from quire.engine.types import Adapter, Request, SamplingParams

SMOL_135M = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
TOKENS, PROMPT = 64, 16


def write_adapter(folder: Path, modules: Modules, rank: int, seed: int) -> Path:
    """A random adapter of all linears of the layers."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (inner, outs) in modules.items():
        if name not in (EMBEDDING, HEAD):
            for half, shape in (("lora_A", (rank, inner)), ("lora_B", (outs, rank))):
                values = torch.randn(shape, generator=generator) * shape[1] ** -0.5
                tensors[f"base_model.model.{name}.{half}.weight"] = values.bfloat16()
    folder.mkdir(parents=True)
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}))
    save_file(tensors, folder / WEIGHTS)
    return folder


def measure(engine: Engine, streams: int, adapters: list[Adapter | None], number: int) -> tuple[float, float]:
    """Tokens per second of decoding, and per second of processor time."""
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    for index in range(streams):
        ids = [(7 * index + 13 * at + number) % 40_000 + 10 for at in range(PROMPT)]
        adapter = adapters[index % len(adapters)]
        engine.add(Request(id=f"{number}-{index}", prompt_ids=ids, params=params, seed=0, adapter=adapter))
    tokens, began, busy = 0, 0.0, 0.0
    while engine.busy:
        outputs = engine.step()
        if began:
            tokens += sum(len(output.new_ids) for output in outputs)
        elif sum(len(output.new_ids) for output in outputs) == 0 or engine.stats.waiting:
            continue
        else:
            began, busy = time.perf_counter(), time.process_time()
    return tokens / (time.perf_counter() - began), tokens / (time.process_time() - busy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in (("streams", 32), ("adapters", 8), ("rank", 16), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        (root / "model").mkdir()
        (root / "model" / "config.json").write_text(json.dumps(SMOL_135M))
        modules = adaptable_modules(read_model_config(root / "model"))
        (root / "spool").mkdir()
        spool = Spool(root / "spool", modules, args.rank)
        made = [
            spool.add(f"a{index}", str(write_adapter(root / f"a{index}", modules, args.rank, index)))
            for index in range(args.adapters)
        ]
        engine = Engine(
            EngineConfig(
                model=str(root / "model"),
                load_format="dummy",
                dtype=args.dtype,
                quantization=args.quantization,
                num_kv_blocks=args.streams * 8,
                enable_prefix_caching=False,
                enable_lora=True,
                max_loras=args.adapters,
                max_lora_rank=args.rank,
            )
        )
        kinds: dict[str, list[Adapter | None]] = {"base": [None], "adapters": [*made], "one adapter": [made[0]]}
        best: dict[str, tuple[float, float]] = dict.fromkeys(kinds, (0.0, 0.0))
        for number in range(args.rounds * len(kinds)):
            kind = list(kinds)[number % len(kinds)]
            found = measure(engine, args.streams, kinds[kind], number)
            best[kind] = (max(best[kind][0], found[0]), max(best[kind][1], found[1]))
    for kind, (wall, cpu) in best.items():
        shares = f"{wall / best['base'][0]:.2f} of the base ({cpu / best['base'][1]:.2f} by processor time)"
        print(f"{kind:12} {wall:8.1f} tokens/s   {shares}")


if __name__ == "__main__":
    main()
