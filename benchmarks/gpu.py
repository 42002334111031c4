"""`make bench-gpu`: how close the engine comes to the GPU's limits, with random weights, in one table.

A copy and a matrix product on random data measure the limits. Decode is compared with the memory limit (each weight and
cached key and value is read once per step), prefill with the arithmetic limit. Also: transformers' continuous batching,
gaps between kernels, time from start to first token. `--device cpu --models tiny` tries the script.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.engines import at_once, dummy, folder_of, random_prompt, request
from benchmarks.common.options import options
from quire.engine.checkpoint.sizes.model_sizes import read_model_sizes
from quire.engine.common.types import EngineCoreRequest
from quire.engine.engine_core import EngineCore, free_engine_memory

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": LLAMA3_ROPE,
        "tie_word_embeddings": False,
    },
    "qwen3-4b": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16384,
        "tie_word_embeddings": True,
    },
}
SHAPES["qwen3-0.6b"] = SHAPES["qwen3-4b"] | {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
}
DECODE_PROMPT, DECODE_STEPS, WARM_STEPS = 512, 128, 16
PREFILLS = (2048, 8192)
BATCHES = (1, 32, 256)
BYTES = 2
"""Bytes per bfloat16 number."""
_ASLEEP = 40_000_000
"""Cycles, about 20 ms: enough for a host to queue 20 calls."""
_CACHED_BYTES = 2**28
"""Exceeds a GPU's L2 cache."""


