"""llama.cpp's /infill, /completion and /slots: bodies as llama.vim (autoload/llama.vim, a1c8e6e) and llama.vscode
(src/llama-server.ts, 3938fb3) send them, and the fields that both read.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.common.types import EngineCoreRequest
from quire.engine.text.detokenizer import TextDelta
from quire.server.generation.line_limiter import LineLimiter
from quire.server.generation.resolved_request import LineRule
from tests.server.api import NAME, Api, open_api, parse_events
from tests.server.fake import FakeEngine, hashed, scripted
from tests.texts import sentence_piece_tokenizer
from tests.tiers import examples

EOS = 258
QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
PREFIX, SUFFIX, MIDDLE, PAD, REPOSITORY, FILE = range(259, 265)
"""Their token ids, which follow those of the byte-level tokenizer."""
VIM_FIELDS = ["content", *(f"timings/{phase}_{name}" for phase in ("prompt", "predicted") for name in ("n", "ms"))]
VIM_FIELDS += [f"timings/{phase}_per_{name}" for phase in ("prompt", "predicted") for name in ("token_ms", "second")]
VIM_FIELDS += ["truncated", "tokens_cached"]
VIM: dict[str, Any] = {
    "id_slot": 0,
    "input_prefix": "def f():\n",
    "input_suffix": "\n",
    "input_extra": [{"text": "x = 1\n", "time": [1, 2], "filename": "a.py"}],
    "prompt": "    ",
    "n_predict": 128,
    "stop": [],
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.90,
    "samplers": ["top_k", "top_p", "infill"],
    "stream": False,
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 250,
    "response_fields": VIM_FIELDS,
    "model": "",
}
VIM_WARM_UP: dict[str, Any] = {
    "id_slot": 0,
    "input_prefix": "",
    "input_suffix": "",
    "input_extra": VIM["input_extra"],
    "prompt": "",
    "n_predict": 0,
    "temperature": 0.0,
    "samplers": [],
    "stream": False,
    "cache_prompt": True,
    "t_max_prompt_ms": 1,
    "t_max_predict_ms": 1,
    "response_fields": [""],
}
VSCODE: dict[str, Any] = {
    "id_slot": 0,
    "input_prefix": "def f():\n",
    "input_suffix": "\n\n",
    "input_extra": [{"text": "x = 1\n", "time": 1, "filename": "a.py"}],
    "prompt": "    r",
    "n_predict": 128,
    "n_cmpl": 3,
    "top_k": 40,
    "top_p": 0.99,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 2500,
    "model": NAME,
}


@asynccontextmanager
async def open_coder(engine: FakeEngine, names: Sequence[str] = QWEN, **options: Any) -> AsyncIterator[Api]:
    """`names`: special tokens that the tokenizer gets."""
    async with open_api(engine, **options) as api:
        model = api.runtime.model
        model.tokenizer.backend.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in names])
        api.runtime.model = dataclasses.replace(model, vocab_size=300)
        yield api


def last_ids(api: Api) -> list[int]:
    return api.engine.seen[-1].prompt_ids


async def test_vim_infill_gets_fields_it_asks_for() -> None:
    async with open_coder(FakeEngine(scripted(b"return 1", EOS), eos=[EOS])) as api:
        response = await api.http.post("/infill", json=VIM)
        body = response.json()
    assert set(body) == set(VIM_FIELDS)
    assert response.text.startswith('{"content":"'), "the plugin's pattern for an answer"
    assert (body["content"], body["truncated"]) == ("return 1", False)
    prompt = len(last_ids(api))
    cached = prompt // 2  # by the fake engine
    assert (body["timings/prompt_n"], body["timings/predicted_n"]) == (prompt - cached, 9)
    assert body["tokens_cached"] == prompt + 9
    assert response.headers["x-ignored-params"] == "id_slot, t_max_prompt_ms"
    params = api.engine.seen[-1].params
    assert (params.max_tokens, params.top_k, params.top_p, params.min_p, params.temperature) == (128, 40, 0.9, 0.2, 1.0)
    assert {PAD, REPOSITORY, FILE} == set(params.stop_token_ids), "llama.cpp ends an answer at these too"


async def test_infill_prompt_of_qwen_equals_llama_cpps() -> None:
    """format_prompt_infill of llama.cpp's server-common.cpp (006639c)."""
    async with open_coder(FakeEngine(hashed(b"a"))) as api:
        await api.post("/infill", {**VIM, "n_predict": 1})
        expected = [REPOSITORY, *b"myproject\n", FILE, *b"a.py\n", *b"x = 1\n", FILE, *b"filename\n"]
        assert last_ids(api) == [*expected, PREFIX, *b"def f():\n", *b"    ", SUFFIX, *b"\n", MIDDLE]
        await api.post("/infill", {"input_prefix": "a<|fim_middle|>", "input_suffix": "b", "n_predict": 1})
        whole = [REPOSITORY, *b"myproject\n", FILE, *b"filename\n", PREFIX, *b"a<|fim_middle|>", SUFFIX, *b"b", MIDDLE]
        assert last_ids(api) == whole, "special tokens in source code are treated as text"


