"""Models, tokenize, health, version, metrics; and what importing the server costs."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest

from quire.engine.config import DEMO_MODEL
from quire.engine.text.tokenizer import Tokenizer
from quire.server.config import ServerConfig
from tests.server.api import NAME, Api, open_api
from tests.server.fake import FakeEngine, hashed, scripted


async def test_models(api: Api) -> None:
    listed = await api.openai.models.list()
    assert [model.id for model in listed.data] == [NAME, "second"]
    model = await api.openai.models.retrieve(NAME)
    assert (model.id, model.object, model.owned_by) == (NAME, "model", "quire")
    assert model.model_dump()["max_model_len"] == 512
    error = (await api.http.get("/v1/models/no/such")).json()["error"]
    assert error["message"] == f"The model `no/such` does not exist; served here: {NAME}, second"
    answer = await api.post("/v1/completions", {"model": "second", "prompt": "x"})
    assert answer["model"] == "second"


async def test_tokenize_and_back(api: Api) -> None:
    answer = await api.post("/tokenize", {"model": NAME, "prompt": "Hé", "return_token_strs": True})
    assert answer == {"count": 3, "max_model_len": 512, "tokens": [72, 195, 169], "token_strs": ["H", "Ã", "©"]}
    answer = await api.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]})
    assert (answer["count"], answer["token_strs"]) == (20, None)
    back = await api.post("/detokenize", {"tokens": answer["tokens"]})
    assert back == {"prompt": "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"}


async def test_tokenizing_holds_up_no_stream(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()
    for name in ("encode", "decode"):
        plain = getattr(Tokenizer, name)

        def noted(*args: Any, plain: Any = plain, **options: Any) -> Any:
            threads.add(threading.current_thread())
            return plain(*args, **options)

        monkeypatch.setattr(Tokenizer, name, noted)
    answer = await api.post("/tokenize", {"prompt": "x" * 20_000})
    assert await api.post("/detokenize", {"tokens": answer["tokens"]}) == {"prompt": "x" * 20_000}
    assert threads
    assert threading.current_thread() not in threads


async def test_health_and_version(api: Api) -> None:
    for path in ("/health", "/ping"):
        response = await api.http.get(path)
        assert (response.status_code, response.content) == (200, b"")
    assert (await api.http.head("/health")).status_code == 200
    assert set((await api.http.get("/version")).json()) == {"version"}
    api.engine.die()
    assert (await api.http.get("/health")).status_code == 503


async def test_metrics() -> None:
    async with open_api(FakeEngine(scripted(b"abc", 258), eos=[258])) as api:
        await api.post("/v1/completions", {"prompt": "Hello", "max_tokens": 10, "n": 2})
        text = (await api.http.get("/metrics")).text
    label = f'{{model_name="{NAME}"}}'
    for line in (
        f"vllm:kv_cache_usage_perc{label} 0.25",
        f"vllm:num_requests_waiting{label} 0.0",
        f"vllm:num_preemptions_total{label} 0.0",
        f'vllm:request_success_total{{finished_reason="stop",model_name="{NAME}"}} 2.0',
        f"vllm:time_to_first_token_seconds_count{label} 2.0",
        f"vllm:inter_token_latency_seconds_count{label} 6.0",
        f"vllm:e2e_request_latency_seconds_count{label} 2.0",
        f"vllm:request_prompt_tokens_sum{label} 10.0",
        f"vllm:request_generation_tokens_sum{label} 8.0",
        f"vllm:request_params_max_tokens_sum{label} 20.0",
        f"vllm:prompt_tokens_total{label} 10.0",
    ):
        assert line in text.splitlines(), line
    for name in ("num_requests_running", "generation_tokens_total", "prefix_cache_queries_total"):
        assert f"vllm:{name}" in text


@pytest.mark.parametrize("beams", [False, True])
async def test_a_prompts_choices_are_one_request_as_long_as_its_longest_choice(beams: bool) -> None:
    async with open_api(FakeEngine(hashed([97, 98, 258]), eos=[258])) as api:
        prompts = [[number] for number in range(1, 5)]
        body = {"prompt": prompts, "max_tokens": 20, "n": 3, "use_beam_search": beams, "return_token_ids": True}
        answer = await api.post("/v1/completions", body)
        text = (await api.http.get("/metrics")).text
    lengths = [len(choice["token_ids"]) for choice in answer["choices"]]
    longest = [max(lengths[first : first + 3]) for first in range(0, 12, 3)]
    assert 3 * sum(longest) > sum(lengths), "or the longest would be as good as any"
    label = f'{{model_name="{NAME}"}}'
    for line in (
        f"vllm:request_params_n_count{label} 4.0",
        f"vllm:request_params_n_sum{label} 12.0",
        f"vllm:request_max_num_generation_tokens_count{label} 4.0",
        f"vllm:request_max_num_generation_tokens_sum{label} {sum(longest)}.0",
    ):
        assert line in text.splitlines(), line


def test_a_models_name_is_its_hub_id_or_its_directorys(tmp_path: object) -> None:
    assert ServerConfig().model_names == ("quire-demo",)
    assert ServerConfig(model="owner/name").model_names == ("owner/name",)
    assert ServerConfig(model=str(tmp_path)).model_names == (str(tmp_path).rsplit("/", 1)[-1],)
    assert ServerConfig(model=DEMO_MODEL, served_model_name=["a", "b"]).model_names == ("a", "b")


def test_importing_the_server_loads_neither_torch_nor_transformers() -> None:
    code = "import quire.server.app, sys; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"[]\n"
