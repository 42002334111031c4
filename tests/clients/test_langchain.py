"""langchain-openai: tools, structured output, usage in streams, and embeddings."""

from __future__ import annotations

from typing import Literal

import httpx
import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

MODEL = "quire-demo"


@tool
def weather(city: Literal["Rome", "Oslo"], days: int) -> str:
    """The weather of the next days."""
    return f"{days} days of rain in {city}"


class Animal(BaseModel):
    name: Literal["fox", "crow"]
    legs: int = Field(ge=2, le=4)


@pytest.fixture(scope="module")
def chat(url: str, closing: dict[str, int]) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL, base_url=url, api_key="none", max_tokens=200, seed=3, max_retries=0, logit_bias=closing
    )


@pytest.mark.parametrize("choice", ["any", "weather"])
@pytest.mark.parametrize("strict", [None, True])
def test_langchain_tool_call_and_result_round_trip(chat: ChatOpenAI, choice: str, strict: bool | None) -> None:
    bound = chat.bind_tools([weather], tool_choice=choice, parallel_tool_calls=False, strict=strict)
    question = HumanMessage("What is the weather in Rome?")
    answer = bound.invoke([question])
    assert isinstance(answer, AIMessage)
    assert answer.response_metadata["finish_reason"] == "tool_calls"
    (call,) = answer.tool_calls
    assert call["name"] == "weather"
    assert call["args"]["city"] in ("Rome", "Oslo")
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage)
    last = chat.bind(max_tokens=8).invoke([question, answer, result])
    assert last.content
    plain = chat.bind(max_tokens=1).invoke([question])
    assert last.usage_metadata["input_tokens"] > plain.usage_metadata["input_tokens"], (
        "the call and its result are shown"
    )


def test_langchain_tool_call_is_same_whole_and_streamed(chat: ChatOpenAI) -> None:
    bound = chat.bind_tools([weather], tool_choice="any", parallel_tool_calls=False)
    whole = bound.invoke("Rome?")
    parts = list(bound.stream("Rome?"))
    streamed = parts[0]
    for part in parts[1:]:
        streamed += part
    assert isinstance(streamed, AIMessageChunk)
    assert [(call["name"], call["args"]) for call in streamed.tool_calls] == [
        (call["name"], call["args"]) for call in whole.tool_calls
    ]
    assert not streamed.invalid_tool_calls


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_structured_output_returns_model(
    chat: ChatOpenAI, method: Literal["json_schema", "function_calling"]
) -> None:
    answer = chat.with_structured_output(Animal, method=method).invoke("Which animal?")
    assert isinstance(answer, Animal)


def test_langchain_structured_output_streams_valid_object(chat: ChatOpenAI) -> None:
    parts = list(chat.with_structured_output(Animal.model_json_schema(), method="json_schema").stream("Which?"))
    assert Animal.model_validate(parts[-1])


def test_langchain_stream_usage_equals_whole_usage(chat: ChatOpenAI) -> None:
    short = chat.bind(max_tokens=10)
    whole = short.invoke("Tell me a story.")
    parts = list(short.stream("Tell me a story.", stream_usage=True))
    streamed = parts[0]
    for part in parts[1:]:
        streamed += part
    assert streamed.content == whole.content
    assert streamed.usage_metadata == whole.usage_metadata
    assert whole.usage_metadata["output_tokens"] == 10


def test_langchain_completion_is_same_whole_streamed_and_batched(url: str) -> None:
    llm = OpenAI(model=MODEL, base_url=url, api_key="none", max_tokens=12, temperature=0)
    text = llm.invoke("Once upon a time")
    assert text
    assert "".join(llm.stream("Once upon a time")) == text
    assert llm.batch(["Once upon a time"] * 2) == [text] * 2


def test_langchain_embeddings_equal_embeddings_endpoint(url: str) -> None:
    # Otherwise the client sends ids of OpenAI's vocabulary.
    vectors = OpenAIEmbeddings(model=MODEL, base_url=url, api_key="none", check_embedding_ctx_length=False)
    texts = ["The fox sleeps.", "A crow sings in the rain.", "Bread is baked in Rome."]
    data = httpx.post(f"{url}/embeddings", json={"input": texts}).json()["data"]
    expected = [each["embedding"] for each in data]
    assert vectors.embed_documents(texts) == expected
    assert vectors.embed_query(texts[1]) == expected[1]
    assert vectors.embed_documents(texts, chunk_size=2) == expected
    short = OpenAIEmbeddings(
        model=MODEL, base_url=url, api_key="none", check_embedding_ctx_length=False, dimensions=16
    ).embed_query(texts[0])
    assert len(short) == 16
    assert sum(each * each for each in short) == pytest.approx(1.0, abs=1e-5)
    store = InMemoryVectorStore.from_texts(texts, vectors)
    assert [each.page_content for each in store.similarity_search(texts[2], k=1)] == [texts[2]]
