"""How a chat request shapes its prompt: it continues the last message, or brings a template."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from quire.engine.common.errors import ContextLengthExceeded, InvalidRequest
from quire.engine.text.conversation.chat_template import ChatRenderer
from quire.engine.text.tokenizer import Tokenizer
from quire.server.config import ServerConfig
from quire.server.resolve.prompts import SLICE_CHARACTERS, check_and_encode_texts, check_text_fits, split_into_slices
from quire.server.served_model import ServedModel, ServedModelSpec
from tests.server.api import Api, open_api
from tests.server.fake import FakeEngine, hashed
from tests.texts import CHATML, SHARED, Named, byte_level_tokenizer, real_tokenizers, sentence_piece_tokenizer
from tests.tiers import examples
from tests.tree import ROOT

PATH = "/v1/chat/completions"
TALK = [{"role": "user", "content": "Write"}, {"role": "assistant", "content": "Once upon "}]
TRIMS = CHATML.replace("message['content']", "message['content'] | trim")
REAL = sorted(SHARED.glob("templates/*.jinja"))


def prompt_of(api: Api) -> str:
    ids = api.engine.seen[-1].prompt_ids
    return byte_level_tokenizer().tokenizer.decode(ids, skip_special_tokens=False)


async def test_continue_final_message_leaves_last_turn_open(api: Api) -> None:
    await api.post(PATH, {"messages": TALK, "continue_final_message": True})
    assert prompt_of(api) == "<|im_start|>user\nWrite<|im_end|>\n<|im_start|>assistant\nOnce upon "
    await api.post(PATH, {"messages": TALK, "continue_final_message": True, "add_generation_prompt": False})
    assert prompt_of(api).endswith("Once upon ")
    await api.events(PATH, {"messages": TALK, "continue_final_message": True})
    assert prompt_of(api).endswith("Once upon ")
    await api.post(PATH, {"messages": TALK})
    assert prompt_of(api).endswith("Once upon <|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    "fields",
    [{}, {"continue_final_message": True}, {"add_generation_prompt": False}, {"chat_template_kwargs": {"a": 1}},
     {"chat_template": "{{ messages[0].content }}{{ b }}", "chat_template_kwargs": {"b": "é"}}],
)  # fmt: skip
async def test_tokenize_renders_same_prompt_as_chat(fields: dict[str, Any]) -> None:
    async with open_api(FakeEngine(hashed(b"ab")), trust_request_chat_template=True) as api:
        await api.post(PATH, {"messages": TALK, **fields})
        tokenized = await api.post("/tokenize", {"messages": TALK, **fields})
        assert tokenized["tokens"] == api.engine.seen[-1].prompt_ids


async def test_unread_template_variables_are_reported_as_ignored() -> None:
    fields = {"messages": TALK, "documents": [{"text": "x"}], "chat_template_kwargs": {"a1": 1, "messages_left": 2}}
    reads = "{{ documents }}{{ a1 }}{{ messages_left }}{{ messages }}"
    async with open_api(FakeEngine(hashed(b"ab")), trust_request_chat_template=True) as api:
        response = await api.http.post(PATH, json=fields)
        ignored = "chat_template_kwargs.a1, chat_template_kwargs.messages_left, documents"
        assert response.headers["x-ignored-params"] == ignored
        response = await api.http.post(PATH, json={**fields, "chat_template": reads})
        assert "x-ignored-params" not in response.headers


async def test_tokenize_rejects_same_template_fields_as_chat(api: Api) -> None:
    for fields, param in (
        ({"messages": TALK[:1], "continue_final_message": True}, "continue_final_message"),
        ({"prompt": "x", "continue_final_message": True}, "continue_final_message"),
        ({"messages": TALK, "chat_template": "x"}, "chat_template"),
    ):
        assert (await api.post("/tokenize", fields, 400))["error"]["param"] == param


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"messages": TALK[:1]}, "from the assistant"), ({"messages": TALK, "add_generation_prompt": True}, "exclude")],
)
async def test_continue_final_message_rejects_user_turn_and_generation_prompt(
    api: Api, fields: dict[str, Any], message: str
) -> None:
    error = (await api.post(PATH, {**fields, "continue_final_message": True}, 400))["error"]
    assert error["param"] == "continue_final_message"
    assert message in error["message"]


@pytest.mark.few(8)
@pytest.mark.parametrize("template", [CHATML, TRIMS, *(path.read_text(encoding="utf-8") for path in REAL)])
@pytest.mark.parametrize("final", ["Once upon", "Once upon ", " a\n\n", "x"])
def test_continued_message_equals_transformers(template: str, final: str) -> None:
    talk = [{"role": "user", "content": "Write"}, {"role": "assistant", "content": final}]
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    renderer = ChatRenderer({"default": template}, special)

    def render() -> str:
        return renderer.render(talk, add_generation_prompt=False, continue_final_message=True)

    try:
        (expected,), _ = render_jinja_template([talk], chat_template=template, continue_final_message=True, **special)
    except Exception:  # Quire adapts the messages
        assert render().rstrip().endswith(final.strip())
    else:
        assert render() == expected


def test_continue_raises_when_template_drops_message() -> None:
    with pytest.raises(InvalidRequest, match="does not show"):
        ChatRenderer({"default": "{{ messages[0].content }}"}, {}).render(TALK, continue_final_message=True)


async def test_request_chat_template_requires_trust_flag() -> None:
    custom_template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    body = {"messages": TALK, "chat_template": custom_template}
    async with open_api(FakeEngine(hashed(b"ab")), trust_request_chat_template=True) as api:
        await api.post(PATH, body)
        assert prompt_of(api) == "[Write][Once upon ]"
        await api.post(PATH, {"messages": TALK})
        assert prompt_of(api).startswith("<|im_start|>")
        for template in ("{% if %}", "{{ messages.x.y }}", "{% for i in range(10**9) %}x{% endfor %}"):
            await api.post(PATH, {**body, "chat_template": template}, 400)
        assert (await api.post(PATH, {**body, "chat_template": "{% x"}, 400))["error"]["param"] == "chat_template"
    async with open_api(FakeEngine(hashed(b"ab"))) as api:
        error = (await api.post(PATH, body, 400))["error"]
        assert error["param"] == "chat_template"
        assert "--trust-request-chat-template" in error["message"]
        await api.post(PATH, {**body, "chat_template": None})


def word_piece_tokenizer() -> Named:
    """Like BERT's: a word outside the vocabulary is one unknown token, however long it is; white space is dropped."""
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({"[UNK]": 0, "a": 1, "##a": 2, "b": 3}, unk_token="[UNK]")
    )
    backend.normalizer = tokenizers.normalizers.BertNormalizer()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    return Named("words", Tokenizer(backend, special_tokens={}, chat_templates={}))


