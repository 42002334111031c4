"""Requests, programs, the page and the reference follow one table of sampling fields."""

from __future__ import annotations

import msgspec
import pytest

from quire.engine.common.request_params import COPIED_SAMPLING_FIELDS, SamplingParams
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.completions import CompletionRequest
from tests.sampling_fields import PAGE_LIST, REFERENCE, page_list, reference


def test_generated_sampling_fields_files_are_up_to_date() -> None:
    advice = "`python -m tests.sampling_fields` writes it anew"
    assert REFERENCE.read_text(encoding="utf-8") == reference(), advice
    assert PAGE_LIST.read_text(encoding="utf-8") == page_list(), advice


@pytest.mark.parametrize("body", [ChatRequest, CompletionRequest])
def test_request_bodies_have_copied_sampling_fields(body: type[ChatRequest | CompletionRequest]) -> None:
    for row in COPIED_SAMPLING_FIELDS:
        expected = None if row.field.has_model_default else row.default
        assert body.model_fields[row.name].get_default() == expected, row.name


def test_encoded_sampling_params_keep_float_defaults() -> None:
    """Receipts need the defaults: a body's default is not the struct's own object, which msgspec would leave out."""
    floats = {row.name: row.default for row in COPIED_SAMPLING_FIELDS if row.type is float}
    assert floats.keys() <= msgspec.json.decode(msgspec.json.encode(SamplingParams(**floats))).keys()
