"""Models computed by transformers' own classes: when a class is chosen, what is rejected, and batch invariance."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from quire.engine.checkpoint.config_reader import explain_unsupported_family
from quire.engine.checkpoint.model_resolver import read_model_config
from quire.engine.checkpoint.sizes.model_sizes import read_model_sizes
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError, ModelError
from quire.engine.common.types import EngineCoreRequest
from quire.engine.engine_core import EngineCore
from quire.engine.models.transformers_backend.interface import MaskFunction
from quire.engine.models.transformers_backend.model_builder import build_model
from quire.engine.models.transformers_backend.probe import probe_attention, window_from_mask
from tests.engine.harness import Answer, request, run
from tests.engine.test_speculation import always
from tests.quantized_models import Packer, float8, gptq, quantize_checkpoint
from tests.tiny_classes import save_tiny_class
from tests.tiny_models import VOCAB, save_tiny_model

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


def test_the_class_is_chosen_where_there_is_no_file_and_says_so(laguna: str, tmp_path: Path) -> None:
    engine = engine_of(laguna)
    assert engine.info.notes[0].startswith("transformers' LagunaForCausalLM computes it, on Quire's pages")
    assert "LagunaForCausalLM of transformers" in engine.info.backend, "its fingerprint is another"
    assert engine.info.deterministic
    ours = engine_of(save_tiny_model(tmp_path, "qwen3"))
    assert not any("transformers" in note for note in ours.info.notes)


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
def test_a_file_and_a_class_give_the_same_tokens(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    """Covers windows, soft caps, sinks, a table of positions, and RoPE factors that the served context chooses."""
    path = save_tiny_model(tmp_path, family, **overrides)
    by_file, by_class = engine_of(path), engine_of(path, model_impl="transformers")
    assert "transformers' " in by_class.info.notes[0]
    assert by_class.info.page_groups == by_file.info.page_groups
    asked = requests()
    wanted, found = run(by_file, asked), run(by_class, asked)
    assert {name: answer.ids for name, answer in found.items()} == {name: each.ids for name, each in wanted.items()}


def test_a_family_without_a_file_is_refused_where_one_is_asked_for(laguna: str) -> None:
    with pytest.raises(ModelError, match="model_impl: Quire has no implementation of a laguna; it has apertus"):
        engine_of(laguna, model_impl="quire")


@pytest.mark.few(2)
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
def test_no_batch_changes_a_bit(options: dict[str, Any], laguna: str) -> None:
    """Neither do chunks, few KV blocks with preemptions, or cached prefixes."""
    asked = {"temperature": 1.0, "logprobs": 2}
    roomy = engine_of(laguna, max_num_batched_tokens=256, **options)
    wanted = alone(roomy, salt="alone", **asked)
    assert run(roomy, requests(**asked)) == wanted
    narrow = engine_of(laguna, num_kv_blocks=10, max_model_len=80, **options)
    assert {name: each.ids for name, each in run(narrow, requests(**asked)).items()} == {
        name: each.ids for name, each in wanted.items()
    }
    assert narrow.engine_stats.preemptions
    again = run(roomy, requests(**asked))
    assert again["3"].cached_tokens
    assert {name: each.logprobs for name, each in again.items()} == {n: each.logprobs for n, each in wanted.items()}


def test_few_bits_make_the_weights_smaller_and_stay_close(laguna: str) -> None:
    whole, few = engine_of(laguna), engine_of(laguna, quantization="int8")
    assert few.info.weight_bytes < whole.info.weight_bytes / 2
    asked = requests(max_tokens=1, prompt_logprobs=0)[-1:]
    pairs = zip(*(run(each, asked)["3"].prompt_logprobs or [] for each in (whole, few)), strict=True)
    errors = [abs(a.logprob - b.logprob) for a, b in pairs if a is not None and b is not None]
    assert 0 < sum(errors) / len(errors) < 0.1


def test_other_weights_are_checked_and_take_the_place_of_these(laguna: str, tmp_path: Path) -> None:
    """The experts are stored one by one, and the class's rules fuse them."""
    shutil.copytree(laguna, tmp_path / "b")
    tensors = {name: tensor * 0.9 for name, tensor in load_file(tmp_path / "b" / "model.safetensors").items()}
    save_file(tensors, tmp_path / "b" / "model.safetensors", {"format": "pt"})
    engine, other = engine_of(laguna), EngineConfig(model=laguna, weights=str(tmp_path / "b"), num_kv_blocks=64)
    engine.check_replacement_weights(other)
    asked = requests(max_tokens=1, logprobs=1)[-1:]
    assert run(EngineCore(other), asked)["3"].logprobs != run(engine, asked)["3"].logprobs
    experts = next(name for name in tensors if "experts" in name)
    save_file(tensors | {experts: tensors[experts][:-1].contiguous()}, tmp_path / "b" / "model.safetensors")
    with pytest.raises(ModelError):
        engine.check_replacement_weights(other)


