"""llama-index: OpenAILike for chats, tools and completions, OpenAILikeEmbedding for embeddings."""

from __future__ import annotations

from typing import Literal

import httpx
import pytest
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

MODEL = "quire-demo"
TEXTS = ["The fox sleeps.", "A crow sings in the rain.", "Bread is baked in Rome."]


class Place(BaseModel):
    city: Literal["Rome", "Oslo"]


def weather(city: str) -> str:
    """The weather of a city."""
    return f"Rain in {city}"


@pytest.fixture(scope="module")
def llm(url: str, closing: dict[str, int]) -> OpenAILike:
    return OpenAILike(
        model=MODEL,
        api_base=url,
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=2048,
        max_tokens=200,
        max_retries=0,
        temperature=0,
        additional_kwargs={"seed": 3, "logit_bias": closing},
    )


@pytest.fixture(scope="module")
def embedding(url: str) -> OpenAILikeEmbedding:
    return OpenAILikeEmbedding(model_name=MODEL, api_base=url, api_key="none", max_retries=0)


def test_llama_index_chat_is_same_whole_and_streamed(llm: OpenAILike) -> None:
    talk = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="A story, please.")]
    short = llm.model_copy(update={"max_tokens": 12})
    whole = short.chat(talk)
    parts = list(short.stream_chat(talk))
    assert whole.message.content
    assert "".join(part.delta or "" for part in parts) == parts[-1].message.content == whole.message.content
    assert whole.raw.usage.completion_tokens == 12


def test_llama_index_completion_is_same_whole_and_streamed(url: str) -> None:
    llm = OpenAILike(model=MODEL, api_base=url, api_key="none", is_chat_model=False, max_tokens=9, temperature=0)
    assert llm.complete("Once upon a time").text
    assert (
        "".join(part.delta or "" for part in llm.stream_complete("Once upon a time"))
        == llm.complete("Once upon a time").text
    )


def test_llama_index_tool_call_and_result_round_trip(llm: OpenAILike) -> None:
    tool = FunctionTool.from_defaults(weather, fn_schema=Place)
    question = ChatMessage(role="user", content="What is the weather in Rome?")
    answer = llm.chat_with_tools([tool], chat_history=[question], tool_required=True, allow_parallel_tool_calls=False)
    (call,) = llm.get_tool_calls_from_response(answer)
    assert call.tool_name == "weather"
    result = tool(**call.tool_kwargs)
    assert result.content in ("Rain in Rome", "Rain in Oslo")
    back = ChatMessage(role="tool", content=result.content, additional_kwargs={"tool_call_id": call.tool_id})
    short = llm.model_copy(update={"max_tokens": 8})
    assert short.chat([question, answer.message, back]).message.content


def test_llama_index_embeddings_equal_embeddings_endpoint(embedding: OpenAILikeEmbedding, url: str) -> None:
    data = httpx.post(f"{url}/embeddings", json={"input": TEXTS}).json()["data"]
    expected = [each["embedding"] for each in data]
    assert embedding.get_text_embedding_batch(TEXTS) == expected
    assert embedding.get_query_embedding(TEXTS[1]) == expected[1]


def test_llama_index_retriever_finds_matching_document(embedding: OpenAILikeEmbedding) -> None:
    index = VectorStoreIndex.from_documents([Document(text=text) for text in TEXTS], embed_model=embedding)
    (node,) = index.as_retriever(similarity_top_k=1).retrieve(TEXTS[2])
    assert node.text == TEXTS[2]
    assert node.score == pytest.approx(1.0, abs=1e-5)