TOKENIZERS = [
    *(byte_level_tokenizer(), sentence_piece_tokenizer(), word_piece_tokenizer()),
    *(Named("demo", Tokenizer.from_pretrained(ROOT / "quire" / "configs" / "demo")), *real_tokenizers()),
]


def model_of(tokenizer: Tokenizer, context: int) -> ServedModel:
    return ServedModelSpec(ServerConfig(), tokenizer, 320, {}, context_length=context).build_served_model()


@given(st.text("ab <|im_start|>\n\u0301é世\U0001f600 ", min_size=1, max_size=60), st.integers(1, 5 * SLICE_CHARACTERS))
def test_split_into_slices_preserves_text_within_bounds(piece: str, length: int) -> None:
    text = (piece * (length // len(piece) + 1))[:length]
    slices = list(split_into_slices(text))
    assert "".join(slices) == text
    assert all(len(each) <= SLICE_CHARACTERS for each in slices)
    assert all(len(each) >= SLICE_CHARACTERS // 2 for each in slices[:-1])


@pytest.mark.few(1)
@pytest.mark.parametrize("named", TOKENIZERS, ids=lambda named: named.name)
@settings(max_examples=examples(10), deadline=None)
@given(
    st.text("ab <|im_start|>\n\u0301é世\U0001f600 ", min_size=1, max_size=60) | st.text(min_size=1, max_size=9),
    st.integers(SLICE_CHARACTERS + 1, 6 * SLICE_CHARACTERS),
)
def test_only_text_beyond_context_is_rejected_before_tokenizing(named: Named, piece: str, length: int) -> None:
    text = (piece * (length // len(piece) + 1))[:length].encode(errors="replace").decode()
    ids = named.tokenizer.encode_batch([text], add_special_tokens=False)[0]
    check_text_fits(model_of(named.tokenizer, len(ids)), text, "prompt")
    assert check_and_encode_texts(model_of(named.tokenizer, len(ids)), [text], False, "prompt") == [ids]
    if len(ids) > 1000:
        with pytest.raises(ContextLengthExceeded):
            check_text_fits(model_of(named.tokenizer, len(ids) * 2 // 3), text, "prompt")


def test_overlong_text_is_rejected_after_tokenizing_bounded_part() -> None:
    tokenizer = byte_level_tokenizer().tokenizer
    asked: list[int] = []

    class Counting(Tokenizer):
        def encode_batch(self, texts: Any, *, add_special_tokens: bool = True) -> list[list[int]]:
            asked.extend(map(len, texts))
            return super().encode_batch(texts, add_special_tokens=add_special_tokens)

    counting = Counting(tokenizer.backend, special_tokens={}, chat_templates={})
    with pytest.raises(ContextLengthExceeded) as raised:
        check_and_encode_texts(model_of(counting, 40_000), ["once upon a time " * 1_000_000], True, "prompt")
    assert "is 40000 tokens, but prompt came to about 17000000 tokens" in raised.value.message
    assert sum(asked) < 70_000
    assert raised.value.param == "prompt"
    assert raised.value.code == "context_length_exceeded"