async def test_infill_without_repository_tokens_marks_snippets() -> None:
    async with open_coder(FakeEngine(hashed(b"a")), ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")) as api:
        await api.post("/infill", {**VIM, "n_predict": 1})
        extra = [*b"\n\n--- snippet ---\n\n", *b"x = 1\n"]
        assert last_ids(api) == [*extra, PREFIX, *b"def f():\n", *b"    ", SUFFIX, *b"\n", MIDDLE]


async def test_infill_adds_no_sentencepiece_spaces_between_parts(api: Api) -> None:
    tokenizer = sentence_piece_tokenizer().tokenizer
    marks = ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>")
    tokenizer.backend.add_special_tokens([tokenizers.AddedToken(mark, special=True) for mark in marks])
    before, between, middle = map(tokenizer.backend.token_to_id, marks)
    api.runtime.model = dataclasses.replace(api.runtime.model, tokenizer=tokenizer, vocab_size=10_000)
    await api.post("/infill", {"input_prefix": "ab", "prompt": "ab", "input_suffix": "ab", "n_predict": 1})
    spaced, bare = map(tokenizer.backend.token_to_id, ("\u2581ab", "ab"))
    assert last_ids(api) == [1, before, spaced, bare, between, bare, middle]
    await api.post("/v1/completions", {"prompt": "ab", "suffix": "ab", "max_tokens": 1})
    assert last_ids(api) == [1, before, spaced, between, bare, middle]


async def test_long_infill_keeps_text_near_the_cursor() -> None:
    """Context 512: a window of 256 tokens, 192 of the prefix and 64 of marks, line and suffix; 224 of other files."""
    async with open_coder(FakeEngine(hashed(b"a"), max_model_len=512)) as api:
        chunks = [{"text": text * 200, "filename": "f"} for text in "xyz"]
        body = {"input_prefix": "p" * 300 + "q" * 100, "input_suffix": "s" * 400, "prompt": "line", "n_predict": 8}
        await api.post("/infill", {**body, "input_extra": chunks})
        head = [*b"y" * 200, FILE, *b"f\n", *b"z" * 200, FILE, *b"filename\n"]
        prefix = [PREFIX, *b"p" * 92, *b"q" * 100, *b"line"]
        assert last_ids(api) == [*head[-224:], *prefix, SUFFIX, *b"s" * 58, MIDDLE]
        await api.post("/infill", {**body, "input_extra": chunks, "input_prefix": "p", "n_predict": 8})
        assert last_ids(api)[:224] == head[-224:], "the prefix cache keeps other files while this one is edited"


async def test_n_predict_zero_computes_prompt_only() -> None:
    async with open_coder(FakeEngine(hashed(b"a"))) as api:
        assert await api.post("/infill", VIM_WARM_UP) == {}
        assert api.engine.seen[-1].params.max_tokens == 1
        vscode = {name: each for name, each in VIM_WARM_UP.items() if name not in ("response_fields", "temperature")}
        body = await api.post("/infill", vscode)
        assert (body["content"], body["tokens_predicted"], body["stop_type"]) == ("", 0, "limit")
        assert body["tokens_evaluated"] == len(last_ids(api))
        assert body["timings"]["cache_n"] + body["timings"]["prompt_n"] == body["tokens_evaluated"]
        assert body["timings"]["prompt_ms"] > 0
        (event,) = await stream(api, "/completion", {"prompt": "Hi", "n_predict": 0})
        assert (event["stop"], event["tokens_predicted"], event["content"]) == (True, 0, "")
        assert (await api.post("/v1/completions", {"prompt": "Hi", "max_tokens": 0}, 400))["error"][
            "param"
        ] == "max_tokens"


async def test_vim_instruction_warm_up_generates_nothing(api: Api) -> None:
    body = {"id_slot": 0, "messages": [{"role": "user", "content": "Hi"}], "samplers": [], "n_predict": 0}
    body |= {"stream": False, "cache_prompt": True, "response_fields": [""], "model": ""}
    answer = await api.post("/v1/chat/completions", body)
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["choices"][0]["message"]["content"] == ""
    assert api.engine.seen[-1].params.max_tokens == 1
    await api.post("/v1/chat/completions", {**body, "n_predict": 3})
    assert api.engine.seen[-1].params.max_tokens == 3
    await api.post("/v1/chat/completions", {**body, "n_predict": 0, "max_tokens": 0}, 400)


async def test_vscode_infill_gets_list_of_completions() -> None:
    async with open_coder(FakeEngine(hashed(b"abc"), eos=[EOS])) as api:
        answers = await api.post("/infill", {**VSCODE, "n_predict": 5, "seed": 1})
        assert [each["index"] for each in answers] == [0, 1, 2]
        assert len({each["content"] for each in answers}) > 1
        for each in answers:
            assert (each["tokens_predicted"], each["stop_type"], each["model"]) == (5, "limit", NAME)
            assert each["generation_settings"]["n_ctx"] == 512
            assert each["timings"]["predicted_per_second"] > 0
            assert each["prompt"].endswith("<|fim_prefix|>def f():\n    r<|fim_suffix|>\n\n<|fim_middle|>")
        single = await api.post("/infill", {**VSCODE, "n_cmpl": 1, "n_predict": 5, "seed": 1})
        assert single["content"] == answers[0]["content"]


async def stream(api: Api, path: str, body: dict[str, Any]) -> list[Any]:
    """Events of a stream, which has no [DONE]."""
    return parse_events(await api.stream_text(path, body))


@settings(deadline=None, max_examples=examples(12))
@given(st.text("ab é\n ", max_size=30), st.integers(1, 40), st.integers(1, 5), st.integers(0, 2), st.integers(1, 2))
async def test_streamed_completion_assembles_to_whole(text: str, most: int, burst: int, indent: int, n: int) -> None:
    engine = FakeEngine(scripted(text.encode(), EOS), eos=[EOS], burst=burst)
    async with open_api(engine) as api:
        body = {"prompt": "Hi", "n_predict": most, "n_indent": indent, "stop": ["bb"], "n_probs": 2, "n_cmpl": n}
        whole = await api.post("/completion", {**body, "return_tokens": True})
        events = await stream(api, "/completion", body)
    for index, answer in enumerate([whole] if n == 1 else whole):
        *parts, last = [each for each in events if each["index"] == index]
        assert (last["stop"], last["content"], last["tokens"]) == (True, "", [])
        assert not any(each["stop"] for each in parts)
        assert "".join(each["content"] for each in parts) == answer["content"]
        assert [one for each in parts for one in each["tokens"]] == answer["tokens"]
        probabilities = [one for each in parts for one in each.get("completion_probabilities", [])]
        assert probabilities == answer.pop("completion_probabilities", [])
        for each in (last, answer):
            for name in ("content", "tokens", "timings"):
                each.pop(name)
            each["generation_settings"].pop("stream")
            each["generation_settings"].pop("seed")
        assert last == answer


@pytest.mark.parametrize(
    ("text", "fields", "stop_type", "word"),
    [
        ("abc", {}, "eos", ""),
        ("abc", {"n_predict": 2}, "limit", ""),
        ("abcd", {"stop": ["c"]}, "word", "c"),
        ("a\nb", {"n_indent": 2}, "limit", ""),
    ],
)
async def test_stop_type_is_reason_for_end(text: str, fields: dict[str, Any], stop_type: str, word: str) -> None:
    async with open_api(FakeEngine(scripted(text.encode(), EOS), eos=[EOS])) as api:
        answer = await api.post("/completion", {"prompt": "Hi", **fields})
    assert (answer["stop_type"], answer["stopping_word"], answer["truncated"]) == (stop_type, word, False)
    assert answer["has_new_line"] is ("\n" in answer["content"])


async def test_large_body_is_resolved_in_worker(api: Api) -> None:
    body = {"prompt": "Hi", "n_predict": 3, "n_indent": 2, "samplers": ["top_k"], "comment": "x" * 5_000}
    answer = await api.post("/completion", body)
    assert (answer["tokens_predicted"], answer["prompt"]) == (3, "Hi")


async def test_answer_that_fills_the_context_is_truncated() -> None:
    async with open_api(FakeEngine(hashed(b"a"), max_model_len=32)) as api:
        answer = await api.post("/completion", {"prompt": "Hi", "return_tokens": True})
    assert (answer["truncated"], answer["stop_type"], answer["tokens_cached"]) == (True, "limit", 32)
    assert answer["tokens"] == [97] * 30


@pytest.mark.parametrize(
    ("text", "indent", "expected"),
    [
        ("a\n    b\n  c\n", 4, "a\n    b\n  "),
        ("a\n\n    b", 4, "a\n"),
        ("a\n\tb\n\t\tc\nd", 1, "a\n\tb\n\t\tc\n"),
        ("  a\nb", 0, "  a\nb"),
        ("a\n  ", 4, "a\n  "),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_answer_ends_at_less_indented_line(text: str, indent: int, expected: str, size: int) -> None:
    limiter, shown = LineLimiter(LineRule(indent)), ""
    for start in range(0, len(text), size):
        piece = text[start : start + size]
        cut = limiter.cut_delta(TextDelta(piece, (start,), 1))
        shown += piece if cut is None else cut.text
        if cut is not None:
            break
    assert shown == expected


async def test_answer_ends_with_line_after_t_max_predict_ms() -> None:
    engine = FakeEngine(scripted(b"ab\ncd\n" * 20, EOS), eos=[EOS], step_seconds=0.005)
    async with open_api(engine) as api:
        quick = await api.post("/completion", {"prompt": "Hi", "t_max_predict_ms": 20})
        assert quick["content"].endswith("\n")
        assert 3 <= len(quick["content"]) < 60
        assert quick["stop_type"] == "limit"
        assert engine.aborted, "the engine stops too"
        assert (await api.post("/completion", {"prompt": "Hi", "n_predict": 9, "t_max_predict_ms": -1}))["content"]


async def test_sampling_fields_reach_engine() -> None:
    async with open_api(FakeEngine(hashed(b"ab"))) as api:
        body = {"prompt": [72, 105], "n_predict": 2, "seed": 7, "temperature": 0.5, "min_p": 0.1, "repeat_penalty": 1.5}
        body |= {"presence_penalty": 0.5, "ignore_eos": True, "logit_bias": [["ab", 2.0], [99, False]]}
        answer = await api.post("/completion", {**body, "dry_multiplier": 0.0, "n_keep": 0, "priority": 3})
        seen: EngineCoreRequest = api.engine.seen[-1]
        assert (seen.prompt_ids, seen.seed, seen.priority) == ([72, 105], 7, 3)
        assert (seen.params.temperature, seen.params.min_p, seen.params.repetition_penalty) == (0.5, 0.1, 1.5)
        assert seen.params.logit_bias == {97: 2.0, 98: 2.0, 99: -100.0}
        assert (answer["prompt"], answer["generation_settings"]["seed"]) == ("Hi", 7)
        body = {"prompt": "a", "n_predict": 1, "samplers": ["min_p", "\ud800"], "temperature": 0.5}
        answer = await api.http.post("/completion", content=json.dumps(body))
        assert answer.json()["generation_settings"]["samplers"] == ["min_p"]
        assert answer.headers["x-ignored-params"] == "samplers.?"
        assert api.engine.seen[-1].params.temperature == 1.0, "samplers leaves temperature out"
        await api.post("/completion", {"prompt": "a", "n_predict": 1, "json_schema": {"type": "integer"}})
        assert api.engine.seen[-1].params.grammar.kind == "json"  # type: ignore[union-attr]
        await api.post("/completion", {"prompt": "a", "n_predict": 1, "grammar": 'root ::= "ab"'})
        assert api.engine.seen[-1].params.grammar.kind == "lark"  # type: ignore[union-attr]


async def test_samplers_choose_which_rare_filters_apply() -> None:
    """Names and fields are those of llama.cpp's documentation of its server."""
    neutral = {"dry_multiplier": 0.0, "top_n_sigma": -1.0, "typical_p": 1.0, "xtc_probability": 0.0}
    fields = {"dry_multiplier": 0.8, "top_n_sigma": 1.5, "typical_p": 0.7, "xtc_probability": 0.5}
    others = {"xtc_threshold": 0.2, "dry_base": 1.5, "dry_allowed_length": 4, "dry_penalty_last_n": 64}
    body = {"prompt": "a", "n_predict": 1, **fields, **others, "dry_sequence_breakers": []}
    async with open_api(FakeEngine(hashed(b"ab"))) as api:
        settings = (await api.post("/completion", body))["generation_settings"]
        assert {name: settings[name] for name in (*fields, *others)} == fields | others
        await api.post("/completion", {**body, "samplers": ["typ_p", "dry"]})
        params = api.engine.seen[-1].params
        chosen = neutral | {"typical_p": 0.7, "dry_multiplier": 0.8}
        assert {name: getattr(params, name) for name in neutral} == chosen


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/infill", VIM, "no fill-in-the-middle tokens"),
        ("/infill", {"input_prefix": "a"}, "input_suffix"),
        ("/infill", {**VIM, "input_extra": [{"filename": "a"}]}, "input_extra[0].text"),
        ("/completion", {}, "prompt"),
        ("/completion", {"prompt": [1, "two"]}, "/v1/completions takes several prompts"),
        ("/completion", {"prompt": [-1]}, "out of vocabulary"),
        ("/completion", {"prompt": []}, "prompt cannot be empty"),
        ("/completion", {"prompt": "a", "mirostat": 2}, "mirostat is not supported"),
        ("/completion", {"prompt": "a", "dry_multiplier": -1}, "dry_multiplier must be"),
        ("/completion", {"prompt": "a", "n_cmpl": 1000}, "n_cmpl"),
        ("/completion", {"prompt": "a", "n_probs": 1000}, "n_probs"),
        ("/completion", {"prompt": "a", "grammar": "root ::= x"}, "grammar"),
        ("/completion", {"prompt": "a", "grammar": "root ::= a", "json_schema": {}}, "cannot be combined"),
        ("/completion", {"prompt": "\ud800"}, "surrogate"),
        ("/completion", {"prompt": "a", "logit_bias": [["\ud800", 1]]}, "surrogate"),
        ("/completion", {"prompt": "a", "logit_bias": {"99999999999": 1}}, "logit_bias"),
        ("/completion", {"prompt": "a", "logit_bias": [[5]]}, r"logit_bias[0][1]: Field required"),
    ],
)
async def test_invalid_bodies_get_llama_cpps_error(idle_api: Api, path: str, body: dict[str, Any], words: str) -> None:
    response = await idle_api.http.post(path, content=json.dumps(body))
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["type"]) == (400, "invalid_request_error")
    assert words in error["message"]


