"""Whole models: log probabilities against transformers', and same tokens with every feature."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.engines import at_once, request
from benchmarks.flight.finding import KERNELS_ALONE, Say, close, tried
from quire.engine.checkpoint.model_resolver import read_model_config
from quire.engine.common.config import EngineConfig, SpeculativeConfig
from quire.engine.common.types import Adapter
from quire.engine.engine_core import EngineCore, free_engine_memory
from quire.engine.worker.startup import start_worker
from tests.adapters import save_adapter
from tests.engine.harness import run

_SHAPE: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
_WINDOW = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 16, "head_dim": 64, "state_size": 64, "n_groups": 2, "expand": 2},
    "deepseek_v2": {
        "kv_lora_rank": 128,
        "q_lora_rank": None,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "num_key_value_heads": 8,
        "first_k_dense_replace": 4,
        "rope_parameters": _PLAIN_ROPE,
    },
    "llama": {},
    "qwen3": {},
    "gemma3_text": _WINDOW | {"query_pre_attn_scalar": 64},
    "gpt_oss": _WINDOW
    | {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_parameters": _PLAIN_ROPE,
    },
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True},
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
}
_WITH_EXPERTS = ("gpt_oss", "qwen3_moe")
"""In bfloat16, tokens with nearly equal router scores get other experts than in transformers, so means say little."""
_SMALL_STEPS = ("llama", "gemma3_text", "gpt_oss", "qwen3_5_text", "deepseek_v2")
"""One per kind of stateful layer."""
_DRAFT = {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16} | {
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True}
}
"""Llama 3.2 1B, where it differs from the model above."""
_ADAPTER = "adapter"
_PROMPTS = [list(range(3, 3 + length)) for length in (5, 40, 130, 300)]


def everything(device: torch.device, say: Say) -> None:
    """The promises with all features on at once: same tokens as alone, and transformers' log probabilities."""
    torch.backends.cuda.matmul.allow_tf32 = False
    with tempfile.TemporaryDirectory() as name:
        folders = {family: Path(name, family) for family in _SMALL_STEPS}
        for dtype, families in (
            (torch.float32, _SMALL_STEPS),
            (torch.bfloat16, [each for each in _SMALL_STEPS if each not in _WITH_EXPERTS]),
        ):
            for family in families:
                if dtype == torch.float32:
                    _made(folders[family], family)
                tried(say, f"{family}, {dtype}: everything on", partial(_all_on, folders[family], dtype, device))


def _all_on(folder: Path, dtype: torch.dtype, device: torch.device) -> str:
    """Compares graphs, small chunks beside decodes, few blocks, prefix hits, draft tokens and a tier with requests
    alone in eager steps, then the answers' log probabilities with transformers'.
    """
    fixed: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch.")}
    fixed |= {"deterministic": True} if device.type == "cuda" else {}
    asked = [request(str(index), prompt, 24, seed=index, logprobs=0) for index, prompt in enumerate(_PROMPTS)]
    plain = _engine(folder, device, enforce_eager=True, enable_prefix_caching=False, **fixed)
    wanted = {each.id: run(plain, [each])[each.id].ids for each in asked}
    plain.shut_down()
    free_engine_memory()
    full = _engine(
        folder,
        device,
        warmup_seconds=4.0,
        max_num_batched_tokens=64,
        num_kv_blocks=30,
        kv_offload_memory=0.25,
        speculative_config=SpeculativeConfig(method="ngram"),
        **fixed,
    )
    for _ in range(3):  # the second finds prefixes and requests graphs, the third has them
        answers = run(full, asked)
    stats, backend = full.engine_stats, full.info.backend
    full.shut_down()
    if not stats.prefix_hits:
        raise ValueError("nothing hit")
    if device.type == "cuda" and not stats.captured_prompt_steps:
        raise ValueError("no step with a prompt was a graph's")
    if name := next((name for name in wanted if answers[name].ids != wanted[name]), None):
        raise ValueError(f"prompt {name}: {answers[name].ids} and not {wanted[name]}, alone")
    told = torch.tensor([each.logprob for one in asked for each in answers[one.id].logprobs])
    sequences = [(prompt + answers[str(index)].ids, len(prompt)) for index, prompt in enumerate(_PROMPTS)]
    wide = _by_transformers(folder, torch.float32, device, sequences)
    theirs = wide if dtype == torch.float32 else _by_transformers(folder, dtype, device, sequences)
    graphs = f"{stats.captured_prompt_steps} steps with prompts by graphs, {stats.preemptions} preemptions"
    return f"the same tokens as alone; {close(told, wide, theirs, dtype)}; {graphs}; {backend}"


def drafts(device: torch.device, say: Say) -> None:
    with tempfile.TemporaryDirectory() as name:
        tried(say, "a model that drafts, one guess more", partial(_guesses, Path(name, "drafts"), device))