@pytest.mark.parametrize(
    ("pack", "config", "bound"),
    [
        (gptq(4, 32, symmetric=True), {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}, 0.15),
        (float8("tensor"), {**COMPRESSED, "ignore": ["lm_head"]}, 1e-3),
    ],
    ids=["gptq", "fp8"],
)
def test_checkpoints_in_few_bits_are_what_their_tensors_stand_for(
    pack: Packer, config: dict[str, Any], bound: float, tmp_path: Path
) -> None:
    dense = tmp_path / "dense"
    dense.mkdir()
    save_tiny_class(dense, "olmo")
    packed = quantize_checkpoint(dense, tmp_path / "packed", pack, config)
    asked = requests(max_tokens=1, prompt_logprobs=0)[-1:]
    pairs = zip(*(run(engine_of(each), asked)["3"].prompt_logprobs or [] for each in (dense, packed)), strict=True)
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
def test_what_does_not_go_with_a_class_is_refused_by_its_field(options: dict[str, Any], laguna: str) -> None:
    field = next(iter(options))
    with pytest.raises(ConfigError, match=f"{field}: a laguna is computed by transformers' class") as refused:
        engine_of(laguna, **options)
    assert refused.value.param == field


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [True, False])
def test_a_class_drafts_and_is_drafted_for(drafts: bool, laguna: str, tmp_path: Path) -> None:
    """With a native model as the other one. No token changes, and a model's drafts for itself are accepted."""
    path = save_tiny_model(tmp_path, "llama")
    served, guesses = (path, laguna) if drafts else (laguna, path)
    for draft in (guesses, served):
        asked: dict[str, Any] = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
        engine = engine_of(served, always, max_num_batched_tokens=256, speculative_config=asked)
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
def test_a_class_that_pages_do_not_serve_is_refused_with_the_reason(kind: str, reason: str, tmp_path: Path) -> None:
    save_tiny_class(tmp_path, kind)
    given = json.loads((tmp_path / "config.json").read_text())
    assert explain_unsupported_family(given) is not None
    with pytest.raises(ModelError, match=f"Quire does not serve {kind} models"):
        read_model_config(tmp_path)
    with pytest.raises(ModelError, match=reason):
        engine_of(tmp_path, model_impl="transformers")


def test_chunks_are_served_as_far_as_the_first(tmp_path: Path) -> None:
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
def test_a_number_of_which_the_class_makes_nothing_is_one_line(value: object, said: str, tmp_path: Path) -> None:
    save_tiny_class(tmp_path, "gemma4_unified_text")
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"initializer_range": value}))
    with pytest.raises(ModelError, match=f"^model: [^\n]*{said}[^\n]*$"):
        engine_of(tmp_path)


def test_an_encoder_decoder_is_refused_though_its_decoder_has_a_class(tmp_path: Path) -> None:
    save_tiny_class(tmp_path, "bart")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"is_encoder_decoder": True}))
    with pytest.raises(ModelError, match="it is an encoder-decoder"):
        read_model_config(tmp_path)


def test_unknown_families_are_refused_and_their_code_is_not_run(tmp_path: Path) -> None:
    config = {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "own.Own"}, "vocab_size": 9, "hidden_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"neither Quire nor a class of transformers .* its own code is not"):
        read_model_config(tmp_path)
    with pytest.raises(ModelError, match="'own' is known neither to Quire nor to the transformers installed here"):
        engine_of(tmp_path, model_impl="transformers")


def test_a_class_that_counts_positions_itself_is_refused(laguna: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe at startup detects it: requests in one batch would not have their own positions."""
    from quire.engine.models.transformers_backend import decoder

    def counting(body: nn.Module, ids: Tensor, positions: Tensor) -> dict[str, Any]:
        return {"input_ids": ids, "position_ids": torch.arange(ids.shape[1])[None], "use_cache": False}

    monkeypatch.setattr(decoder, "body_forward_kwargs", counting)
    with pytest.raises(ModelError, match="it ignores the positions it is given"):
        engine_of(laguna)


def test_products_of_pytorch_s_own_say_batch_dependent(tmp_path: Path) -> None:
    save_tiny_class(tmp_path, "dbrx")
    engine = engine_of(tmp_path)
    assert not engine.info.deterministic
    assert any(note.startswith("batch-dependent: transformers' DbrxForCausalLM") for note in engine.info.notes)
    with pytest.raises(ConfigError, match="deterministic: transformers' DbrxForCausalLM"):
        engine_of(tmp_path, deterministic=True)


def test_a_class_says_what_its_layers_keep(tmp_path: Path) -> None:
    save_tiny_class(tmp_path, "gemma4_text")
    calls = probe_attention(model_at(tmp_path), 512)
    sliding, full = (24, 16, 2), (None, 32, 2)
    found = [(each.window, each.head_dim, each.num_kv_heads) for each in calls]
    assert found == [sliding, sliding, full, sliding, full]


def test_the_plan_counts_what_a_class_keeps_of_latents(tmp_path: Path) -> None:
    save_tiny_class(tmp_path, "axk1")
    sizes = read_model_sizes(json.loads((tmp_path / "config.json").read_text()))
    calls = probe_attention(model_at(tmp_path), 512)
    assert sizes.kv_values_per_token == sum(
        2 * each.num_kv_heads * max(each.head_dim, each.value_dim) for each in calls
    )
    assert sizes.notes[0].startswith("transformers' class computes it")
    assert not sizes.unsupported_reasons


def model_at(path: Path) -> PreTrainedModel:
    return build_model(json.loads((path / "config.json").read_text()), torch.float32)


def causal(batch: int, head: int, query: Tensor, key: Tensor) -> Tensor:
    return key <= query


def test_masks_are_read_as_windows_or_refused() -> None:
    def windowed(batch: int, head: int, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key > query - 24)

    assert window_from_mask(causal, 512) is None
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
def test_other_masks_are_refused(mask: MaskFunction) -> None:
    with pytest.raises(ModelError, match="neither causal nor a sliding window"):
        window_from_mask(mask, 512)
