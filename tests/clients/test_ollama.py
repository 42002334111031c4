"""Ollama's SDK: chat, generate, embeddings, models and errors."""

from __future__ import annotations

from typing import Any

import ollama
import pytest

MODEL = "quire-demo"
HELLO = [{"role": "user", "content": "Tell me of a fox."}]
GREEDY = {"temperature": 0, "num_predict": 12}


def remember(what: str) -> str:
    """Remember a text.

    Args:
        what: The text.
    """
    return what


@pytest.fixture
def client(server: Any) -> ollama.Client:
    return ollama.Client(host=server.url)


def test_ollama_chat_is_same_whole_and_streamed(client: ollama.Client) -> None:
    whole = client.chat(MODEL, HELLO, options=GREEDY)
    assert whole.message.content
    assert (whole.done, whole.done_reason, whole.eval_count) == (True, "length", 12)
    parts = list(client.chat(MODEL, HELLO, options=GREEDY, stream=True))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert parts[-1].prompt_eval_count == whole.prompt_eval_count


def test_ollama_generate_is_same_whole_and_streamed_when_raw(client: ollama.Client) -> None:
    assert client.generate(MODEL, "Once", options=GREEDY).response
    raw = client.generate(MODEL, "Once upon a", raw=True, options=GREEDY).response
    assert (
        "".join(part.response for part in client.generate(MODEL, "Once upon a", raw=True, stream=True, options=GREEDY))
        == raw
    )


def test_ollama_chat_format_follows_json_schema(client: ollama.Client) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    answer = client.chat(MODEL, HELLO, format=schema, options={"temperature": 0, "num_predict": 60})
    assert (answer.message.content or "").startswith('{"age":')


def test_ollama_chat_accepts_function_as_tool(client: ollama.Client) -> None:
    answer = client.chat(MODEL, HELLO, tools=[remember], options=GREEDY)
    assert answer.done


def test_ollama_embed_returns_unit_vectors(client: ollama.Client) -> None:
    first, second = client.embed(MODEL, ["a fox", "a crow"]).embeddings
    assert sum(each * each for each in first) == pytest.approx(1.0, abs=1e-4)
    assert len(first) == len(second) == len(client.embeddings(MODEL, "a fox").embedding)


def test_ollama_list_ps_and_show_return_model(client: ollama.Client) -> None:
    assert [each.model for each in client.list().models] == [MODEL]
    assert [each.model for each in client.ps().models] == [MODEL]
    assert "completion" in (client.show(MODEL).capabilities or [])


def test_ollama_sdk_raises_response_errors(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="does not exist") as raised:
        client.chat("nope", HELLO)
    assert raised.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="temperature"):
        list(client.chat(MODEL, HELLO, options={"temperature": -1}, stream=True))
