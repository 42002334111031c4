"""The bytes of stream chunks, which are assembled from parts, equal json's of the whole object."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from quire.engine.common.request_params import SamplingParams
from quire.server.encoding import encode_json
from quire.server.generation.choice_state import ChoiceDelta
from quire.server.generation.generation import Usage
from quire.server.generation.resolved_request import AnswerIdentity, Caller, GenerationRequest, Prompt
from quire.server.generation.response_writers.completion_chunks import ChatWriter, CompletionWriter
from tests.texts import byte_level_tokenizer

ODD = ['"', "\\", "\u2028\u2029", "\x00\x1f\x7f", "👩‍👩‍👧", "</script>", "é\ufffd\U0010ffff", "\r\n\ndata: x\n\n"]
"""Strings that a careless writer of JSON or of events gets wrong."""
TEXTS = st.one_of(st.sampled_from(ODD), st.text(st.characters(exclude_categories=["Cs"])))


def spec(*, usage: bool, token_ids: bool, model: str = "m") -> GenerationRequest:
    prompts, params = [Prompt([1], "")], SamplingParams(n=4)
    return GenerationRequest(
        identity=AnswerIdentity(id="id"),
        caller=Caller(),
        model=model,
        prompts=prompts,
        params=params,
        num_returned=4,
        include_usage=usage,
        return_token_ids=token_ids,
    )


def parse_chunk_event(text: bytes) -> dict[str, Any]:
    """Return the object of one event and check that its bytes are json's."""
    assert text.startswith(b"data: ")
    assert text.endswith(b"\n\n")
    assert text.count(b"\n") == 2, "an event's data is one line"
    chunk = json.loads(text[6:-2])
    assert text[6:-2] == json.dumps(chunk, separators=(",", ":"), ensure_ascii=False).encode()
    return chunk


@given(TEXTS, st.integers(0, 3), st.sampled_from([None, "stop", "length"]), st.booleans(), st.booleans())
def test_chunk_bytes_equal_compact_json(
    text: str, index: int, reason: str | None, usage: bool, token_ids: bool
) -> None:
    ids = [5, 6] if token_ids else ()
    delta = ChoiceDelta(index, text, [], reason, token_ids=ids)
    for kind in (ChatWriter, CompletionWriter):
        writer = kind(spec(usage=usage, token_ids=token_ids), byte_level_tokenizer().tokenizer, "fp")
        writer.weights_version = "7"
        for _ in range(2):  # the second time from the cache
            chunk = parse_chunk_event(writer.step_events([delta]))
            (choice,) = chunk["choices"]
            shown = choice["delta"].get("content", "") if kind is ChatWriter else choice["text"]
            assert (choice["index"], shown, choice["finish_reason"]) == (index, text, reason)
            assert choice["token_ids"] == (list(ids) if token_ids else None)
            assert chunk.get("usage", "none") == (None if usage else "none")
            assert chunk.get("weights_version") == (None if reason is None else "7")
        assert writer.step_events([delta, delta]) == 2 * writer.step_events([delta])
        token_usage = Usage(3, 4, 0)
        writer.set_usage(token_usage)
        assert parse_chunk_event(writer.step_events([delta]))["usage"] == token_usage.to_openai_usage()


@given(TEXTS.filter(bool), st.integers(0, 3), st.booleans())
def test_text_event_template_renders_chunk_bytes(text: str, index: int, usage: bool) -> None:
    for kind in (ChatWriter, CompletionWriter):
        request = spec(usage=usage, token_ids=False, model="m%d %b%")
        writer = kind(request, byte_level_tokenizer().tokenizer, "fp%s")
        form = writer.text_event_template(index)
        assert form is not None
        assert form % encode_json(text) == writer.step_events([ChoiceDelta(index, text, [])])
        for other in (replace(request, return_token_ids=True), replace(request, continuous_usage=True)):
            assert kind(other, byte_level_tokenizer().tokenizer, "fp").text_event_template(index) is None