async def test_too_long_prompt_error_has_both_token_counts() -> None:
    async with open_api(FakeEngine(hashed(b"a"), max_model_len=64)) as api:
        error = (await api.post("/completion", {"prompt": "a" * 100}, 400))["error"]
    assert error["type"] == "exceed_context_size_error"
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (100, 64)


async def test_engine_failure_ends_stream_with_error() -> None:
    async with open_api(FakeEngine(hashed(b"a"), fail_at=2)) as api:
        events = await stream(api, "/completion", {"prompt": "Hi", "n_predict": 9})
    assert events[-1]["error"]["code"] == 500
    assert events[-1]["error"]["type"] == "server_error"


async def test_strict_mode_refuses_fields_without_effect() -> None:
    async with open_coder(FakeEngine(hashed(b"a")), strict=True) as api:
        error = (await api.post("/infill", VIM, 400))["error"]
        assert "id_slot" in error["message"]
        effective = {name: each for name, each in VIM.items() if name not in ("id_slot", "t_max_prompt_ms")}
        await api.post("/infill", {**effective, "n_predict": 1})


async def test_receipt_comes_with_answer() -> None:
    async with open_api(FakeEngine(hashed(b"ab"))) as api:
        body, headers = {"prompt": "Hi", "n_predict": 3, "response_fields": ["content"]}, {"X-Receipt": "1"}
        whole = (await api.http.post("/completion", json=body, headers=headers)).json()
        assert set(whole) == {"content", "receipt"}
        streamed = await api.http.post("/completion", json={**body, "stream": True}, headers=headers)
        assert "receipt" in parse_events(streamed.text)[-1]


