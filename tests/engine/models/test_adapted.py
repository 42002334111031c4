"""Models computed by transformers' own classes: when a class is chosen, what is rejected, and batch invariance."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from quire.engine.checkpoint.config_reader import explain_unsupported_family
from quire.engine.checkpoint.model_resolver import read_model_config
from quire.engine.checkpoint.sizes.model_sizes import read_model_sizes
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError, ModelError
from quire.engine.common.types import EngineCoreRequest
from quire.engine.engine_core import EngineCore
from tests.engine.harness import Answer, request, run
from tests.engine.test_speculation import always
from tests.quantized_models import Packer, float8, gptq, modelopt_nvfp4, quantize_checkpoint
from tests.tiny_classes import save_tiny_class
from tests.tiny_models import VOCAB, save_tiny_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from quire.engine.models.transformers_backend.interface import MaskFunction

FLOATS = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"all": {"targets": ["Linear"], "weights": FLOATS}},
}
LENGTHS = (3, 20, 45, 61)


@pytest.fixture(scope="module")
def laguna(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A MoE without a family file."""
    path = tmp_path_factory.mktemp("laguna")
    save_tiny_class(path, "laguna")
    return str(path)


def engine_of(path: str | Path, make_drafter: Any = None, **options: Any) -> EngineCore:
    config = EngineConfig(model=str(path), **{"num_kv_blocks": 64, "max_num_batched_tokens": 24} | options)
    return EngineCore(config, make_drafter=make_drafter)


def requests(**params: object) -> list[EngineCoreRequest]:
    generator = torch.Generator().manual_seed(11)
    prompts = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]
    return [request(str(i), prompt, **{"max_tokens": 12} | params) for i, prompt in enumerate(prompts)]


def alone(engine: EngineCore, **params: object) -> dict[str, Answer]:
    return {each.id: run(engine, [each])[each.id] for each in requests(**params)}


def test_transformers_class_is_used_and_noted_without_family_file(laguna: str, tmp_path: Path) -> None:
    engine = engine_of(laguna)
    assert engine.info.notes[0].startswith("transformers' LagunaForCausalLM computes it, with Quire's KV cache")
    assert "LagunaForCausalLM of transformers" in engine.info.backend, "its fingerprint is another"
    assert engine.info.deterministic
    native_engine = engine_of(save_tiny_model(tmp_path, "qwen3"))
    assert not any("transformers" in note for note in native_engine.info.notes)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("gemma2", {}),
        ("gpt_oss", {}),
        ("granite_swa", {}),
        ("gpt2", {}),
        ("phi3-longrope", {"max_position_embeddings": 1024}),
    ],
)
def test_transformers_class_tokens_equal_native_family(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    """Covers windows, soft caps, sinks, a table of positions, and RoPE factors that the served context chooses."""
    path = save_tiny_model(tmp_path, family, **overrides)
    by_file, by_class = engine_of(path), engine_of(path, model_impl="transformers")
    assert "transformers' " in by_class.info.notes[0]
    assert by_class.info.page_groups == by_file.info.page_groups
    new_requests = requests()
    expected, actual = run(by_file, new_requests), run(by_class, new_requests)
    assert {name: answer.ids for name, answer in actual.items()} == {name: each.ids for name, each in expected.items()}


def test_model_impl_quire_rejects_family_without_file(laguna: str) -> None:
    with pytest.raises(ModelError, match="model_impl: Quire has no implementation of a laguna; it has apertus"):
        engine_of(laguna, model_impl="quire")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "bfloat16"},
        {"quantization": "int8"},
        {"quantization": "int4"},
        {"kv_cache_dtype": "int8"},
        {"kv_offload_memory": 0.01},
        {"speculative_config": {"method": "ngram"}},
    ],
    ids=str,
)
def test_transformers_class_logprobs_do_not_depend_on_batch(options: dict[str, Any], laguna: str) -> None:
    """Neither do chunks, few KV blocks with preemptions, or cached prefixes."""
    params = {"temperature": 1.0, "logprobs": 2}
    roomy = engine_of(laguna, max_num_batched_tokens=256, **options)
    expected = alone(roomy, salt="alone", **params)
    assert run(roomy, requests(**params)) == expected
    narrow = engine_of(laguna, num_kv_blocks=10, max_model_len=80, **options)
    assert {name: each.ids for name, each in run(narrow, requests(**params)).items()} == {
        name: each.ids for name, each in expected.items()
    }
    assert narrow.engine_stats.preemptions
    again = run(roomy, requests(**params))
    assert again["3"].cached_tokens
    assert {name: each.logprobs for name, each in again.items()} == {n: each.logprobs for n, each in expected.items()}


