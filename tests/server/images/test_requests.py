"""Images in requests of every API: the whole server on a tiny SmolVLM, its engine in this process."""

from __future__ import annotations

import base64
import io
import json
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from quire.engine.common.errors import InvalidRequest
from quire.engine.images.multimodal_prompt import make_multimodal_prompt_builder
from quire.engine.text.tokenizer import Tokenizer
from quire.server.config import ServerConfig
from quire.server.resolve.chat import resolve_chat
from quire.server.served_model import ServedModelSpec
from tests.server.api import Api, open_api
from tests.server.fake import FakeEngine, hashed
from tests.server.images.serving import serving
from tests.tiny_models import VOCAB
from tests.tiny_vision import MARK, MARK_ID, TILE_TOKENS, picture, processor, save_tiny_vision

CHAT = "/v1/chat/completions"
SAMPLING = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vision(tmp_path_factory.mktemp("vision"), max_position_embeddings=2048)


@pytest.fixture(scope="module")
async def api(path: Path) -> AsyncIterator[Api]:
    options = {"served_model_name": ["tiny"], "num_kv_blocks": 256, "allowed_media_domains": ["*.example.com"]}
    async with serving(ServerConfig(model=str(path), **options)) as api:
        yield api


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def data_url(content: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def asking(*urls: str, text: str = "What?", **detail: str) -> list[dict[str, Any]]:
    images = [{"type": "image_url", "image_url": {"url": url, **detail}} for url in urls]
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]


def tokens_of(path: Path, *images: Image.Image, **options: Any) -> list[int]:
    """Return the token ids of transformers' prompt for `asking` about these images."""
    hf_processor = processor(path)
    talk = [{"role": "user", "content": [*[{"type": "image"}] * len(images), {"type": "text", "text": "What?"}]}]
    text = hf_processor.apply_chat_template(talk, add_generation_prompt=True)
    ids = hf_processor(text=[text], images=[list(images)], add_special_tokens=False, **options)["input_ids"][0]
    return [int(each) for each in ids]