def compare(device: torch.device, say: Say) -> None:
    """Each check runs once before any repeats."""
    torch.backends.cuda.matmul.allow_tf32 = False
    with tempfile.TemporaryDirectory() as name:
        folders = {family: Path(name, family) for family in FAMILIES}
        for family, folder in folders.items():
            tried(say, f"{family}: made", partial(_made, folder, family))
            tried(say, f"{family}, {torch.float32}", partial(_parity, folder, torch.float32, device))
        _features(folders["llama"], device, say)
        for family in _SMALL_STEPS:
            what = f"{family}: small steps with prompts in graphs"
            tried(say, what, partial(_small_steps, folders[family], device))
        for family in [family for family in FAMILIES if family not in _WITH_EXPERTS]:
            tried(say, f"{family}, {torch.bfloat16}", partial(_parity, folders[family], torch.bfloat16, device))


def _made(folder: Path, family: str) -> str:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **_SHAPE | FAMILIES[family]))
    model.save_pretrained(folder)
    save_adapter(folder / _ADAPTER, model, 8, targets=("q_proj", "down_proj"))
    return "random weights"


def _engine(folder: Path, device: torch.device, **options: Any) -> EngineCore:
    given = {"max_num_seqs": 16, "skip_tokenizer_init": True, "num_kv_blocks": 512, "warmup_seconds": KERNELS_ALONE}
    return EngineCore(EngineConfig(model=str(folder), device=device.type, **given | options))


def _run(folder: Path, device: torch.device, *, times: int = 1, **options: Any) -> dict[str, list[int]]:
    """Greedy tokens of all prompts together, in the last of `times` runs. With adapters, every other prompt has one."""
    engine = _engine(folder, device, **options)
    own = Adapter(_ADAPTER, "0" * 64, str(folder / _ADAPTER)) if options.get("enable_lora") else None
    for _ in range(times):
        asked = [
            request(str(index), prompt, 24, seed=index, adapter=own if index % 2 else None)
            for index, prompt in enumerate(_PROMPTS)
        ]
        found = {name: each.ids for name, each in at_once(engine, asked).items()}
    if times > 1 and not engine.engine_stats.prefix_hits:
        raise ValueError("nothing hit")
    engine.shut_down()
    return found


def _parity(folder: Path, dtype: torch.dtype, device: torch.device) -> str:
    engine = _engine(folder, device, dtype=str(dtype).removeprefix("torch."))
    asked = [request(str(index), prompt, 1, prompt_logprobs=0) for index, prompt in enumerate(_PROMPTS)]
    answers = run(engine, asked)
    told = [each.logprob for one in asked for each in answers[one.id].prompt_logprobs or () if each]
    wide = _by_transformers(folder, torch.float32, device)
    theirs = wide if dtype == torch.float32 else _by_transformers(folder, dtype, device)
    engine.shut_down()
    return f"{close(torch.tensor(told), wide, theirs, dtype)}; {engine.info.backend}"


def _by_transformers(
    folder: Path, dtype: torch.dtype, device: torch.device, sequences: Sequence[tuple[list[int], int]] = ()
) -> torch.Tensor:
    """transformers' log probabilities in float32: of `sequences` from their index on, by default of all prompts without
    their first tokens.
    """
    from transformers import AutoModelForCausalLM

    model, found = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval(), []
    with torch.inference_mode():
        for tokens, first in sequences or [(prompt, 1) for prompt in _PROMPTS]:
            ids = torch.tensor([tokens], device=device)
            logits = model(ids).logits[0, first - 1 : -1].float().log_softmax(-1)
            found.append(logits.gather(1, ids[0, first:, None]).squeeze(1))
    return torch.cat(found)


def _features(folder: Path, device: torch.device, say: Say) -> None:
    """A feature's tokens must equal the plain engine's. If bits may differ, it must only answer."""
    fixed = {"deterministic": True} if device.type == "cuda" else {}
    elsewhere = {"cpu_offload_gb": 1.0} if device.type == "cuda" else {}  # a CPU has no other memory
    wanted: dict[str, list[int]] = {}

    def plain() -> str:
        _engine(folder, device, **fixed).shut_down()  # compiles kernels for eager steps
        wanted.update(_run(folder, device, enforce_eager=True, **fixed))
        return "eager, deterministic"

    tried(say, "tokens to compare with", plain)
    draft = SpeculativeConfig(method="ngram")
    same: dict[str, dict[str, Any]] = {
        "decode graphs": {"warmup_seconds": 60.0},
        "prefix hits": {"times": 2},
        "few pages: preemption": {"num_kv_blocks": 36},
        "chunks of 32 tokens": {"max_num_batched_tokens": 32},
        "guesses": {"speculative_config": draft},
        "layers in the host's memory": elsewhere,
        "host memory as a tier": {"kv_offload_memory": 0.25},
    }
    for name, options in same.items():
        tried(say, name, partial(_equal, folder, device, fixed | options, wanted))
    tried(say, "adapters in graphs", partial(_adapted, folder, device, fixed, wanted))
    other: dict[str, dict[str, Any]] = {
        "FP8 pages": {"kv_cache_dtype": "fp8"},
        "8-bit pages": {"kv_cache_dtype": "int8"},
        "4-bit weights": {"quantization": "int4"},
        "8-bit weights": {"quantization": "int8"},
        "FP8 weights": {"quantization": "fp8"},
    }
    for name, options in other.items():
        tried(say, name, partial(_share, folder, device, options, wanted))


