"""Tensor parallelism gives the tokens of one process, for every family and feature."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace as replace_struct
from transformers import AutoModelForCausalLM

from quire.engine.checkpoint.model_resolver import read_model_config
from quire.engine.common.config import DEMO_MODEL, EngineConfig
from quire.engine.common.errors import ConfigError
from quire.engine.common.request_params import PoolingParams
from quire.engine.common.types import EngineCoreRequest
from quire.engine.engine_core import EngineCore, free_engine_memory
from quire.engine.layers.shard import ModelShard
from quire.engine.lora.adapter_store import AdapterStore
from quire.engine.lora.target_modules import adaptable_modules
from quire.engine.models.decoder import Decoder
from quire.engine.text.grammar_compiler import json_grammar
from quire.engine.worker import device_memory
from quire.engine.worker.device_plan import choose_device_plan
from quire.engine.worker.loading.model.loaded_model import ModelPart
from quire.engine.worker.loading.model_loader import load_model
from quire.engine.worker.ranks.spmd import SpmdRunner
from quire.kernels.cpu.backend import CpuBackend
from quire.kernels.reference import ReferenceBackend
from tests.adapters import ALL, save_adapter
from tests.engine.harness import Answer, request, run
from tests.engine.ranks import thread_ranks
from tests.engine.test_heads import METHODS, made_head
from tests.engine.test_speculation import always
from tests.gguf_models import write_gguf
from tests.quantized_models import (
    awq,
    compressed,
    compressed_config,
    float8,
    gptq,
    modelopt_nvfp4,
    mxfp8,
    quantize_checkpoint,
)
from tests.tiny_encoders import save_tiny_encoder
from tests.tiny_models import VOCAB, save_tiny_model
from tests.tiny_mtp import save_tiny_mtp

__all__ = ["thread_ranks"]
MISSING = CpuBackend().missing_reason
pytestmark = [
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
    pytest.mark.usefixtures("thread_ranks", "one_thread"),
]
BASE = {"dtype": "float32", "attention_backend": "cpu", "threads": 4}
SMALL = {"num_kv_blocks": 12, "max_model_len": 128, "max_num_batched_tokens": 24, "max_num_seqs": 8}
SMALL |= {"snapshot_tokens": 16}
"""Prompts come in chunks, sequences are preempted, and short prompts leave snapshots of large states."""


SHAPES = ["llama", "llama-tied-biased", "qwen3", "gemma2", "gemma3", "phi3", "gptj", "gpt2", "bloom", "granite_swa"]
SHAPES += ["hunyuan_v1_dense", "apertus", "cohere", "falcon-newer", "lfm2", "qwen3_5"]
SHAPES += ["gpt_oss", "mixtral", "qwen2-moe", "glm4_moe", "dots1", "ernie4_5_moe", "granitemoeshared", "hunyuan_v1_moe"]
SHAPES += ["phimoe", "lfm2_moe", "llama4", "qwen3-next", "deepseek_v2-lite", "deepseek_v3", "deepseek_v32"]
SHAPES += ["kimi_linear"]
SHAPES += [
    "mamba2",
    "falcon_h1",
    "nemotron_h",
    "nemotron_h-latent",
    "lfm3",
    "gemma4",
    "gemma4-small",
    "gemma4-moe",
    "mamba",
    "jamba",
    "zamba2-blocks",
]
"""More key-value heads than ranks, as many, and fewer."""


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def engine(path: Path | str, ranks: int, make_drafter: Any = None, **settings: Any) -> EngineCore:
    config = EngineConfig(model=str(path), tensor_parallel_size=ranks, **BASE | settings)
    return EngineCore(config, make_drafter=make_drafter)


def prompts(seed: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randint(3, VOCAB, (32,), generator=generator).tolist()
    own = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in (1, 9, 40, 18)]
    return [*own, shared + own[1], shared + own[3]]


def asked() -> list[EngineCoreRequest]:
    kinds: list[dict[str, Any]] = [
        {"logprobs": 2},
        {"temperature": 0.9, "logprobs": 0, "top_p": 0.9},
        {"prompt_logprobs": 1, "logprobs": 1},
        {"temperature": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "logprobs": 0},
        {"min_tokens": 3, "logprobs": 0},
        {"temperature": 0.7, "top_k": 20, "logprobs": 3},
    ]
    together = zip(prompts(), kinds, strict=True)
    return [request(str(i), ids, seed=i, max_tokens=20, **kind) for i, (ids, kind) in enumerate(together)]


def numbers(answer: Answer) -> list[float]:
    listed = [*answer.logprobs, *[each for each in answer.prompt_logprobs or [] if each is not None]]
    return [number for each in listed for number in (each.logprob, *[pair[1] for pair in each.top])]


WITHIN = 1e-4
"""Allowed difference of float32 log probabilities if ranks sum in another order; 5.3e-5 was seen."""


def assert_same(found: dict[str, Answer], expected: dict[str, Answer], within: float = WITHIN) -> None:
    assert found.keys() == expected.keys()
    for name, answer in expected.items():
        assert found[name].ids == answer.ids, name
        assert numbers(found[name]) == pytest.approx(numbers(answer), abs=within, rel=1e-6), name
        assert found[name].finish_reason == answer.finish_reason


def assert_same_alone(divided: EngineCore, found: dict[str, Answer]) -> None:
    """With one number of ranks, a request alone and after a cached prefix has the bits of `found`, where all ran at
    once.
    """
    for each in asked():
        divided.reset_prefix_cache()
        (alone,) = run(divided, [each]).values()
        assert (alone.ids, alone.logprobs) == (found[each.id].ids, found[each.id].logprobs)
    for name, again in run(divided, asked()[4:]).items():
        assert again.cached_tokens > 0, name
        assert (again.ids, again.logprobs) == (found[name].ids, found[name].logprobs)


@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", SHAPES)
def test_tensor_parallel_tokens_equal_single_process(family: str, ranks: int, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, family)
    expected = run(engine(path, 1, **SMALL), asked())
    divided = engine(path, ranks, **SMALL)
    answers = run(divided, asked())
    assert_same(answers, expected)
    assert divided.engine_stats.preemptions > 0
    assert_same_alone(divided, answers)


QUANTIZED: dict[str, Any] = {
    "gptq": (gptq(4, 32, symmetric=False), {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}),
    "awq": (awq(32), {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
    "packed": (
        compressed(4, 32, symmetric=True),
        compressed_config("pack-quantized", 4, 32, strategy="group", symmetric=True, actorder=None),
    ),
    "float8": (
        float8("block", block=(32, 32)),
        compressed_config("float-quantized", 8, 0, kind="float", strategy="block", block_structure=[32, 32]),
    ),
    "nvfp4": (modelopt_nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "mxfp8": (mxfp8, {"quant_method": "modelopt", "quant_algo": "MXFP8"}),
}
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
"""Each rank's part has whole quantization groups."""
WAYS = [*QUANTIZED, "Q4_K-Q6_K", "Q4_0-Q8_0", "int8", "int4", "fp8"]
"""Quantized checkpoints, GGUF files with two types, and quantization at load."""


