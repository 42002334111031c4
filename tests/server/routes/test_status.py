"""The endpoints for models, tokenize, health, version and metrics, and default model names."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.engine.common.config import DEMO_MODEL
from quire.engine.text.tokenizer import Tokenizer
from quire.server.config import ServerConfig
from tests.server.api import NAME, Api, open_api
from tests.server.fake import FakeEngine, hashed, scripted


async def test_models_endpoint_lists_names_and_context_length(api: Api) -> None:
    listed = await api.openai.models.list()
    assert [model.id for model in listed.data] == [NAME, "second"]
    model = await api.openai.models.retrieve(NAME)
    assert (model.id, model.object, model.owned_by) == (NAME, "model", "quire")
    card = model.model_dump()
    assert [card["max_model_len"], card["context_length"], card["meta"]["n_ctx"], card["max_input_tokens"]] == [512] * 4
    error = (await api.http.get("/v1/models/no/such")).json()["error"]
    assert error["message"] == f"The model `no/such` does not exist; served here: {NAME}, second"
    answer = await api.post("/v1/completions", {"model": "second", "prompt": "x"})
    assert answer["model"] == "second"


async def test_tokenize_and_detokenize_round_trip(api: Api) -> None:
    answer = await api.post("/tokenize", {"model": NAME, "prompt": "Hé", "return_token_strs": True})
    assert answer == {"count": 3, "max_model_len": 512, "tokens": [72, 195, 169], "token_strs": ["H", "Ã", "©"]}
    answer = await api.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]})
    assert (answer["count"], answer["token_strs"]) == (20, None)
    back = await api.post("/detokenize", {"tokens": answer["tokens"]})
    assert back["prompt"] == back["content"] == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"


async def test_large_tokenize_runs_in_worker_process(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    large_calls = []
    for name in ("encode", "decode"):
        plain = getattr(Tokenizer, name)

        def record_call(self: Tokenizer, given: Any, plain: Any = plain, **options: Any) -> Any:
            if len(given) > 1000:  # DRY's sequence breakers are encoded here, after the start
                large_calls.append(given)
            return plain(self, given, **options)

        monkeypatch.setattr(Tokenizer, name, record_call)
    answer = await api.post("/tokenize", {"prompt": "x" * 20_000})
    assert (await api.post("/detokenize", {"tokens": answer["tokens"]}))["prompt"] == "x" * 20_000
    assert not large_calls, "a worker process does it"


async def test_health_returns_200_until_engine_dies(api: Api) -> None:
    for path in ("/health", "/ping"):
        response = await api.http.get(path)
        assert (response.status_code, response.json()) == (200, {"status": "ok"}), "llama.cpp's clients read it"
    assert (await api.http.head("/health")).status_code == 200
    assert set((await api.http.get("/version")).json()) == {"version"}
    api.engine.die("the engine died")
    assert (await api.http.get("/health")).status_code == 503


async def test_metrics_report_vllm_series() -> None:
    async with open_api(FakeEngine(scripted(b"abc", 258), eos=[258])) as api:
        await api.post("/v1/completions", {"prompt": "Hello", "max_tokens": 10, "n": 2})
        text = (await api.http.get("/metrics")).text
    label = f'{{engine="0",model_name="{NAME}"}}'
    for line in (
        f"vllm:kv_cache_usage_perc{label} 0.25",
        f"vllm:num_requests_waiting{label} 0.0",
        f"vllm:num_preemptions_total{label} 0.0",
        f'vllm:request_success_total{{engine="0",finished_reason="stop",model_name="{NAME}"}} 2.0',
        f"vllm:time_to_first_token_seconds_count{label} 2.0",
        f"vllm:inter_token_latency_seconds_count{label} 6.0",
        f"vllm:e2e_request_latency_seconds_count{label} 2.0",
        f"vllm:request_prompt_tokens_sum{label} 10.0",
        f"vllm:request_generation_tokens_sum{label} 8.0",
        f"vllm:request_params_max_tokens_sum{label} 20.0",
        f"vllm:prompt_tokens_total{label} 10.0",
        f'vllm:num_requests_waiting_by_reason{{engine="0",model_name="{NAME}",reason="capacity"}} 0.0',
        f'vllm:num_requests_waiting_by_reason{{engine="0",model_name="{NAME}",reason="deferred"}} 0.0',
        f'vllm:admission_rejections_total{{engine="0",model_name="{NAME}",reason="max_num_queued_reqs"}} 0.0',
        f"vllm:request_num_preemptions_count{label} 2.0",
    ):
        assert line in text.splitlines(), line
    for name in ("num_requests_running", "generation_tokens_total", "prefix_cache_queries_total"):
        assert f"vllm:{name}" in text


async def test_vllm_metrics_have_engine_and_model_labels() -> None:
    async with open_api(FakeEngine(hashed(b"abc"))) as api:
        await api.post("/v1/completions", {"prompt": "Hello", "max_tokens": 4})
        text = (await api.http.get("/metrics")).text
    families = [each for each in text_string_to_metric_families(text) if each.name.startswith("vllm:")]
    assert len(families) > 25
    for family in families:
        assert family.samples
        for sample in family.samples:
            assert sample.labels["engine"] == "0", sample
            assert ("model_name" in sample.labels) is (family.name != "vllm:cache_config_info"), "as vLLM has it"
    (cache,) = next(each for each in families if each.name == "vllm:cache_config_info").samples
    assert cache.labels["kv_cache_size_tokens"] == str(100 * 16)
    assert float(cache.labels["kv_cache_max_concurrency"]) == pytest.approx(100 / (512 / 16), abs=0.01)


async def test_503_responses_are_counted_by_reason() -> None:
    async def rejection_counts(api: Api) -> dict[str, float]:
        text = (await api.http.get("/metrics")).text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {s.labels["reason"]: s.value for s in samples if s.name == "vllm:admission_rejections_total"}

    options = {"max_num_seqs": 1, "max_queued_requests": 1, "max_queued_tokens": 6}
    async with open_api(FakeEngine(scripted(b"a" * 400, 258), step_seconds=0.01), **options) as api:
        assert set((await rejection_counts(api)).values()) == {0}
        await api.post("/v1/completions", {"prompt": "x", "n": 3}, 400)
        running = asyncio.create_task(api.post("/v1/completions", {"prompt": "xyz", "max_tokens": 400}))
        await api.engine.sent.wait()
        await api.post("/v1/completions", {"prompt": "x", "n": 2}, 503)
        api.engine.owner.share({}, 5)  # as of requests that have no token yet
        await api.post("/v1/completions", {"prompt": "xyz"}, 503)
        api.engine.owner.share({}, 0)
        api.runtime.admission.start_draining()
        await api.post("/v1/completions", {"prompt": "x"}, 503)
        await api.post("/v1/chat/completions", {"messages": []}, 503)
        expected = {"max_num_queued_reqs": 1, "max_num_queued_tokens": 1, "shutting_down": 2, "asleep": 0}
        assert await rejection_counts(api) == expected
        running.cancel()


@pytest.mark.parametrize("beams", [False, True])
async def test_choices_of_prompt_count_as_one_request_of_longest_length(beams: bool) -> None:
    async with open_api(FakeEngine(hashed([97, 98, 258]), eos=[258])) as api:
        prompts = [[number] for number in range(1, 5)]
        body = {"prompt": prompts, "max_tokens": 20, "n": 3, "use_beam_search": beams, "return_token_ids": True}
        answer = await api.post("/v1/completions", body)
        text = (await api.http.get("/metrics")).text
    lengths = [len(choice["token_ids"]) for choice in answer["choices"]]
    longest = [max(lengths[first : first + 3]) for first in range(0, 12, 3)]
    assert 3 * sum(longest) > sum(lengths), "or the longest would be as good as any"
    label = f'{{engine="0",model_name="{NAME}"}}'
    for line in (
        f"vllm:request_params_n_count{label} 4.0",
        f"vllm:request_params_n_sum{label} 12.0",
        f"vllm:request_max_num_generation_tokens_count{label} 4.0",
        f"vllm:request_max_num_generation_tokens_sum{label} {sum(longest)}.0",
    ):
        assert line in text.splitlines(), line


def test_default_model_name_is_hub_id_or_directory(tmp_path: object) -> None:
    assert ServerConfig().model_names == ("quire-demo",)
    assert ServerConfig(model="owner/name").model_names == ("owner/name",)
    assert ServerConfig(model=str(tmp_path)).model_names == (str(tmp_path).rsplit("/", 1)[-1],)
    assert ServerConfig(model=DEMO_MODEL, served_model_name=["a", "b"]).model_names == ("a", "b")


@pytest.mark.parametrize(
    ("folder", "known", "name"),
    [
        ("hf", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("hf", "/home/me/checkpoints/mine", "mine"),
        ("hf", None, "hf"),
        ("model", 5, "model"),
        ("mine", "Qwen/Qwen3-0.6B", "mine"),
        ("models--Qwen--Qwen3-0.6B/snapshots/" + "0a" * 20, None, "Qwen/Qwen3-0.6B"),
    ],
)
def test_generic_folder_takes_model_name_from_config(tmp_path: Path, folder: str, known: object, name: str) -> None:
    path = tmp_path / folder
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"_name_or_path": known}))
    assert ServerConfig(model=str(path)).model_names == (name,)