def _small_steps(folder: Path, device: torch.device) -> str:
    """Prompts run three times, in chunks mixed with decodes: the first requests graphs, the last has all. Compares
    tokens and step times with eager steps.
    """
    fixed = {"deterministic": True} if device.type == "cuda" else {}
    options = {"max_num_batched_tokens": 64, "enable_prefix_caching": False} | fixed
    found, spent = list[dict[str, list[int]]](), list[float]()
    captured, notes = 0, list[str]()
    for eager in (False, True):
        engine = _engine(folder, device, enforce_eager=eager, **options)
        for _ in range(3):
            asked = [request(str(index), prompt, 24, seed=index) for index, prompt in enumerate(_PROMPTS)]
            before, began = engine.engine_stats.steps, time.perf_counter()
            answers = {name: each.ids for name, each in at_once(engine, asked).items()}
            seconds = time.perf_counter() - began
        found.append(answers)
        spent.append(1000 * seconds / (engine.engine_stats.steps - before))
        if not eager:
            captured, notes = engine.engine_stats.captured_prompt_steps, [*engine.info.notes]
        engine.shut_down()
        free_engine_memory()
    if found[0] != found[1]:
        name = next(name for name in found[0] if found[0][name] != found[1][name])
        raise ValueError(f"prompt {name}: {found[0][name]} and not {found[1][name]}")
    if device.type == "cuda" and not captured:
        raise ValueError(f"no step with a prompt was a graph's; {notes}")
    return f"the same tokens; {captured} steps with prompts by graphs; {spent[0]:.2f} ms a step, eager {spent[1]:.2f}"


def _guesses(folder: Path, device: torch.device) -> str:
    """Costs of draft steps, measured at engine start without and with graphs, which are captured then."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = _SHAPE | (_DRAFT if device.type == "cuda" else {})
    with device:
        AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **shape), dtype=torch.bfloat16).save_pretrained(
            folder
        )
    asked = {"dtype": "bfloat16", "num_kv_blocks": 512, "max_num_seqs": 32, "skip_tokenizer_init": True}
    asked |= {"warmup_seconds": KERNELS_ALONE}
    draft, said = SpeculativeConfig(method="draft_model", model=str(folder), num_speculative_tokens=3), list[str]()
    for eager in (True, False):
        given: dict[str, Any] = asked | {"enforce_eager": eager, "speculative_config": draft}
        config = EngineConfig(model=str(folder), device=device.type, **given)
        worker = start_worker(config, folder, read_model_config(folder), lambda: None)
        assert worker.started_drafter is not None
        costs = dict(worker.started_drafter.step_costs)
        told = [f"{1000 * costs[count]:.2f} ms for {count}" for count in (1, 32)]
        said.append(f"{'without graphs' if eager else 'with graphs'} {', '.join(told)} at once")
        free_engine_memory()
    return "; ".join(said)


def _equal(folder: Path, device: torch.device, options: dict[str, Any], wanted: dict[str, list[int]]) -> str:
    found = _run(folder, device, **options)
    if found != wanted:
        name = next(name for name in wanted if found.get(name) != wanted[name])
        raise ValueError(f"prompt {name}: {found.get(name)} and not {wanted[name]}")
    return "the same tokens"


def _adapted(folder: Path, device: torch.device, fixed: dict[str, Any], plain: dict[str, list[int]]) -> str:
    """Compares with eager steps. Requests without an adapter must match the plain engine."""
    eager = _run(folder, device, enable_lora=True, enforce_eager=True, **fixed)
    if any((eager[name] == plain[name]) == bool(int(name) % 2) for name in plain):
        raise ValueError(f"{eager}, and without adapters {plain}")
    return _equal(folder, device, fixed | {"enable_lora": True, "warmup_seconds": 60.0}, eager)


def _share(folder: Path, device: torch.device, options: dict[str, Any], wanted: dict[str, list[int]]) -> str:
    found = _run(folder, device, **options)
    pairs = [pair for name in wanted for pair in zip(found[name], wanted[name], strict=True)]
    return f"{sum(a == b for a, b in pairs)} of {len(pairs)} tokens as in full precision"
