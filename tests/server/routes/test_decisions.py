"""POST /v1/decisions: probabilities of options, against the OpenAI SDK's own types."""

from __future__ import annotations

import math
from typing import Any

import pytest
from openai.types import Decision

from quire.engine.common.types import EngineCoreOutput, EngineCoreRequest, TokenLogprob
from tests.server.api import NAME, Api, open_api
from tests.server.fake import FakeEngine, scripted
from tests.texts import CHATML, byte_level_tokenizer

EOS = 258
PATH = "/v1/decisions"
QUESTIONS: list[Any] = [
    {"type": "predicate", "name": "angry", "instructions": "The writer is angry."},
    {
        "type": "choice",
        "instructions": "Topic?",
        "choices": [{"value": "bills", "description": "money"}, {"value": True}],
    },
    {"type": "score", "name": "s", "instructions": "How urgent?", "levels": [{"label": name} for name in "xyz"]},
]
BODY: dict[str, Any] = {"model": NAME, "input": "Where is my refund?", "questions": QUESTIONS}
LOGITS = {ord("A"): 2.0, ord("B"): 1.0, ord("C"): -1.0}


class FixedLogprobsEngine(FakeEngine):
    """Gives the tokens A, B and C fixed log probabilities, and all others a lower one."""

    def _step(self, request: EngineCoreRequest) -> EngineCoreOutput:
        listed = request.params.logprob_token_ids or ()
        top = [(token, LOGITS.get(token, -9.0)) for token in listed]
        self.positions[request.id] += 1
        logprobs = [TokenLogprob(listed[0], top[0][1], 1, top)]
        return EngineCoreOutput(id=request.id, new_ids=[listed[0]], logprobs=logprobs, finish_reason="length")


def weighing(**options: Any) -> Any:
    return open_api(FixedLogprobsEngine(scripted(b"", EOS), eos=[EOS], max_model_len=2048), **options)


def prompts(api: Api) -> list[str]:
    decode = byte_level_tokenizer().tokenizer.decode
    return [decode(each.prompt_ids, skip_special_tokens=False) for each in api.engine.seen]


async def test_decisions_return_probabilities_of_every_question_kind() -> None:
    async with weighing() as api:
        answer = await api.openai.decisions.create(**BODY)
        raw = await api.post(PATH, BODY)
        Decision.model_validate(raw, strict=True)
        seen = prompts(api)[:3]
        requests = api.engine.seen[:3]
    predicate, choice, score = answer.answers
    yes = math.exp(2) / (math.exp(2) + math.exp(1))
    assert (predicate.name, predicate.probability) == ("angry", pytest.approx(yes))
    assert (choice.name, choice.choice, choice.confidence) == (None, "bills", pytest.approx(yes))
    assert [each.value for each in choice.probabilities] == ["bills", True]
    weights = [math.exp(value) for value in LOGITS.values()]
    shares = [weight / sum(weights) for weight in weights]
    assert [each.probability for each in score.probabilities] == pytest.approx(shares)
    assert [(each.label, each.value) for each in score.probabilities] == [("x", 0), ("y", 1), ("z", 2)]
    assert score.score == pytest.approx(shares[1] + 2 * shares[2])
    assert answer.usage.input_tokens == sum(len(each.prompt_ids) for each in requests)
    assert answer.usage.output_tokens == 3, "one token each: nothing is generated beyond it"
    assert all(text.startswith("<|im_start|>user\nWhere is my refund?\n") for text in seen), "the input comes first"
    assert "A) bills: money\nB) true\n" in seen[1]
    assert all(text.endswith("<|im_end|>\n<|im_start|>assistant\n") for text in seen)


async def test_opened_thinking_is_closed_in_decision_prompt() -> None:
    thinking = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    assert thinking != CHATML
    async with weighing(chat_template=thinking, reasoning_parser="think") as api:
        await api.post(PATH, BODY)
        assert prompts(api)[0].endswith("<think>\n</think>\n\n")


async def test_many_questions_about_long_input_are_rejected() -> None:
    engine = FixedLogprobsEngine(scripted(b"", EOS), eos=[EOS], max_model_len=100_000)
    async with open_api(engine, max_queued_requests=1000) as api:
        error = (await api.post(PATH, {**BODY, "input": "x" * 20_000, "questions": QUESTIONS[:1] * 400}, 400))["error"]
        assert error["param"] == "questions"
        assert "fewer" in error["message"]


async def test_decision_input_accepts_items_and_json() -> None:
    items = [
        {"role": "developer", "content": "Be strict."},
        {"role": "user", "content": [{"type": "input_json", "data": {"a": "é"}}, {"type": "input_text", "text": "t"}]},
        {"role": "assistant", "content": "Fine."},
    ]
    async with weighing() as api:
        await api.post(PATH, {**BODY, "input": items})
        text = prompts(api)[0]
    assert (
        '<|im_start|>user\n{"a": "é"}\nt<|im_end|>\n<|im_start|>assistant\nFine.<|im_end|>\n<|im_start|>user\n' in text
    )


def choice(*values: Any) -> list[Any]:
    return [{"type": "choice", "instructions": "x", "choices": [{"value": value} for value in values]}]


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"questions": []}, "questions", "questions"),
    ({"questions": QUESTIONS * 200}, "questions", "400"),
    ({"questions": [{"type": "novel"}]}, "questions", "questions[0]"),
    ({"questions": choice("a")}, "questions", "choices"),
    ({"questions": choice("a", "a")}, "questions", "unique"),
    ({"questions": choice(*map(str, range(27)))}, "questions", "26 options"),
    ({"questions": choice("a", 1)}, "questions", "value"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "input[0]"),
    ({"input": "x" * 5000}, "input", "input came to"),
    ({"temperature": 1}, "temperature", "temperature"),
    ({"chat_template_kwargs": "x"}, "chat_template_kwargs", "chat_template_kwargs"),
    ({"seed": 1}, "seed", "nothing is sampled"),
    ({"stream": True}, "stream", "stream"),
]


@pytest.mark.few(5)
@pytest.mark.parametrize(("fields", "param", "named"), BAD, ids=range(len(BAD)))
async def test_invalid_decision_field_is_rejected_with_param(fields: dict[str, Any], param: str, named: str) -> None:
    async with weighing() as api:
        error = (await api.post(PATH, {**BODY, **fields}, 400))["error"]
        assert error["param"] == param
        assert named in error["message"]
        assert api.engine.seen == []