def main() -> int:
    models = {"nargs": "+", "choices": sorted(SHAPES), "default": ["qwen3-0.6b", "qwen3-4b", "llama-3.1-8b"]}
    args = options(
        __doc__,
        {
            "--models": models,
            "--device": {"default": "cuda", "choices": ["cuda", "cpu"]},
            "--attention-backend": "auto",
            "--deterministic": False,
            "--enforce-eager": False,
            "--no-transformers": False,
            "--json": Path,
        },
        "python -m benchmarks.gpu",
    )
    device = torch.device(args.device)
    copy, matmul = limits(device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(
        f"{name}, torch {torch.__version__}: copies {copy / 1e12:.2f} TB/s, multiplies {matmul / 1e12:.0f} TFLOP/s bf16"
    )
    found: dict[str, Any] = {"device": name, "torch": torch.__version__, "copy": copy, "matmul": matmul, "models": {}}
    wrong = list[str]()
    for model in args.models:
        try:
            with model_directory(model) as path:
                found["models"][model] = bench(model, path, args, copy, matmul)
        except Exception as error:  # keep the other models' figures
            wrong.append(model)
            found["models"][model] = {"error": f"{type(error).__name__}: {error}"}
            traceback.print_exc()
        free_engine_memory()
        if args.json:  # after each model, so that an interrupted run keeps its results
            args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 1 if wrong else 0


def bench(model: str, path: Path, args: argparse.Namespace, copy: float, matmul: float) -> dict[str, Any]:
    print(f"\n{model}")
    small = args.device == "cpu"
    rows, tokens = (4, 4) if small else (32, 128)
    other = None if args.no_transformers else transformers_seconds(path, rows, tokens, args.device)
    free_engine_memory()
    results = measure(path, args, copy, matmul, rows, tokens)
    free_engine_memory()
    if other is not None:
        results["transformers_s"] = other
        show("transformers", f"{rows} x {tokens}", other, rows * tokens, f"{other / results['quire_s']:.1f} x as long")
    return results


def show(what: str, size: str, seconds: float, tokens: int, share: str = "") -> None:
    print(f"  {what:<13}{size:>11} {seconds * 1e3:11.3f} ms {tokens / seconds:11.0f} tokens/s  {share}")


def measure(path: Path, args: argparse.Namespace, copy: float, matmul: float, rows: int, tokens: int) -> dict[str, Any]:
    """The engine is freed afterwards."""
    small = args.device == "cpu"
    sizes = read_model_sizes(json.loads((path / "config.json").read_text()))
    began = time.perf_counter()
    engine = start(path, args)
    load = time.perf_counter() - began
    at_once(engine, [asked("first", 5, 1)])
    first_token = time.perf_counter() - began
    print(f"  {engine.info.backend}\n  {engine.info.arithmetic}")
    print(f"  engine up after {load:.1f} s, first token after {first_token:.1f} s")
    began = time.perf_counter()
    while engine.run_next_warmup():
        pass
    print(f"  graphs captured in {time.perf_counter() - began:.1f} s")
    results: dict[str, Any] = {"backend": engine.info.backend, "load_s": load, "first_token_s": first_token}
    for batch in BATCHES[:2] if small else BATCHES:
        seconds, context = decode(engine, batch, 4 if small else DECODE_STEPS)
        moved = (sizes.active_parameters + batch * context * sizes.kv_values_per_token) * BYTES
        results[f"decode_{batch}"] = {"ms": seconds * 1e3, "share": moved / seconds / copy}
        show("decode", f"{batch} rows", seconds, batch, f"{moved / seconds / copy:.1%} of the copy's bytes")
    for length in PREFILLS[:1] if small else PREFILLS:
        seconds = prefill(engine, length)
        # Every token uses all parameters except the head's, which only the last token uses; on average it attends to
        # half of the keys.
        work = 2 * (sizes.active_parameters - sizes.head_parameters) * length
        work += 2 * sizes.attention_width * length * length
        results[f"prefill_{length}"] = {"ms": seconds * 1e3, "share": work / seconds / matmul}
        show("prefill", f"{length}", seconds, length, f"{work / seconds / matmul:.1%} of the product's operations")
    prompts = [asked(f"run{index}", DECODE_PROMPT // 4, tokens) for index in range(rows)]
    began = time.perf_counter()
    at_once(engine, prompts)
    results["quire_s"] = time.perf_counter() - began
    show("quire", f"{rows} x {tokens}", results["quire_s"], rows * tokens, f"prompts of {DECODE_PROMPT // 4}")
    if not small:
        results["gap"] = gap(engine)
        print(f"  no kernel runs in {results['gap']:.1%} of a decode step of 32 rows")
    return results


def limits(device: torch.device) -> tuple[float, float]:
    """A copy's bytes per second, read and written, and a bfloat16 matrix product's operations per second."""
    big, side = (2**26, 512)
    if device.type == "cuda":
        big, side = min(2**32, torch.cuda.mem_get_info(device)[0] // 8), 8192
    source = torch.randint(0, 255, (big,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(2))
    copying = statistics.median(times(lambda: target.copy_(source), device))
    multiplying = statistics.median(times(lambda: a @ b, device))
    return 2 * big / copying, 2 * side**3 / multiplying


def times(function: Callable[[], object], device: torch.device, repeats: int = 20) -> list[float]:
    """Seconds per call, after three warm-up calls. GPU time if no call waits for the host."""
    for _ in range(3):
        function()
    if device.type == "cuda":
        return _times_there(function, repeats)
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        found.append(time.perf_counter() - began)
    return found


def _times_there(function: Callable[[], object], repeats: int) -> list[float]:
    """The GPU sleeps while calls are queued. Between calls its cache is filled by reads: written bytes would be evicted
    during the timed call (a read of 38 MB took 10 % longer).
    """
    others = torch.zeros(_CACHED_BYTES // 4, device="cuda")
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    torch.cuda.synchronize()
    torch.cuda._sleep(_ASLEEP)
    for begin, end in pairs:
        others.sum()
        begin.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]


def model_directory(model: str) -> AbstractContextManager[Path]:
    return folder_of(
        SHAPES[model] | {"torch_dtype": "bfloat16", "hidden_act": "silu", "eos_token_id": 2, "bos_token_id": 1}
    )


def start(path: Path, args: argparse.Namespace, **options: Any) -> EngineCore:
    room: dict[str, Any] = ({"num_kv_blocks": 4096} if args.device == "cpu" else {}) | options
    return dummy(
        path,
        skip_tokenizer_init=False,
        dtype="bfloat16",
        device=args.device,
        max_model_len=16384,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        attention_backend=args.attention_backend,
        deterministic=args.deterministic,
        enforce_eager=args.enforce_eager,
        enable_prefix_caching=False,
        **room,
    )


def asked(name: str, prompt: int, tokens: int) -> EngineCoreRequest:
    """A greedy request of new random tokens, which generates all `tokens`."""
    return request(name, random_prompt(prompt, f"{name} {prompt} {tokens}", range(3, 1000)), tokens)


def decode(engine: EngineCore, batch: int, steps: int) -> tuple[float, int]:
    """Seconds per step of `batch` rows, and mean context in tokens."""
    for index in range(batch):
        engine.add_request(asked(f"decode{index}", DECODE_PROMPT, steps + 4 * WARM_STEPS))
    waiting = {f"decode{index}" for index in range(batch)}
    while waiting:
        waiting -= {output.id for output in engine.step()}
    for _ in range(WARM_STEPS):
        engine.step()
    made = 0
    began = time.perf_counter()
    for _ in range(steps):
        made += sum(len(output.new_ids) for output in engine.step())
    seconds = time.perf_counter() - began
    context = DECODE_PROMPT + WARM_STEPS + steps // 2
    while engine.has_work:
        engine.step()
    assert made == batch * steps, f"{made} tokens in {steps} steps of {batch} rows"
    return seconds / steps, context


def prefill(engine: EngineCore, tokens: int, times: int = 5) -> float:
    """Median seconds of a lone prompt."""
    at_once(engine, [asked("warm", tokens, 1)])
    found = [at_once(engine, [asked(f"prompt{i}", tokens, 1)])[f"prompt{i}"] for i in range(times)]
    return statistics.median(each.latency for each in found)


def gap(engine: EngineCore) -> float:
    """Share of decode time without a kernel. Measure it last, because after PyTorch's profiler launches take more than
    twice the host time.
    """
    for index in range(32):
        engine.add_request(asked(f"gap{index}", DECODE_PROMPT, 100))
    for _ in range(WARM_STEPS + 32):
        engine.step()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(16):
            engine.step()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    busy, until = 0.0, spans[0][0]
    for begin, end in spans:
        busy += max(end - max(begin, until), 0)
        until = max(until, end)
    while engine.has_work:
        engine.step()
    return 1 - busy / (until - spans[0][0])


def transformers_seconds(path: Path, batch: int, tokens: int, device: str) -> float:
    """transformers' continuous batching, after a warm-up."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(path)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    options = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    prompts = [asked(f"run{i}", DECODE_PROMPT // 4, tokens).prompt_ids for i in range(batch)]
    # The warm-up's manager keeps its cache and graphs.
    model.generate_batch(inputs=prompts, generation_config=options, persistent_manager=True)
    began = time.perf_counter()
    model.generate_batch(inputs=prompts, generation_config=options, persistent_manager=True)
    seconds = time.perf_counter() - began
    model.destroy_cached_continuous_batching_manager()
    return seconds


if __name__ == "__main__":
    sys.exit(main())
