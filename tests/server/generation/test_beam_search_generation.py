"""Beam search compared with transformers on the same weights, and with exhaustive search."""

from __future__ import annotations

import asyncio
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from quire.engine.common.config import EngineConfig
from quire.engine.common.types import EngineCoreOutput, EngineCoreRequest, TokenLogprob
from quire.engine.offline.in_process_client import InProcessClient
from tests.server.api import VOCAB_SIZE, Api, make_app, open_api, open_http
from tests.server.fake import FakeEngine, hashed
from tests.tiny_models import save_tiny_model

EOS = 258
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SYMBOLS = (97, 98, EOS)


def next_symbol_logprobs(ids: list[int]) -> dict[int, float]:
    """Logprobs of a, b and end of sequence after these tokens: fixed, irregular, with probabilities that sum to one."""
    weights = [1 + (7 * sum(i * t for i, t in enumerate(ids, 1)) + 13 * symbol) % 11 for symbol in SYMBOLS]
    return {symbol: math.log(w / sum(weights)) for symbol, w in zip(SYMBOLS, weights, strict=True)}


class Markov(FakeEngine):
    """A model over three tokens."""

    def _step(self, request: EngineCoreRequest) -> EngineCoreOutput:
        ranked = sorted(next_symbol_logprobs(request.prompt_ids).items(), key=lambda item: -item[1])
        top = ranked[: request.params.logprobs]
        logprob = TokenLogprob(*ranked[0], 1, top)
        return EngineCoreOutput(id=request.id, new_ids=[ranked[0][0]], logprobs=[logprob], finish_reason="length")


def all_hypotheses(prompt: list[int], longest: int) -> list[tuple[float, tuple[int, ...]]]:
    """All hypotheses: those that end, and those of the greatest length."""
    hypotheses = []
    for length in range(1, longest + 1):
        for ids in itertools.product(SYMBOLS, repeat=length):
            if EOS not in ids[:-1] and (ids[-1] == EOS or length == longest):
                steps = [next_symbol_logprobs([*prompt, *ids[:i]])[token] for i, token in enumerate(ids)]
                hypotheses.append((sum(steps), ids))
    return hypotheses


@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0, -1.0])
async def test_wide_beam_search_equals_exhaustive_search(length_penalty: float) -> None:
    async with open_api(Markov(hashed(b"a"), eos=[EOS])) as api:
        body = {
            "prompt": [[120, 121], [122]],
            "n": 40,
            "max_tokens": 5,
            "use_beam_search": True,
            "length_penalty": length_penalty,
            "return_token_ids": True,
            "logprobs": 1,
        }
        answer = await api.post(COMPLETIONS, body)
        for place, prompt in enumerate(body["prompt"]):
            ranked = sorted(all_hypotheses(prompt, 5), key=lambda one: -one[0] / len(one[1]) ** length_penalty)
            choices = answer["choices"][40 * place : 40 * place + 40]
            score = {ids: total / len(ids) ** length_penalty for total, ids in ranked}
            scores = [score[tuple(choice["token_ids"])] for choice in choices]
            assert scores == pytest.approx([score[ids] for _, ids in ranked[:40]])
            assert len({tuple(choice["token_ids"]) for choice in choices}) == 40
            for choice in choices:
                ended = choice["token_ids"][-1] == EOS
                assert choice["finish_reason"] == ("stop" if ended else "length")
                assert choice["text"] == bytes(t for t in choice["token_ids"] if t != EOS).decode()
                assert len(choice["logprobs"]["tokens"]) == len(choice["text"])
        assert answer["usage"]["completion_tokens"] == sum(len(c["token_ids"]) for c in answer["choices"])
        assert not api.engine.running


async def test_chat_beam_search_returns_n_choices_and_honors_ignore_eos() -> None:
    async with open_api(Markov(hashed(b"a"), eos=[EOS])) as api:
        body = {"messages": [{"role": "user", "content": "x"}], "n": 2, "max_tokens": 4, "use_beam_search": True}
        answer = await api.post(CHAT, body)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        ignoring = await api.post(CHAT, {**body, "ignore_eos": True, "echo": False})
        assert [choice["finish_reason"] for choice in ignoring["choices"]] == ["length"] * 2


@pytest.mark.few(1)
@pytest.mark.parametrize(("width", "length_penalty"), [(3, 1.0), (1, 1.0), (4, 0.5)])
async def test_beam_search_equals_transformers(width: int, length_penalty: float, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama", vocab_size=VOCAB_SIZE)
    prompt = [72, 101, 108, 108, 111] * 4
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    expected = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=width,
        num_return_sequences=width,
        do_sample=False,
        max_new_tokens=8,
        length_penalty=length_penalty,
        pad_token_id=0,
    )
    app = make_app(InProcessClient(EngineConfig(model=str(path), dtype="float32", num_kv_blocks=100)))
    body = {"prompt": prompt, "n": width, "max_tokens": 8, "use_beam_search": True, "length_penalty": length_penalty}
    async with open_http(app) as http:
        response = await http.post(COMPLETIONS, json={**body, "ignore_eos": True, "return_token_ids": True})
    assert response.status_code == 200, response.text
    assert [choice["token_ids"] for choice in response.json()["choices"]] == expected[:, len(prompt) :].tolist()


