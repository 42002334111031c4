"""LoRA together with the engine's other features: each request's tokens are those that it has alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from quire import LLM, BeamSearchParams, LoRARequest, SamplingParams
from quire.engine.common.errors import InvalidRequest
from quire.engine.common.types import Adapter, EngineCoreRequest
from tests.adapters import merge, save_adapter
from tests.engine.harness import run
from tests.engine.lora.test_parity import asked, engine, prompts, spool
from tests.engine.test_heads import made_head
from tests.engine.test_speculation import always
from tests.engine.tiers.fakes import always as of_tiers
from tests.texts import CHATML, byte_level_tokenizer
from tests.tiny_models import save_tiny_model
from tests.tiny_mtp import save_tiny_mtp


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def folders(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base, root = AutoModelForCausalLM.from_pretrained(model), tmp_path_factory.mktemp("adapters")
    return [save_adapter(root / f"a{seed}", base, 6, seed=seed) for seed in range(3)]


@pytest.fixture
def adapters(model: Path, folders: list[Path], tmp_path: Path) -> list[Adapter | None]:
    store = spool(tmp_path / "spool", model)
    return [None, *(store.add_adapter(folder.name, str(folder)) for folder in folders)]


def requests(adapters: list[Adapter | None]) -> list[EngineCoreRequest]:
    """Greedy requests, which repeat themselves, and sampled ones."""
    engine_requests = []
    for index, ids in enumerate(prompts(8)):
        params: dict[str, Any] = {"temperature": 0.8 * (index % 2), "max_tokens": 24, "prompt_logprobs": None}
        engine_requests.append(asked(f"r{index}", ids * 2, adapters[index % len(adapters)], **params))
    return engine_requests


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "options",
    [
        {"speculative_config": "ngram"},
        {"speculative_config": "suffix"},
        {"speculative_config": "draft_model"},
        {"speculative_config": "eagle"},
        {"speculative_config": "eagle3"},
        {"speculative_config": "medusa"},
        {"speculative_config": "mtp"},
        {"num_kv_blocks": 14},
        {"num_kv_blocks": 14, "kv_offload_memory": 0.1},
        {"max_num_batched_tokens": 7},
        {"max_loras": 1},
        {"max_cpu_loras": 1, "max_loras": 1, "max_num_seqs": 2},
        {"enable_prefix_caching": False},
    ],
    ids=str,
)
def test_lora_tokens_equal_those_alone_with_engine_options(
    model: Path, adapters: list[Adapter | None], options: dict[str, object], tmp_path: Path
) -> None:
    """Drafts come from models without adapters; the draft model is the target model itself."""
    all_requests, method = requests(adapters), options.get("speculative_config")
    if method in ("draft_model", "eagle", "eagle3", "medusa"):
        drafter_path = model if method == "draft_model" else made_head(tmp_path / "head", method)[0]
        options = {"speculative_config": {"method": method, "model": str(drafter_path), "num_speculative_tokens": 3}}
    served_path = model
    if method == "mtp":  # the same weights, and one more layer
        served_path = save_tiny_mtp(tmp_path / "model", "llama")
        options = {"speculative_config": {"method": method, "num_speculative_tokens": 3}}
    plain, tested_engine = engine(model), engine(served_path, None if method is None else always, **options)
    together = run(tested_engine, all_requests)
    for request in all_requests:
        alone = run(plain, [request])[request.id]
        assert (together[request.id].ids, together[request.id].logprobs) == (alone.ids, alone.logprobs)
    if "num_kv_blocks" in options:
        assert tested_engine.engine_stats.preemptions > 0
    if "speculative_config" in options:
        assert tested_engine.engine_stats.draft_tokens > 0
    if method == "draft_model":
        assert sum(tested_engine.engine_stats.accepted_drafts) > 10


def test_offloaded_prefix_is_found_only_for_its_adapter(model: Path, adapters: list[Adapter | None]) -> None:
    served, ids = engine(model, make_tiers=of_tiers, kv_offload_memory=0.1), list(range(3, 60))
    expected = run(served, [asked("a", ids, adapters[1], prompt_logprobs=None)])["a"]
    for index in (0, 2):
        served.scheduler.kv_cache_manager.block_pool.clear_hashes()
        probe = asked("probe", ids, adapters[index], prompt_logprobs=None)
        assert run(served, [probe])["probe"].cached_tokens == 0
    served.scheduler.kv_cache_manager.block_pool.clear_hashes()
    again = run(served, [asked("again", ids, adapters[1], prompt_logprobs=None)])["again"]
    assert (again.cached_tokens, again.ids, again.logprobs) == (48, expected.ids, expected.logprobs)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "options",
    [
        {"quantization": "int8"},
        {"quantization": "int4"},
        {"dtype": "bfloat16"},
        {"kv_cache_dtype": "int8"},
        {"kv_cache_dtype": "fp8", "quantization": "fp8"},
    ],
    ids=str,
)
def test_lora_on_quantized_model_does_not_depend_on_batch(
    model: Path, adapters: list[Adapter | None], options: dict[str, object]
) -> None:
    """Also close to float32; requests without an adapter get the tokens of an engine without LoRA."""
    all_requests = requests(adapters)
    together, exact = run(engine(model, **options), all_requests), run(engine(model), all_requests)
    single = engine(model, enable_prefix_caching=False, **options)
    for request in all_requests:
        alone = run(single, [request])[request.id]
        assert (together[request.id].ids, together[request.id].logprobs) == (alone.ids, alone.logprobs)
        first = [answers[request.id].logprobs[0] for answers in (together, exact)]
        exact_logprobs = dict(first[1].top)
        assert any(abs(exact_logprobs.get(token, -100.0) - logprob) < 1.0 for token, logprob in first[0].top)
    plain = [request for request in all_requests if request.adapter is None]
    without = run(engine(model, enable_lora=False, **options), plain)
    for request in plain:
        assert (together[request.id].ids, together[request.id].logprobs) == (
            without[request.id].ids,
            without[request.id].logprobs,
        )


def test_adapter_load_does_not_stall_running_stream(model: Path, adapters: list[Adapter | None]) -> None:
    """The stream gets a token in every step, including those before which one adapter replaces another."""
    served, loaded_adapters = engine(model, max_loras=1, max_cpu_loras=1), []
    served.add_request(asked("long", prompts(1)[0], None, max_tokens=100, prompt_logprobs=None))
    served.step()
    for at, adapter in enumerate([*adapters[1:], adapters[1]]):
        served.add_request(asked(f"r{at}", [5, 6, 7], adapter, max_tokens=2, prompt_logprobs=None))
        for step in range(8):
            if step == 1:  # the load was requested; wait until the thread has read it
                served.scheduler._waiting._loader._thread.submit(int).result()
            assert "long" in {output.id for output in served.step()}
            loaded_adapters += [name for name, _ in served.last_step_record.adapter_loads]
    assert loaded_adapters == ["a0", "a1", "a2", "a0"]
    assert served.engine_stats.running == 1


@pytest.mark.slow
def test_llm_generate_and_beam_search_use_lora_requests(model: Path, folders: list[Path]) -> None:
    byte_level_tokenizer(CHATML).tokenizer.backend.save(str(model / "tokenizer.json"))
    llm = LLM(str(model), enable_lora=True, max_lora_rank=8, num_kv_blocks=64)
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=0)
    one, two = (LoRARequest(folder.name, number, str(folder)) for number, folder in enumerate(folders[:2], 1))

    def texts(prompts: list[str], adapters: Any) -> list[Any]:
        answers = llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
        return [answer.outputs[0].logprobs for answer in answers]

    mixed = texts(["a tale"] * 3, [None, one, two])
    assert len({str(each) for each in mixed}) == 3
    assert texts(["a tale"], one) == [mixed[1]]
    assert texts(["a tale"], None) == [mixed[0]]
    beams = BeamSearchParams(beam_width=3, max_tokens=6)
    beam_outputs = llm.beam_search(["a tale"] * 2, beams, lora_request=[one, None])
    merged = merge(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64), folders[0])
    for sequence in beam_outputs[0].sequences:
        ids = torch.tensor([sequence.tokens])
        with torch.no_grad():
            logprobs = merged(ids).logits[0].log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
        assert sequence.cum_logprob == pytest.approx(float(logprobs[-6:].sum()), abs=0.2)  # the model is bfloat16
    assert [each.tokens for each in beam_outputs[1].sequences] == [
        each.tokens for each in llm.beam_search("a tale", beams)[0].sequences
    ]
    assert beam_outputs[0].sequences[0].tokens != beam_outputs[1].sequences[0].tokens
    with pytest.raises(InvalidRequest, match="lora_request: 2 for 1 prompts"):
        texts(["a tale"], [one, two])
    with pytest.raises(InvalidRequest, match="lora_request: x: there is no folder"):
        texts(["a tale"], LoRARequest("x", 9, "/nowhere/at/all"))
    llm.close()
    plain = LLM(str(model), num_kv_blocks=64)
    with pytest.raises(InvalidRequest, match="enable_lora=True"):
        plain.generate("a tale", params, lora_request=one)
    plain.close()


@pytest.mark.slow
def test_llm_embed_with_lora_equals_merged_model(model: Path, folders: list[Path], tmp_path: Path) -> None:
    """In a batch and alone."""
    byte_level_tokenizer(CHATML).tokenizer.backend.save(str(model / "tokenizer.json"))
    texts, options = ["a tale", "another one, longer", "x"], {"runner": "pooling", "dtype": "float32"}
    llm = LLM(str(model), enable_lora=True, num_kv_blocks=64, **options)
    one, two = (LoRARequest(folder.name, number, str(folder)) for number, folder in enumerate(folders[:2], 1))
    mixed = [each.outputs.embedding for each in llm.embed(texts, use_tqdm=False, lora_request=[one, None, two])]
    alone = [llm.embed(texts[at], use_tqdm=False, lora_request=each) for at, each in enumerate((one, None, two))]
    assert [output.outputs.embedding for (output,) in alone] == mixed
    llm.close()
    for at, folder in enumerate((folders[0], None, folders[1])):
        merged = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
        if folder is not None:
            merge(merged, folder)
        merged.save_pretrained(tmp_path / f"{at}")
        byte_level_tokenizer(CHATML).tokenizer.backend.save(str(tmp_path / f"{at}" / "tokenizer.json"))
        plain = LLM(str(tmp_path / f"{at}"), num_kv_blocks=64, **options)
        (expected,) = plain.embed(texts[at], use_tqdm=False)
        assert mixed[at] == pytest.approx(expected.outputs.embedding, abs=1e-5)
        plain.close()