def test_int8_transformers_class_is_smaller_and_close(laguna: str) -> None:
    whole, few = engine_of(laguna), engine_of(laguna, quantization="int8")
    assert few.info.weight_bytes < whole.info.weight_bytes / 2
    probe_requests = requests(max_tokens=1, prompt_logprobs=0)[-1:]
    pairs = zip(*(run(each, probe_requests)["3"].prompt_logprobs or [] for each in (whole, few)), strict=True)
    errors = [abs(a.logprob - b.logprob) for a, b in pairs if a is not None and b is not None]
    assert 0 < sum(errors) / len(errors) < 0.1


def test_replacement_weights_of_transformers_class_are_checked(laguna: str, tmp_path: Path) -> None:
    """The experts are stored one by one, and the class's rules fuse them."""
    shutil.copytree(laguna, tmp_path / "b")
    tensors = {name: tensor * 0.9 for name, tensor in load_file(tmp_path / "b" / "model.safetensors").items()}
    save_file(tensors, tmp_path / "b" / "model.safetensors", {"format": "pt"})
    engine, other = engine_of(laguna), EngineConfig(model=laguna, weights=str(tmp_path / "b"), num_kv_blocks=64)
    engine.check_replacement_weights(other)
    probe_requests = requests(max_tokens=1, logprobs=1)[-1:]
    assert run(EngineCore(other), probe_requests)["3"].logprobs != run(engine, probe_requests)["3"].logprobs
    experts = next(name for name in tensors if "experts" in name)
    save_file(tensors | {experts: tensors[experts][:-1].contiguous()}, tmp_path / "b" / "model.safetensors")
    with pytest.raises(ModelError):
        engine.check_replacement_weights(other)


@pytest.mark.parametrize(
    ("pack", "config", "bound"),
    [
        (gptq(4, 32, symmetric=True), {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}, 0.15),
        (float8("tensor"), {**COMPRESSED, "ignore": ["lm_head"]}, 1e-3),
        (modelopt_nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head*"]}, 0.15),
    ],
    ids=["gptq", "fp8", "nvfp4"],
)
def test_quantized_checkpoint_in_transformers_class_equals_dense(
    pack: Packer, config: dict[str, Any], bound: float, tmp_path: Path
) -> None:
    dense = tmp_path / "dense"
    dense.mkdir()
    save_tiny_class(dense, "olmo")
    packed = quantize_checkpoint(dense, tmp_path / "packed", pack, config)
    probe_requests = requests(max_tokens=1, prompt_logprobs=0)[-1:]
    pairs = zip(
        *(run(engine_of(each), probe_requests)["3"].prompt_logprobs or [] for each in (dense, packed)), strict=True
    )
    assert max(abs(a.logprob - b.logprob) for a, b in pairs if a is not None and b is not None) < bound


@pytest.mark.parametrize(
    "options",
    [
        {"pipeline_parallel_size": 2},
        {"runner": "pooling"},
        {"speculative_config": {"method": "eagle", "model": "x"}},
    ],
    ids=lambda options: next(iter(options)),
)
def test_option_unsupported_by_transformers_class_is_rejected(options: dict[str, Any], laguna: str) -> None:
    field = next(iter(options))
    with pytest.raises(ConfigError, match=f"{field}: a laguna is computed by transformers' class") as error:
        engine_of(laguna, **options)
    assert error.value.param == field


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [True, False])
def test_transformers_class_works_as_draft_model_and_target(drafts: bool, laguna: str, tmp_path: Path) -> None:
    """With a native model as the other one. No token changes, and a model's drafts for itself are accepted."""
    path = save_tiny_model(tmp_path, "llama")
    served, guesses = (path, laguna) if drafts else (laguna, path)
    for draft in (guesses, served):
        speculative_config: dict[str, Any] = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
        engine = engine_of(served, always, max_num_batched_tokens=256, speculative_config=speculative_config)
        assert run(engine, requests(logprobs=1)) == run(engine_of(served), requests(logprobs=1))
        sampled, alone = run(engine, requests(temperature=1.0)), run(engine_of(served), requests(temperature=1.0))
        assert {name: each.ids for name, each in sampled.items()} == {name: each.ids for name, each in alone.items()}
    assert sum(engine.engine_stats.accepted_drafts) > 20


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("rwkv", "keeps a state other than keys and values"),
        ("openai-gpt", "does not attend through transformers' attention interface"),
        ("doge", "changes its mask"),
    ],
)
def test_unsupported_transformers_class_is_rejected_with_reason(kind: str, reason: str, tmp_path: Path) -> None:
    save_tiny_class(tmp_path, kind)
    raw_config = json.loads((tmp_path / "config.json").read_text())
    assert explain_unsupported_family(raw_config) is not None
    with pytest.raises(ModelError, match=f"Quire does not serve {kind} models"):
        read_model_config(tmp_path)
    with pytest.raises(ModelError, match=reason):
        engine_of(tmp_path, model_impl="transformers")