async def cancel(api: Api, name: str) -> None:
    assert (await api.http.delete(f"/v1/requests/{name}")).status_code == 200, "between two steps, too"


@pytest.mark.parametrize("second_first", [False, True])
async def test_cancelled_beam_search_returns_beams_of_last_complete_step(second_first: bool) -> None:
    body = {"prompt": [[120, 121], [122]], "n": 3, "max_tokens": 400, "use_beam_search": True, "return_token_ids": True}
    engine = Markov(hashed(b"a"), step_seconds=0.001)
    async with open_api(engine) as api:
        asking = asyncio.create_task(api.post(COMPLETIONS, {**body, "length_penalty": 9.0}))
        while not any(each.id.endswith("-1-6-0") for each in engine.seen):  # noqa: ASYNC110
            await asyncio.sleep(0)
        name = engine.seen[0].id.removesuffix("-0-0-0")
        if second_first:  # cancelling one beam of the second prompt ends its search
            while not (beams := [each for each in engine.running if each.startswith(f"{name}-1-")]):  # noqa: ASYNC110
                await asyncio.sleep(0)
            assert engine.owner.cancel(beams[0]) == 1
            last = beams[0].split("-")[-2]
            while any(each.startswith(f"{name}-1-") for each in engine.running):  # noqa: ASYNC110
                await asyncio.sleep(0)
        await cancel(api, name)
        choices = (await asking)["choices"]
        assert [choice["index"] for choice in choices] == list(range(6))
        for choice in choices:
            assert choice["finish_reason"] == ("stop" if choice["token_ids"][-1] == EOS else "abort")
        for group in (choices[:3], choices[3:]):
            unfinished = {len(choice["token_ids"]) for choice in group if choice["finish_reason"] == "abort"}
            assert len(unfinished) == 1, "the beams of the last step that was whole"
        assert not second_first or unfinished == {int(last)}
        assert not engine.running


async def test_beam_search_cancelled_in_first_step_returns_empty_choices() -> None:
    engine = Markov(hashed(b"a"), step_seconds=0.001)
    async with open_api(engine) as api:
        body = {"prompt": "x", "n": 2, "max_tokens": 9, "use_beam_search": True}
        asking = asyncio.create_task(api.post(COMPLETIONS, body))
        while not engine.owner.num_open:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert engine.owner.cancel(engine.seen[0].id) == 1
        answer = await asking
        assert [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]] == [("", "abort")] * 2
        assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": True},
        {"stop": "x"},
        {"temperature": 0.5},
        {"logit_bias": {"97": 1}},
        {"min_tokens": 1},
        {"echo": True},
        {"best_of": 3},
        {"prompt_logprobs": 1},
        {"queue_timeout": 1},
        {"top_p": 0.5},
        {"typical_p": 0.5},
        {"dry_multiplier": 0.5},
        {"dry_sequence_breakers": []},
    ],
    ids=str,
)
async def test_beam_search_rejects_unsupported_fields(idle_api: Api, fields: dict[str, Any]) -> None:
    error = (await idle_api.post(COMPLETIONS, {"prompt": "x", "use_beam_search": True, **fields}, 400))["error"]
    assert error["param"] == next(iter(fields))


async def test_beam_search_rejects_structured_outputs(api: Api) -> None:
    body = {"prompt": "x", "use_beam_search": True, "structured_outputs": {"regex": "a+"}}
    error = (await api.post(COMPLETIONS, body, 400))["error"]
    assert error["param"] == "use_beam_search"


async def test_beam_search_ends_with_timeout_or_engine_error() -> None:
    body = {"prompt": "x", "n": 2, "max_tokens": 400, "use_beam_search": True, "ignore_eos": True}
    async with open_api(Markov(hashed(b"a"), step_seconds=0.01)) as api:
        error = (await api.post(COMPLETIONS, {**body, "timeout": 0.05}, 408))["error"]
        assert (error["code"], error["param"]) == ("timeout", "timeout")
        assert not api.engine.running
        text = (await api.http.get("/metrics")).text
        assert 'finished_reason="timeout",model_name="owner/model"} 2.0' in text
    async with open_api(FakeEngine(hashed(b"a"), fail_at=0)) as api:
        assert (await api.post(COMPLETIONS, body, 500))["error"]["message"] == "the engine tripped"
