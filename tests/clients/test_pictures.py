"""The SDKs of OpenAI, Anthropic, LangChain and Ollama send the same image to a tiny vision model: every prompt has its
tokens, and the greedy answers are equal.
"""

from __future__ import annotations

import base64
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

from tests.clients.scripted import ROOT
from tests.e2e.server import Server

MODEL, QUESTION = "tiny", "What is this?"
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
MAKE = """
import sys
from pathlib import Path
from tests.tiny_vision import picture, save_tiny_vision
folder = save_tiny_vision(Path(sys.argv[1]), max_position_embeddings=2048)
picture(1, 120, 80).save(folder / "fox.png")
"""


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """URL of a server, and the image in base64. Quire's environment makes both, because this one has no PyTorch."""
    folder, quire = tmp_path_factory.mktemp("vision"), Path(os.environ["QUIRE"])
    subprocess.run([str(quire.with_name("python")), "-c", MAKE, str(folder)], cwd=ROOT, check=True)
    options = ("--served-model-name", MODEL, "--num-kv-blocks", "256", "--threads", "1")
    server = Server(folder / "log", str(folder), *options, quire=quire)
    yield server.url, base64.b64encode((folder / "fox.png").read_bytes()).decode()
    server.stop()


@pytest.fixture(scope="module")
def wanted(seeing: tuple[str, str]) -> tuple[str, int]:
    """The answer and the number of prompt tokens, by plain HTTP."""
    url, data = seeing
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    messages = [{"role": "user", "content": [image, {"type": "text", "text": QUESTION}]}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 8, **GREEDY}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
    blind = [{"role": "user", "content": QUESTION}]
    few = httpx.post(f"{url}/tokenize", json={"model": MODEL, "messages": blind}).json()["count"]
    count = answer["usage"]["prompt_tokens"]
    assert count > few + 64, "the picture's tokens are there"
    return answer["choices"][0]["message"]["content"], count


def test_openai_sdk_images_reach_model_by_chat_and_responses(seeing: tuple[str, str], wanted: tuple[str, int]) -> None:
    url, data = seeing
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    address = f"data:image/png;base64,{data}"
    content_parts: Any = [
        {"type": "image_url", "image_url": {"url": address, "detail": "high"}},
        {"type": "text", "text": QUESTION},
    ]
    options: Any = {"model": MODEL, "messages": [{"role": "user", "content": content_parts}], "max_tokens": 8}
    chat = client.chat.completions.create(**options, extra_body=GREEDY)
    assert (chat.choices[0].message.content, chat.usage.prompt_tokens) == wanted
    chunks = client.chat.completions.create(**options, extra_body=GREEDY, stream=True)
    assert "".join(each.choices[0].delta.content or "" for each in chunks if each.choices) == wanted[0]
    parts: Any = [
        {"type": "input_image", "image_url": address, "detail": "auto"},
        {"type": "input_text", "text": QUESTION},
    ]
    response = client.responses.create(
        model=MODEL, input=[{"role": "user", "content": parts}], max_output_tokens=8, extra_body=GREEDY
    )
    assert (response.output_text, response.usage.input_tokens) == wanted
    broken = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}]
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\]\.content\[0\]\.image_url\.url: is not a PNG"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": broken}])


def test_anthropic_sdk_images_reach_model_in_messages_and_tool_results(
    seeing: tuple[str, str], wanted: tuple[str, int]
) -> None:
    url, data = seeing
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    messages: Any = [{"role": "user", "content": [image, {"type": "text", "text": QUESTION}]}]
    message = client.messages.create(model=MODEL, max_tokens=8, messages=messages, extra_body=GREEDY)
    count = message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
    assert (message.content[0].text, count) == wanted
    assert client.messages.count_tokens(model=MODEL, messages=messages).input_tokens == wanted[1]
    result: Any = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [image]}]},
    ]
    tools: Any = [{"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {}}}]
    with_image = client.messages.create(model=MODEL, max_tokens=4, messages=result, tools=tools)
    result[-1]["content"][0]["content"] = "A fox."
    without_image = client.messages.create(model=MODEL, max_tokens=4, messages=result, tools=tools)
    counts = [
        each.usage.input_tokens + (each.usage.cache_read_input_tokens or 0) for each in (with_image, without_image)
    ]
    assert counts[0] > counts[1] + 64


def test_langchain_images_reach_model_by_openai_and_anthropic(seeing: tuple[str, str], wanted: tuple[str, int]) -> None:
    url, data = seeing
    content_parts = {"type": "image", "source_type": "base64", "data": data, "mime_type": "image/png"}
    question = HumanMessage([content_parts, {"type": "text", "text": QUESTION}])
    openai_chat = ChatOpenAI(
        model=MODEL, base_url=f"{url}/v1", api_key="none", max_tokens=8, max_retries=0, extra_body=GREEDY
    )
    anthropic_chat = ChatAnthropic(
        model=MODEL, base_url=url, api_key="none", max_tokens=8, max_retries=0, model_kwargs={"extra_body": GREEDY}
    )
    for chat in (openai_chat, anthropic_chat):
        answer = chat.invoke([question])
        assert (answer.text, answer.usage_metadata["input_tokens"]) == wanted
    call = {"name": "look", "args": {}, "id": "c1", "type": "tool_call"}
    talk = [HumanMessage("Look."), AIMessage("", tool_calls=[call])]
    address = f"data:image/png;base64,{data}"
    results = {
        "openai": (openai_chat, [{"type": "image_url", "image_url": {"url": address}}]),
        "anthropic": (anthropic_chat, [content_parts]),
    }
    for name, (chat, content) in results.items():
        reply = chat.invoke([*talk, ToolMessage(content, tool_call_id="c1")])
        assert reply.usage_metadata["input_tokens"] > 100, name


def test_ollama_sdk_images_reach_model(seeing: tuple[str, str], wanted: tuple[str, int]) -> None:
    url, data = seeing
    client = ollama.Client(host=url)
    message = {"role": "user", "content": QUESTION, "images": [data]}
    answer = client.chat(model=MODEL, messages=[message], options={"num_predict": 8, "temperature": 0})
    assert answer.prompt_eval_count == wanted[1]
    assert "vision" in client.show(MODEL).capabilities
    with pytest.raises(ollama.ResponseError, match=r"images\[0\]: is not a PNG"):
        client.generate(model=MODEL, prompt=QUESTION, images=[base64.b64encode(b"no picture").decode()])