def test_chunked_attention_class_is_served_within_one_chunk(tmp_path: Path) -> None:
    """Llama 4's class: tokens of one chunk see all tokens before them."""
    save_tiny_class(tmp_path, "llama4_text")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"attention_chunk_size": 64}))
    with pytest.raises(ModelError, match="neither causal nor a sliding window"):
        engine_of(tmp_path, model_impl="transformers")
    by_class = engine_of(tmp_path, model_impl="transformers", max_model_len=64)
    assert run(by_class, requests(max_tokens=3))["1"].ids


@pytest.mark.parametrize(
    ("value", "said"), [(float("nan"), "does not make model.embed_tokens"), ("wide", "expected float, got str")]
)
def test_config_value_that_breaks_class_raises_one_line_error(value: object, said: str, tmp_path: Path) -> None:
    save_tiny_class(tmp_path, "gemma4_unified_text")
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"initializer_range": value}))
    with pytest.raises(ModelError, match=f"^model: [^\n]*{said}[^\n]*$"):
        engine_of(tmp_path)


def test_encoder_decoder_config_is_rejected(tmp_path: Path) -> None:
    save_tiny_class(tmp_path, "bart")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"is_encoder_decoder": True}))
    with pytest.raises(ModelError, match="it is an encoder-decoder"):
        read_model_config(tmp_path)


def test_unknown_family_is_rejected_without_running_remote_code(tmp_path: Path) -> None:
    config = {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "own.Own"}, "vocab_size": 9, "hidden_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"neither Quire nor a class of transformers .* its own code is not"):
        read_model_config(tmp_path)
    with pytest.raises(ModelError, match="'own' is known neither to Quire nor to the transformers installed here"):
        engine_of(tmp_path, model_impl="transformers")


def test_class_that_ignores_position_ids_is_rejected(laguna: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe at startup detects it: requests in one batch would not have their own positions."""
    from quire.engine.models.transformers_backend import decoder

    def counting(body: nn.Module, ids: Tensor, positions: Tensor) -> dict[str, Any]:
        return {"input_ids": ids, "position_ids": torch.arange(ids.shape[1])[None], "use_cache": False}

    monkeypatch.setattr(decoder, "body_forward_kwargs", counting)
    with pytest.raises(ModelError, match="it ignores the positions it is given"):
        engine_of(laguna)


def test_class_with_raw_pytorch_matmul_is_noted_batch_dependent(tmp_path: Path) -> None:
    save_tiny_class(tmp_path, "dbrx")
    engine = engine_of(tmp_path)
    assert not engine.info.deterministic
    assert any(note.startswith("batch-dependent: transformers' DbrxForCausalLM") for note in engine.info.notes)
    with pytest.raises(ConfigError, match="deterministic: transformers' DbrxForCausalLM"):
        engine_of(tmp_path, deterministic=True)


def test_probe_attention_finds_window_and_heads_per_layer(tmp_path: Path) -> None:
    from quire.engine.models.transformers_backend.probe import probe_attention

    save_tiny_class(tmp_path, "gemma4_text")
    calls = probe_attention(model_at(tmp_path), 512)
    sliding, full = (24, 16, 2), (None, 32, 2)
    actual = [(each.window, each.head_dim, each.num_kv_heads) for each in calls]
    assert actual == [sliding, sliding, full, sliding, full]


def test_model_sizes_of_mla_class_equal_probed_kv_values(tmp_path: Path) -> None:
    from quire.engine.models.transformers_backend.probe import probe_attention

    save_tiny_class(tmp_path, "axk1")
    sizes = read_model_sizes(json.loads((tmp_path / "config.json").read_text()))
    calls = probe_attention(model_at(tmp_path), 512)
    assert sizes.kv_values_per_token == sum(
        2 * each.num_kv_heads * max(each.head_dim, each.value_dim) for each in calls
    )
    assert sizes.notes[0].startswith("transformers' class computes it")
    assert not sizes.unsupported_reasons


def model_at(path: Path) -> PreTrainedModel:
    from quire.engine.models.transformers_backend.model_builder import build_model

    return build_model(json.loads((path / "config.json").read_text()), torch.float32)


def causal_mask(batch: int, head: int, query: Tensor, key: Tensor) -> Tensor:
    return key <= query


def test_window_from_mask_returns_window_or_none() -> None:
    from quire.engine.models.transformers_backend.probe import window_from_mask

    def windowed(batch: int, head: int, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key > query - 24)

    assert window_from_mask(causal_mask, 512) is None
    assert window_from_mask(windowed, 512) == 24
    assert window_from_mask(windowed, 20) is None


@pytest.mark.parametrize(
    "mask",
    [
        lambda batch, head, query, key: (key <= query) & (key // 64 == query // 64),
        lambda batch, head, query, key: key >= 0,
        lambda batch, head, query, key: (key <= query) & (key != 5),
    ],
    ids=["chunks", "both", "hole"],
)
def test_window_from_mask_rejects_other_masks(mask: MaskFunction) -> None:
    from quire.engine.models.transformers_backend.probe import window_from_mask

    with pytest.raises(ModelError, match="neither causal nor a sliding window"):
        window_from_mask(mask, 512)