async def test_openai_client_image_prompt_equals_transformers(api: Api, path: Path) -> None:
    images = [picture(1, 200, 120), picture(2, 64, 64)]
    messages = asking(data_url(file_of(images[0])), data_url(file_of(images[1], "WEBP", lossless=True), "webp"))
    chat = await api.openai.chat.completions.create(
        model="tiny", messages=messages, max_tokens=8, temperature=0, extra_body={"return_token_ids": True}
    )
    expected_ids = tokens_of(path, *images)
    assert chat.usage is not None
    assert chat.usage.prompt_tokens == len(expected_ids)
    assert chat.model_dump()["prompt_token_ids"] == expected_ids
    again = await api.openai.chat.completions.create(
        model="tiny",
        messages=messages,
        max_tokens=8,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage = "", None
    async for chunk in again:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert text == chat.choices[0].message.content
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == (len(expected_ids) - 1) // 16 * 16


async def test_every_api_builds_same_prompt_for_image(api: Api, path: Path) -> None:
    image = picture(3, 120, 200)
    file = file_of(image)
    url, encoded = data_url(file), base64.b64encode(file).decode()
    chat = await api.post(CHAT, {"messages": asking(url), **SAMPLING})
    expected_text, count = chat["choices"][0]["message"]["content"], len(tokens_of(path, image))
    source = {"type": "base64", "media_type": "image/png", "data": encoded}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": "What?"}]
    body = {"messages": [{"role": "user", "content": blocks}], "model": "tiny"}
    message = await api.post("/v1/messages", {**body, "max_tokens": 8, "temperature": 0, "ignore_eos": True})
    usage = message["usage"]
    assert message["content"][0]["text"] == expected_text
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == count
    assert await api.post("/v1/messages/count_tokens", body) == {"input_tokens": count}
    parts = [{"type": "input_image", "image_url": url, "detail": "auto"}, {"type": "input_text", "text": "What?"}]
    responses_body = {"input": [{"role": "user", "content": parts}], "max_output_tokens": 8, "temperature": 0}
    response = await api.post("/v1/responses", {**responses_body, "ignore_eos": True})
    assert response["output"][0]["content"][0]["text"] == expected_text
    assert response["usage"]["input_tokens"] == count
    options = {"num_predict": 8, "temperature": 0}
    ollama_body = {"messages": [{"role": "user", "content": "What?", "images": [encoded]}], "stream": False}
    ollama = await api.post("/api/chat", {**ollama_body, "options": options})
    assert ollama["prompt_eval_count"] == count
    one = await api.post("/api/generate", {"prompt": "What?", "images": [encoded], "stream": False, "options": options})
    assert one["response"] == ollama["message"]["content"]
    tokens = await api.post("/tokenize", {"messages": asking(url)})
    assert tokens["tokens"] == tokens_of(path, image)


class FakeImageFetcher:
    """An image fetcher that finds the same image at every URL."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def fetch_images(self, urls: Mapping[str, str], hold: Callable[[int], None]) -> dict[str, bytes]:
        self.asked.extend(urls)
        return dict.fromkeys(urls, PNG)


async def test_image_url_is_fetched_once_and_equals_data_url(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    fetcher = FakeImageFetcher()
    monkeypatch.setattr(api.runtime, "image_fetcher", fetcher)
    url = "https://pictures.example.com/cat.png"
    by_address = await api.post(CHAT, {"messages": asking(url, url), **SAMPLING, "logprobs": True})
    assert fetcher.asked == [url]
    by_data_url = await api.post(CHAT, {"messages": asking(*[data_url(PNG)] * 2), **SAMPLING, "logprobs": True})
    assert by_address["choices"] == by_data_url["choices"]


async def test_image_urls_are_rejected_by_default(path: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(path)
    source = ServedModelSpec(
        ServerConfig(),
        tokenizer,
        VOCAB,
        {},
        2048,
        multimodal_prompt_builder=make_multimodal_prompt_builder(path, tokenizer),
    )
    body = json.dumps({"messages": asking("https://example.com/a.png")}).encode()
    with pytest.raises(InvalidRequest, match="does not download images: send a data: URL"):
        resolve_chat(body, source.build_served_model(expendable=True), ServerConfig())


async def test_low_detail_image_uses_one_tile(api: Api, path: Path) -> None:
    image = picture(4, 300, 100)
    response = await api.post("/tokenize", {"messages": asking(data_url(file_of(image)), detail="low")})
    assert response["tokens"] == tokens_of(path, image, do_image_splitting=False)


async def test_image_chat_supports_several_choices_and_beams(api: Api) -> None:
    messages = asking(data_url(file_of(picture(5, 100, 100))))
    several = {**SAMPLING, "n": 3, "temperature": 1, "seed": 4}
    first = await api.post(CHAT, {"messages": messages, **several})
    assert await api.post(CHAT, {"messages": messages, **several}) | {"id": 0, "created": 0, "usage": 0} == first | {
        "id": 0,
        "created": 0,
        "usage": 0,
    }
    beams = await api.post(CHAT, {"messages": messages, "n": 2, "use_beam_search": True, "max_tokens": 3})
    assert len(beams["choices"]) == 2


async def test_chat_prompt_combines_tools_and_images(api: Api) -> None:
    function = {"name": "look_up", "description": "Looks up.", "parameters": {"type": "object", "properties": {}}}
    call = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
    image = asking(data_url(file_of(picture(5, 40, 40))))
    answered = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "A cat."},
    ]
    body = {"messages": [*image, *answered, *image], "tools": [{"type": "function", "function": function}]}
    chat = await api.post(CHAT, {**body, **SAMPLING, "tool_choice": "none"})
    tokens = await api.post("/tokenize", body)
    assert chat["usage"]["prompt_tokens"] > 2 * 16
    assert tokens["tokens"].count(MARK_ID) == 2 * TILE_TOKENS * 5


async def test_image_chat_obeys_structured_outputs(api: Api) -> None:
    body = {
        "messages": asking(data_url(file_of(picture(5, 100, 100)))),
        "structured_outputs": {"choice": ["cat", "dog"]},
    }
    chat = await api.post(CHAT, body)
    assert chat["choices"][0]["message"]["content"] in ("cat", "dog")


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header claims this many pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return len(content).to_bytes(4, "big") + kind + content + zlib.crc32(kind + content).to_bytes(4, "big")

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


WHERE = "messages[0].content[0].image_url.url"
PNG = file_of(picture(1, 90, 90))


@pytest.mark.parametrize(
    ("url", "said"),
    [
        (data_url(bomb(30_000, 30_000)), "pixels"),
        (data_url(bomb(6000, 6000)), "the image has 6000 x 6000 pixels"),
        (data_url(bomb(0, 10)), ""),
        (data_url(PNG[: len(PNG) // 2]), "cannot be decoded"),
        (data_url(b"not an image"), "is not a PNG, JPEG, WEBP or GIF file"),
        (data_url(file_of(picture(1, 9, 9), "BMP")), "is not a PNG, JPEG, WEBP or GIF file"),
        (data_url(file_of(picture(1, 9, 9), "TIFF")), "is not a PNG, JPEG, WEBP or GIF file"),
        (data_url(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"), "is not a PNG, JPEG, WEBP or GIF file"),
        ("data:image/png;base64,@@@", "its base64 is not valid"),
        ("data:image/png,abc", "in base64"),
        ("file:///etc/passwd", "must be a data: URL"),
        ("ftp://127.0.0.1/a.png", "must be a data: URL"),
        ("http://127.0.0.1/a.png", "does not download images from 127.0.0.1 (--allowed-media-domains)"),
        ("", "must be a data: URL"),
    ],
)
async def test_invalid_image_is_rejected_with_field_path(api: Api, url: str, said: str) -> None:
    error = (await api.post(CHAT, {"messages": asking(url), **SAMPLING}, 400))["error"]
    assert error["message"].startswith(f"{WHERE}: ")
    assert said in error["message"]
    assert error["param"] == "messages"


BROKEN = base64.b64encode(b"no image").decode()
SAYS = "is not a PNG, JPEG, WEBP or GIF file"


@pytest.mark.parametrize(
    ("endpoint", "body", "field"),
    [
        ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": [BROKEN]}]}, "messages[0].images[0]"),
        ("/api/generate", {"prompt": "a", "images": [base64.b64encode(PNG).decode(), BROKEN]}, "images[1]"),
        (
            "/v1/messages",
            {
                "max_tokens": 3,
                "system": "s",
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "b"},
                    {"role": "user", "content": [{"type": "image", "source": {"type": "base64", "data": BROKEN}}]},
                ],
            },
            "messages[2].content[0].source",
        ),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": f"data:;base64,{BROKEN}"}]}]},
            "input[0].content[0].image_url",
        ),
    ],
)
async def test_every_api_reports_image_error_at_request_field(
    api: Api, endpoint: str, body: dict[str, Any], field: str
) -> None:
    error = (await api.post(endpoint, {"model": "tiny", **body}, 400))["error"]
    assert (error if isinstance(error, str) else error["message"]) == f"{field}: {SAYS}"
    by_address = json.loads(json.dumps(body).replace(f"data:;base64,{BROKEN}", "http://127.0.0.1/a.png"))
    if endpoint == "/v1/responses":
        error = (await api.post(endpoint, by_address, 400))["error"]
        assert error["message"].startswith(f"{field}: this server does not download images from 127.0.0.1")
        assert error["param"] == "input"


FUNCTION = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize(
    ("endpoint", "part", "kind"),
    [
        (CHAT, {"type": "input_audio", "input_audio": {"data": BROKEN, "format": "wav"}}, "input_audio"),
        (CHAT, {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}, "video_url"),
        ("/tokenize", {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AAAA"}}, "audio_url"),
        ("/v1/responses", {"type": "input_audio", "input_audio": {"data": BROKEN, "format": "wav"}}, "input_audio"),
        ("/v1/responses", {"type": "input_file", "file_id": "file-1"}, "input_file"),
        ("/v1/messages", {"type": "document", "source": {"type": "text", "data": "a"}}, "document"),
    ],
)
async def test_audio_video_and_file_parts_are_rejected(
    api: Api, endpoint: str, part: dict[str, Any], kind: str
) -> None:
    messages = "input" if endpoint == "/v1/responses" else "messages"
    error = (await api.post(endpoint, {messages: [{"role": "user", "content": [part]}], "max_tokens": 3}, 400))["error"]
    assert error["message"].endswith(f"only text and images are read, got a content part of type {kind}")


async def test_tool_result_images_give_same_prompt_in_every_api(api: Api, path: Path) -> None:
    """The template renders images where they stand in the result, so the prompt is the same through every API."""
    image = picture(8, 90, 60)
    url, encoded = data_url(file_of(image)), base64.b64encode(file_of(image)).decode()
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    result_content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "A view."}]
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": result_content},
    ]
    tools = [{"type": "function", "function": FUNCTION}]
    body = {"messages": messages, "tools": tools, "tool_choice": "none", **SAMPLING}
    chat = await api.post(CHAT, {**body, "return_token_ids": True})
    ids, expected_text = chat["prompt_token_ids"], chat["choices"][0]["message"]["content"]
    tiles = ids.count(MARK_ID) // TILE_TOKENS
    assert tiles * TILE_TOKENS == ids.count(MARK_ID) > 0
    assert ids.count(MARK_ID) == tokens_of(path, image).count(MARK_ID)
    source = {"type": "base64", "media_type": "image/png", "data": encoded}
    result = [{"type": "image", "source": source}, {"type": "text", "text": "A view."}]
    blocks = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": result}]},
    ]
    messages_body = {
        "model": "tiny",
        "messages": blocks,
        "tools": [{"name": "look", "description": "Looks.", "input_schema": FUNCTION["parameters"]}],
    }
    message = await api.post(
        "/v1/messages",
        {**messages_body, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "tool_choice": {"type": "none"}},
    )
    assert message["content"][0]["text"] == expected_text
    assert message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"] == len(ids)
    output = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "A view."}]
    items = [
        {"role": "user", "content": "Look."},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": output},
    ]
    responses_body = {"input": items, "tools": [{"type": "function", **FUNCTION}], "tool_choice": "none"}
    response = await api.post(
        "/v1/responses", {**responses_body, "max_output_tokens": 8, "temperature": 0, "ignore_eos": True}
    )
    assert response["usage"]["input_tokens"] == len(ids)
    assert response["output"][0]["content"][0]["text"] == expected_text
    ollama = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]},
        {"role": "tool", "content": "A view.", "images": [encoded]},
    ]
    options = {"num_predict": 8, "temperature": 0}
    ollama_response = await api.post(
        "/api/chat", {"messages": ollama, "tools": tools, "stream": False, "options": options}
    )
    described = await api.post(CHAT, body | {"tool_choice": "auto"})
    assert ollama_response["prompt_eval_count"] == described["usage"]["prompt_tokens"]


async def test_invalid_tool_result_image_is_rejected_with_field_path(api: Api) -> None:
    result = [{"type": "image", "source": {"type": "base64", "data": BROKEN}}]
    blocks = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": result}]},
    ]
    error = (await api.post("/v1/messages", {"model": "tiny", "messages": blocks, "max_tokens": 3}, 400))["error"]
    assert error["message"] == f"messages[2].content[0].content[0].source: {SAYS}"
    output = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "ftp://x"}]
    items = [
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": output},
    ]
    error = (await api.post("/v1/responses", {"input": items}, 400))["error"]
    assert error["message"].startswith("input[1].output[1].image_url: must be a data: URL")


def test_tool_result_image_rejected_when_template_drops_image(path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m['role'] }}: "
        "{% for part in m['content'] if m['role'] == 'user' or part['type'] == 'text' %}"
        "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}"
        "{% for c in m['tool_calls'] or [] %}{{ c['function']['name'] }}{{ c['function']['arguments'] }}{% endfor %}\n"
        "{% endfor %}"
    )
    config, tokenizer = ServerConfig(), Tokenizer.from_pretrained(path, template)
    model = ServedModelSpec(
        config, tokenizer, VOCAB, {}, 2048, multimodal_prompt_builder=make_multimodal_prompt_builder(path, tokenizer)
    ).build_served_model(expendable=True)
    result = {"role": "tool", "tool_call_id": "c", "content": asking(data_url(PNG))[0]["content"]}
    body = json.dumps({"messages": [*asking(data_url(PNG)), result]}).encode()
    with pytest.raises(InvalidRequest, match=r"messages\[1\]\.content\[0\]\.image_url\.url: this model's chat t"):
        resolve_chat(body, model, config)


async def test_chat_rejects_images_beyond_context_or_in_wrong_place(api: Api) -> None:
    url = data_url(PNG)
    error = (await api.post(CHAT, {"messages": asking(*[url] * 40)}, 400))["error"]
    assert error["code"] == "context_length_exceeded"
    error = (await api.post(CHAT, {"messages": asking(url), "truncate_prompt_tokens": 9}, 400))["error"]
    assert error["param"] == "truncate_prompt_tokens"
    error = (await api.post(CHAT, {"messages": asking(url, text=f"a {MARK}")}, 400))["error"]
    assert "text may not hold it" in error["message"]
    turn = {"role": "assistant", "content": asking(url)[0]["content"]}
    error = (await api.post(CHAT, {"messages": [*asking(url), turn, *asking(url)]}, 400))["error"]
    assert "user messages and in tool results" in error["message"]


async def test_exif_rotated_gif_and_transparent_images_are_read(api: Api, path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = picture(6, 90, 60)
    response = await api.post("/tokenize", {"messages": asking(data_url(file_of(turned, "JPEG", exif=exif), "jpeg"))})
    assert response["tokens"] == tokens_of(path, turned.transpose(Image.Transpose.ROTATE_270))
    for content in (file_of(picture(7, 50, 40), "GIF"), file_of(picture(7, 50, 40).convert("RGBA"))):
        await api.post(CHAT, {"messages": asking(data_url(content)), **SAMPLING})


async def test_ollama_accepts_consecutive_user_messages(api: Api) -> None:
    messages = [{"role": "user", "content": "One."}, {"role": "user", "content": "Two."}]
    await api.post("/api/chat", {"messages": messages, "stream": False, "options": {"num_predict": 3}})


async def test_text_only_model_rejects_images() -> None:
    async with open_api(FakeEngine(hashed(b"abc"))) as blind:
        error = (await blind.post(CHAT, {"messages": asking(data_url(PNG))}, 400))["error"]
        assert error["message"] == f"{WHERE}: this model does not accept images"
        parts = [{"type": "input_image", "image_url": data_url(PNG)}]
        await blind.post("/v1/responses", {"input": [{"role": "user", "content": parts}]}, 400)
        body = {"messages": [{"role": "user", "content": "a", "images": ["aGVsbG8="]}]}
        error = await blind.post("/api/chat", body, 400)
        assert "this model does not accept images" in error["error"]
