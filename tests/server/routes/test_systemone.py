"""POST /v1/systemone: TypeSafe's System One API. tests/clients/test_jevcompat.py runs its conformance suite."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from quire.engine.client.engine_client import EngineClient
from quire.engine.common.config import DEMO_MODEL
from quire.engine.offline.in_process_client import InProcessClient
from quire.engine.receipts.receipt import parse_receipt_json
from quire.engine.text.tokenizer import Tokenizer
from quire.server.app import create_app
from quire.server.config import ServerConfig
from quire.server.generation.response_writers.decisions import choice_confidence, score_confidence
from quire.server.served_model import ServedModelSpec
from tests.server.api import NAME, open_http
from tests.server.forked import FORKED
from tests.server.routes.test_decisions import LOGITS, prompts, weighing

PATH = "/v1/systemone"
QUESTIONS: dict[str, Any] = {
    "refund": {"type": "noul", "instructions": "Refund?", "criteria": {"true": "asks for money", "false": ["other"]}},
    "team": {"type": "choice", "instructions": {"task": "Team?"}, "criteria": {"Billing": "money", "Sales": None}},
    "😡": {"type": "score", "instructions": "How angry?", "criteria": ["calm", {"level": "cross"}, "furious"]},
}
BODY: dict[str, Any] = {"model": "jev-latest", "state": {"subject": "Où?", "n": [1]}, "questions": QUESTIONS}


async def test_systemone_answers_every_question_kind() -> None:
    async with weighing() as api:
        answer = await api.post(PATH, {**BODY, "receipt": True})
        texts, requests = prompts(api), api.engine.seen
        metrics = (await api.http.get("/metrics")).text
    yes, weights = math.exp(2) / (math.exp(2) + math.exp(1)), [math.exp(value) for value in LOGITS.values()]
    shares = [weight / sum(weights) for weight in weights]
    noul, choice, score = answer["answers"].values()
    assert list(answer["answers"]) == list(QUESTIONS)
    assert noul == {"type": "noul", "noul": pytest.approx(yes)}
    chances = {"Billing": pytest.approx(yes), "Sales": pytest.approx(1 - yes)}
    assert choice == {
        "type": "choice",
        "choice": "Billing",
        "probabilities": chances,
        "confidence": pytest.approx(2 * yes - 1),
    }
    assert score["legend"] == {"0": "calm", "1": '{"level": "cross"}', "2": "furious"}
    assert list(score["probabilities"].values()) == pytest.approx(shares)
    assert score["score"] == pytest.approx(shares[1] + 2 * shares[2])
    assert score["confidence"] == pytest.approx(1 - (shares[1] + 2 * shares[2]) / (2 / 3))
    assert (answer["model"], answer["usage"]["output_tokens"]) == (NAME, 3)
    assert {each for each in answer if not each.startswith("x_")} == {"model", "answers", "usage"}
    receipt = parse_receipt_json(json.dumps(answer).encode())
    assert [each.ids for each in receipt.prompts] == [each.prompt_ids for each in requests]
    start = '<|im_start|>user\n{"subject": "Où?", "n": [1]}\n'
    assert all(text.startswith(start) for text in texts), "the state comes first"
    assert 'Refund?\n\nIs this true?\nA) yes: asks for money\nB) no: ["other"]\n' in texts[0]
    assert '{"task": "Team?"}\n\nWhich one applies?\nA) Billing: money\nB) Sales\n' in texts[1]
    assert 'A) calm\nB) {"level": "cross"}\nC) furious\n' in texts[2]
    assert 'quire:questions_total{engine="0",model_name="owner/model",type="score"} 1.0' in metrics


async def test_model_aliases_resolve_and_ignored_fields_are_listed() -> None:
    async with weighing() as api:
        for name, answered in ((NAME, NAME), ("second", "second"), ("jev-preview", NAME)):
            assert (await api.post(PATH, {**BODY, "model": name}))["model"] == answered
        response = await api.http.post(PATH, json={**BODY, "seed": 7, "x_trace": 1, "temperature": 3})
        assert (response.status_code, response.headers["X-Ignored-Params"]) == (200, "seed, x_trace, temperature")
        unknown = await api.post(PATH, {**BODY, "model": "gpt"}, 404)
        assert unknown["detail"]["error_type"] == "not_found_error"
        listed = (await api.http.get("/v1/models")).json()
    assert [each["name"] for each in listed["models"]] == [each["id"] for each in listed["data"]]


CHOICE = {"type": "choice", "criteria": {"a": None, "b": None}}
SCORE = {"type": "score", "criteria": ["a", "b"]}
BAD: list[tuple[Any, str]] = [
    ({"model": "jev-latest", "questions": QUESTIONS}, "state"),
    ({**BODY, "state": None}, "state"),
    ({**BODY, "state": 3}, "state"),
    ({**BODY, "questions": {}}, "questions"),
    ({**BODY, "questions": {"": CHOICE}}, "questions"),
    ({**BODY, "questions": {"q": {"type": "boolean"}}}, "questions"),
    ({**BODY, "questions": {"q": {**CHOICE, "criteria": {"a": None}}}}, "questions"),
    ({**BODY, "questions": {"q": {**CHOICE, "criteria": {str(i): None for i in range(256)}}}}, "questions"),
    ({**BODY, "questions": {"q": {**SCORE, "criteria": {"0": "a", "1": "b"}}}}, "questions"),
    ({**BODY, "questions": {"q": {**SCORE, "criteria": ["a"] * 11}}}, "questions"),
    ({**BODY, "questions": {"q": {**SCORE, "criteria": ["a", None]}}}, "questions"),
    ({**BODY, "state": "x" * 9000}, "state"),
    ([], None),
]


async def test_invalid_body_returns_fastapi_422_detail() -> None:
    async with weighing() as api:
        for body, field in BAD:
            (detail,) = (await api.post(PATH, body, 422))["detail"]
            assert detail["loc"] == (["body"] if field is None else ["body", field]), detail
            assert isinstance(detail["msg"], str)
        broken = await api.http.post(PATH, content=b'{"model": "x')
        assert (broken.status_code, broken.json()["detail"][0]["loc"]) == (422, ["body"])


async def test_invalid_key_returns_authentication_error() -> None:
    async with weighing(api_key=["secret"]) as api:
        for headers in ({"Authorization": "Bearer wrong"}, {"Authorization": ""}):
            refused = await api.http.post(PATH, json=BODY, headers=headers)
            assert (refused.status_code, refused.json()["detail"]["error_type"]) == (401, "authentication_error")


def test_confidence_is_zero_at_uniform_and_one_at_certainty() -> None:
    assert choice_confidence([0.25] * 4) == score_confidence([1 / 3] * 3) == 0.0
    assert choice_confidence([1.0, 0.0]) == score_confidence([0.0, 1.0, 0.0]) == 1.0
    assert choice_confidence([0.7, 0.3]) == pytest.approx(0.4)
    assert score_confidence([0.5, 0.0, 0.5]) == pytest.approx(0.0, abs=1e-9)
    assert score_confidence([0.2, 0.6, 0.2]) == pytest.approx(1 - 0.4 / (2 / 3))


@asynccontextmanager
async def served(**options: Any) -> AsyncIterator[tuple[httpx.AsyncClient, EngineClient]]:
    """The embedded model, with its engine in this process."""
    config = ServerConfig(**{"threads": 1, "max_model_len": 1024, "num_kv_blocks": 400, **options})
    client = EngineClient(InProcessClient(config))
    app = create_app(
        client, ServedModelSpec(config, Tokenizer.from_pretrained(DEMO_MODEL), 4096, {}), launch_process=FORKED
    )
    async with open_http(app) as http:
        yield http, client


async def asked(http: httpx.AsyncClient, questions: dict[str, Any], state: str) -> dict[str, Any]:
    body = {"model": "jev-latest", "state": state, "questions": questions}
    response = await http.post(PATH, json=body, timeout=120)
    assert response.status_code == 200, response.text
    return dict(response.json()["answers"])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_probabilities_are_bitwise_equal_at_any_load(dtype: str) -> None:
    """First alone and without a prefix cache; then at once, in another order, in chunks, with cache hits and without,
    together with other requests.
    """
    state = "Once upon a time there was a little fox who lived in the forest. " * 12
    animals = dict.fromkeys(("fox", "king", "bear", "owl"))
    questions = {
        f"{kind}{index}": {"type": kind, "instructions": f"Question {index} about the fox", **more}
        for index in range(4)
        for kind, more in (
            ("noul", {}),
            ("choice", {"criteria": animals}),
            ("score", {"criteria": ["low", "high", "higher"]}),
        )
    }
    alone: dict[str, Any] = {}
    async with served(dtype=dtype, enable_prefix_caching=False) as (http, _):
        for id, question in questions.items():
            alone |= await asked(http, {id: question}, state)
    assert len({json.dumps(each) for each in alone.values()}) == len(alone)
    async with served(dtype=dtype, max_num_batched_tokens=200, max_num_seqs=5) as (http, client):
        others = [asked(http, questions, f"{state[: 50 * index]} and then") for index in range(3)]
        first, *_ = await asyncio.gather(asked(http, dict(reversed(questions.items())), state), *others)
        second = await asked(http, questions, state)
        assert client.engine_core.stats.prefix_hits > 5000
    assert first == second == alone


async def test_questions_share_state_prefill_in_one_step() -> None:
    state = "Once upon a time there was a little fox who lived in the forest. " * 40
    questions = {str(index): {"type": "noul", "instructions": f"Is fox {index} clever?"} for index in range(16)}
    async with served() as (http, client):
        steps: list[tuple[int, int]] = []
        client.history.listeners.append(lambda step: steps.append((step.record.num_requests, step.record.num_tokens)))
        body = {"model": "jev-latest", "state": state, "questions": questions}
        usage = (await http.post(PATH, json=body, timeout=120)).json()["usage"]
    ((rows, tokens),) = steps
    assert rows == 16
    assert tokens == usage["input_tokens"] - usage["input_tokens_details"]["cached_tokens"]
    assert tokens < usage["input_tokens"] / 5
