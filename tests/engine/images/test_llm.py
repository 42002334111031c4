"""Chats and prompts with images through LLM, against transformers' processor and model."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import pytest
from PIL import Image

from quire.engine.common.errors import InvalidRequest
from quire.engine.offline.llm import LLM
from quire.engine.offline.params import SamplingParams
from tests.tiny_vision import MARK, expected, picture, save_tiny_vision

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0, prompt_logprobs=0)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vision(tmp_path_factory.mktemp("vision"), max_position_embeddings=2048)


@pytest.fixture(scope="module")
def llm(path: Path) -> LLM:
    return LLM(path, dtype="float32", num_kv_blocks=256)


def data_url(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def test_llm_chat_with_image_in_tool_message_equals_transformers(llm: LLM, path: Path) -> None:
    image = picture(4, 120, 90)
    content = [{"type": "image", "image": image}, {"type": "text", "text": "The camera's."}]
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "I look."},
        {"role": "tool", "content": content},
    ]
    (answer,) = llm.chat(messages, GREEDY, use_tqdm=False)
    template_messages = [
        {"role": turn["role"], "content": [{"type": "text", "text": turn["content"]}]}
        if isinstance(turn["content"], str)
        else {"role": turn["role"], "content": [_bare(part) for part in turn["content"]]}
        for turn in messages
    ]
    tokens = list(answer.outputs[0].token_ids)
    ids, logprobs = expected(path, template_messages, [image], tokens)
    assert answer.prompt_token_ids == ids
    actual = [step[token].logprob for step, token in zip(answer.outputs[0].logprobs or [], tokens, strict=True)]
    expected_logprobs = [float(logprobs[len(ids) - 1 + place, token]) for place, token in enumerate(tokens)]
    assert actual == pytest.approx(expected_logprobs, abs=1e-4)


def test_llm_chat_about_several_images_equals_transformers(llm: LLM, path: Path) -> None:
    images = [picture(1, 300, 200), picture(2, 90, 400), picture(3, 40, 40)]
    messages = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Compare "},
                {"type": "image", "image": images[0]},
                {"type": "text", "text": " with "},
                {"type": "image_url", "image_url": {"url": data_url(images[1])}},
            ],
        },
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": [{"type": "image_pil", "image_pil": images[2]}, {"type": "text", "text": "?"}]},
    ]
    (answer,) = llm.chat(messages, GREEDY, use_tqdm=False)
    template_messages = [
        {"role": turn["role"], "content": [_bare(part) for part in turn["content"]]}
        if isinstance(turn["content"], list)
        else {"role": turn["role"], "content": [{"type": "text", "text": turn["content"]}]}
        for turn in messages
    ]
    tokens = list(answer.outputs[0].token_ids)
    ids, logprobs = expected(path, template_messages, images, tokens)
    assert answer.prompt_token_ids == ids
    assert answer.prompt_logprobs is not None
    assert answer.outputs[0].logprobs is not None
    actual = [*answer.prompt_logprobs[1:], *answer.outputs[0].logprobs]
    for place, (row, token) in enumerate(zip(actual, [*ids[1:], *tokens], strict=True)):
        assert row is not None
        assert row[token].logprob == pytest.approx(logprobs[place, token].item(), abs=1e-4)
    assert logprobs[len(ids) - 1 : -1].argmax(-1).tolist() == tokens


def test_llm_generate_with_multi_modal_data_equals_chat(llm: LLM) -> None:
    image = picture(4, 100, 60)
    messages = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "What?"}]}]
    (chat,) = llm.chat(messages, GREEDY, use_tqdm=False)
    text = f"<|im_start|>User:{MARK}What?<end_of_utterance>\nAssistant:"
    (generated,) = llm.generate({"prompt": text, "multi_modal_data": {"image": image}}, GREEDY, use_tqdm=False)
    assert generated.prompt_token_ids == chat.prompt_token_ids
    assert generated.outputs[0].token_ids == chat.outputs[0].token_ids
    other = {"prompt": text, "multi_modal_data": {"image": [picture(5, 100, 60)]}}
    (answer,) = llm.generate(other, GREEDY, use_tqdm=False)
    assert answer.prompt_token_ids == chat.prompt_token_ids
    assert answer.prompt_logprobs != chat.prompt_logprobs


def test_llm_chat_renders_text_only_message_with_content_parts(llm: LLM) -> None:
    (answer,) = llm.chat([{"role": "user", "content": "Hello"}], GREEDY, use_tqdm=False)
    assert answer.prompt == "<|im_start|>User: Hello<end_of_utterance>\nAssistant:"


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "image", "image": "cat.png"}, "messages[0].content[0]: must be an image of Pillow, got str"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "must be a data: URL"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,%%%"}}, "its base64 is not valid"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}, "is not a PNG, JPEG"),
        ({"type": "input_audio", "input_audio": {}}, "must be text or images, got input_audio"),
    ],
)
def test_llm_chat_rejects_invalid_image_part_with_field(llm: LLM, part: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said.replace("[", r"\[")):
        llm.chat([{"role": "user", "content": [part]}], GREEDY, use_tqdm=False)


def test_llm_chat_rejects_image_token_in_text(llm: LLM) -> None:
    content = [{"type": "image", "image": picture(1, 40, 40)}, {"type": "text", "text": f"and {MARK}"}]
    with pytest.raises(InvalidRequest, match="text may not hold it"):
        llm.chat([{"role": "user", "content": content}], GREEDY, use_tqdm=False)


def _bare(part: dict[str, object]) -> dict[str, object]:
    return part if part["type"] == "text" else {"type": "image"}


def test_receipt_of_image_request_replays_with_images(llm: LLM) -> None:
    image, other = picture(6, 90, 60), picture(7, 60, 60)
    prompt = {"prompt": f"{MARK} and {MARK}", "multi_modal_data": {"image": [image, other]}}
    (answer,) = llm.generate([prompt], SamplingParams(max_tokens=4, n=2, logprobs=1), receipts=True, use_tqdm=False)
    assert llm.replay(answer.receipt, images=[other, image]).outcome == "equal"
    assert "images of LLM.replay" in llm.replay(answer.receipt, images=[image]).what
    with pytest.raises(InvalidRequest, match=r"images\[0\]: must be an image"):
        llm.replay(answer.receipt, images=["a"])