def quantized_model(way: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """A model and the settings with which an engine serves it in this way."""
    wide = WIDE | ({"hidden_size": 256, "intermediate_size": 1024} if "_K" in way else {})
    path = save_tiny_model(folder / "model", "llama", **wide)
    if way in QUANTIZED:
        return quantize_checkpoint(path, folder / "few", *QUANTIZED[way]), {}
    if "-" in way:
        kinds = way.split("-")
        return write_gguf(path, folder / "model.gguf", lambda name: kinds["o_proj" in name or "down" in name]), {}
    return path, {"quantization": way}


@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_tensor_parallel_quantized_weights_equal_single_process(
    way: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without integer products, which round x to 8 bits: there the last bit of a sum can change a code."""
    monkeypatch.setattr(CpuBackend, "pack_quantized", ReferenceBackend.pack_quantized)
    monkeypatch.setattr(CpuBackend, "pack_quantized_embedding", ReferenceBackend.pack_quantized_embedding)
    path, settings = quantized_model(way, tmp_path)
    assert_same(run(engine(path, ranks, **settings), asked()), run(engine(path, 1, **settings), asked()))


@pytest.mark.few(1)
@pytest.mark.parametrize("way", ["int8", "int4", "fp8"])
def test_tensor_parallel_integer_products_do_not_depend_on_batch(way: str) -> None:
    """Close to a single process."""
    texts = [[435, 1029, 261], [2497, 16, 371, 2661], list(range(300, 340))]
    requests = [request(str(i), ids, max_tokens=12, logprobs=0) for i, ids in enumerate(texts)]
    settings: dict[str, Any] = {"quantization": way, "max_model_len": 128, "num_kv_blocks": 32}
    divided = engine(DEMO_MODEL, 2, **settings)
    answers, expected = run(divided, requests), run(engine(DEMO_MODEL, 1, **settings), requests)
    for each in requests:
        assert numbers(answers[each.id])[0] == pytest.approx(numbers(expected[each.id])[0], abs=0.05)
        divided.reset_prefix_cache()
        (alone,) = run(divided, [each]).values()
        assert (alone.ids, alone.logprobs) == (answers[each.id].ids, answers[each.id].logprobs)


def test_indivisible_quantization_groups_are_rejected(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model", "llama")  # down_proj has 160 inputs, 80 per rank
    path = quantize_checkpoint(path, tmp_path / "few", *QUANTIZED["gptq"])
    with pytest.raises(ConfigError, match=r"tensor_parallel_size: model.layers.0.mlp.down_proj cannot be divided: its"):
        engine(path, 2)


def asked_with_adapters(tmp_path: Path) -> tuple[Path, list[EngineCoreRequest]]:
    """A model and requests, three in four with an adapter: two ranks, and an adapter of embedding and head."""
    path = save_tiny_model(tmp_path / "model", "llama-tied-biased")
    base = AutoModelForCausalLM.from_pretrained(path)
    folders = [save_adapter(tmp_path / f"a{rank}", base, rank, seed=rank) for rank in (3, 16)]
    both = (*ALL, "embed_tokens", "lm_head")
    folders.append(save_adapter(tmp_path / "head", base, 8, targets=both, seed=8, size=0.3))
    (tmp_path / "spool").mkdir()
    store = AdapterStore(tmp_path / "spool", adaptable_modules(read_model_config(path)), 64)
    adapters = [None, *(store.add_adapter(folder.name, str(folder)) for folder in folders)]
    return path, [replace_struct(each, adapter=adapters[index % len(adapters)]) for index, each in enumerate(asked())]


def test_tensor_parallel_lora_tokens_equal_single_process(tmp_path: Path) -> None:
    path, requests = asked_with_adapters(tmp_path)
    lora: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 64}
    expected = run(engine(path, 1, **lora), requests)
    for ranks in (2, 4):
        assert_same(run(engine(path, ranks, **lora), requests), expected)


@pytest.mark.few(2)
@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle", "eagle3", "medusa", "mtp", "mtp, ngram"])
def test_tensor_parallel_drafts_do_not_change_tokens(method: str, tmp_path: Path) -> None:
    """Every rank holds the whole draft heads and computes the inputs that they ask for; a draft model runs on the first
    rank.
    """
    method, _, lookup = method.partition(", ")
    own = method == "mtp"
    path = save_tiny_mtp(tmp_path / "model", "qwen3_5") if own else save_tiny_model(tmp_path / "model", "llama")
    speculative_config: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    if lookup:
        speculative_config |= {"lookup": lookup, "num_lookup_tokens": 4}
    if method == "draft_model":
        speculative_config["model"] = str(save_tiny_model(tmp_path / "draft", "llama", num_hidden_layers=1))
    elif method in METHODS:
        speculative_config["model"] = str(made_head(tmp_path / "head", method)[0])
    expected = run(engine(path, 1, num_kv_blocks=96, max_model_len=128), asked())
    make = None if method == "ngram" else always
    guessing = engine(path, 2, make, num_kv_blocks=96, max_model_len=128, speculative_config=speculative_config)
    assert_same(run(guessing, asked()), expected)
    assert method == "ngram" or guessing.engine_stats.drafts > 0


@pytest.mark.parametrize("kind", ["mean", "last"])
def test_tensor_parallel_vectors_equal_single_process(kind: str, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model", "qwen3")
    requests = [
        EngineCoreRequest(id=str(i), prompt_ids=ids, params=PoolingParams(), seed=0) for i, ids in enumerate(prompts())
    ]

    def vectors(ranks: int) -> dict[str, np.ndarray]:
        made, found = engine(path, ranks, runner="pooling", pooling_type=kind), {}
        for each in requests:
            made.add_request(each)
        while made.has_work:
            found |= {each.id: np.frombuffer(each.vector, "<f4") for each in made.step() if each.vector is not None}
        return found

    one, two = vectors(1), vectors(2)
    assert one.keys() == two.keys() == {each.id for each in requests}
    for name, vector in one.items():
        np.testing.assert_allclose(two[name], vector, atol=1e-5)


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_tensor_parallel_grammars_do_not_depend_on_batch(dtype: str, kv: str) -> None:
    """In bfloat16 the ranks' parts are rounded once more, so tokens may differ from one process, but not with the
    batch.
    """
    params: dict[str, Any] = {"max_tokens": 24, "temperature": 0.8, "logprobs": 1, "ignore_eos": False}
    texts = [[435, 1029, 261], [2497, 16, 371, 2661], list(range(300, 340))]
    requests = [request(str(i), ids, seed=i, **params) for i, ids in enumerate(texts)]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    requests.append(request("json", texts[0], seed=9, **params, grammar=json_grammar(schema)))
    settings: dict[str, Any] = {"dtype": dtype, "kv_cache_dtype": kv, "max_model_len": 256, "num_kv_blocks": 64}
    divided = engine(DEMO_MODEL, 2, **settings)
    answers = run(divided, requests)
    if dtype == "float32" and kv == "auto":
        assert_same(answers, run(engine(DEMO_MODEL, 1, **settings), requests))
    for each in requests:
        divided.reset_prefix_cache()
        (alone,) = run(divided, [each]).values()
        assert (alone.ids, alone.logprobs) == (answers[each.id].ids, answers[each.id].logprobs)


def test_each_rank_loads_only_local_shard(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama", vocab_size=3001, num_hidden_layers=6)
    config = EngineConfig(model=str(path), **BASE)
    model = read_model_config(path)
    chosen = choose_device_plan(config, model)
    whole = load_model(config, path, model, chosen, lambda: None)
    parts = [
        load_model(config, path, model, chosen, lambda: None, part=ModelPart(ModelShard(rank, 4))) for rank in range(4)
    ]
    norms = sum(
        4 * math.prod(each.shape) for each in whole.expected_weights.parameter_table.values() if len(each.shape) == 1
    )
    twice = 6 * 2 * (2 * 16 * 64) * 4  # keys and values of two heads on four ranks
    assert sum(each.read_bytes for each in parts) == whole.read_bytes + 3 * norms + twice
    assert max(each.read_bytes for each in parts) < 0.3 * whole.read_bytes
    pages = [
        sum(tensor.total_bytes for layer in each.model.block_tensor_specs(1) for tensor in layer)
        for each in (whole, parts[0])
    ]
    assert pages[0] == 2 * pages[1]


@pytest.mark.parametrize(
    ("family", "ranks", "wrong"),
    [
        ("llama", 3, "the model's 4 heads cannot be divided among 3 ranks"),
        ("llama", 8, "the model's 4 heads cannot be divided among 8 ranks"),
        ("olmo2", 2, "the norm of all heads' queries and keys cannot be divided among ranks"),
    ],
)
def test_indivisible_models_are_rejected(family: str, ranks: int, wrong: str, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, family)
    with pytest.raises(ConfigError, match=f"tensor_parallel_size: {wrong}") as raised:
        engine(path, ranks)
    assert raised.value.param == "tensor_parallel_size"


def test_tensor_parallel_rejects_unsupported_settings(tmp_path: Path) -> None:
    odd = save_tiny_model(tmp_path / "odd", "llama", intermediate_size=162)
    with pytest.raises(ConfigError, match="tensor_parallel_size: the model's intermediate_size 162 cannot be divided"):
        engine(odd, 4)
    heads = save_tiny_model(tmp_path / "heads", "llama", hidden_size=96, num_attention_heads=12, num_key_value_heads=6)
    with pytest.raises(ConfigError, match="tensor_parallel_size: 4 ranks can neither divide the model's 6 key-value"):
        engine(heads, 4)
    with pytest.raises(ConfigError, match="tensor_parallel_size: weights given as tensors"):
        EngineCore(EngineConfig(model=str(odd), tensor_parallel_size=2, **BASE), tensors=iter([]))
    experts = save_tiny_model(tmp_path / "experts", "qwen2-moe", moe_intermediate_size=50)
    with pytest.raises(
        ConfigError, match="tensor_parallel_size: the model's experts' width 50 cannot be divided among 4"
    ):
        engine(experts, 4)
    with pytest.raises(ConfigError, match="kv_offload_memory: blocks of several ranks") as found:
        engine(odd, 2, kv_offload_memory=1)
    assert found.value.param == "kv_offload_memory"
    encoder = save_tiny_encoder(tmp_path / "encoder", "bert")
    with pytest.raises(ConfigError, match="tensor_parallel_size: encoders run in one process"):
        engine(encoder, 2)


def test_out_of_memory_on_rank_raises_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error must reach the caller, not only the rank's standard error."""
    plain = device_memory.allocate_kv_blocks

    def allocated(model: Decoder, blocks: int) -> list[torch.Tensor]:
        if model.shard.rank:
            raise torch.OutOfMemoryError("out of memory")
        return plain(model, blocks)

    monkeypatch.setattr(device_memory, "allocate_kv_blocks", allocated)
    path = save_tiny_model(tmp_path, "llama")
    wanted = r"kv_cache_memory: out of memory for 20 blocks of KV cache\. Lower it, or --max-model-len \(rank 1 of 2\)"
    with pytest.raises(ConfigError, match=wanted):
        engine(path, 2, num_kv_blocks=20)


def test_ranks_end_when_engine_is_freed(tmp_path: Path) -> None:
    made = engine(save_tiny_model(tmp_path, "llama"), 4)
    assert isinstance(made.executor, SpmdRunner)
    running = [process._thread for process in made.executor._ranks._processes]
    assert all(each.is_alive() for each in running)
    del made
    free_engine_memory()
    assert not any(each.is_alive() for each in running)