async def test_slots_show_load_and_nothing_of_requests() -> None:
    engine = FakeEngine(hashed(b"a"), step_seconds=0.02)
    async with open_api(engine, max_num_seqs=2, api_key=["k"]) as api:
        refused = await api.http.get("/slots")
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        api.http.headers["Authorization"] = "Bearer k"
        slot = {"n_ctx": 512, "speculative": False, "is_processing": False}
        assert (await api.http.get("/slots")).json() == [{"id": 0, **slot}, {"id": 1, **slot}]
        body = {"prompt": "Hi", "n_predict": 400}
        tasks = [asyncio.create_task(api.http.post("/completion", json=body)) for _ in range(2)]
        while len(engine.running) < 2 or engine.stats.running < 2:  # noqa: ASYNC110 - a poll is soon enough
            await asyncio.sleep(0.01)
        slots = (await api.http.get("/slots")).json()
        assert [(each["id"], each["is_processing"]) for each in slots] == [(0, True), (1, True)]
        full = await api.http.get("/slots?fail_on_no_slot=1")
        assert (full.status_code, full.json()["error"]["type"]) == (503, "unavailable_error")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_props_and_health_have_fields_that_plugins_read(api: Api) -> None:
    assert (await api.http.get("/props")).json()["default_generation_settings"]["n_ctx"] == 512
    assert (await api.http.get("/health")).json()["status"] == "ok"
