"""Tests the parameter classes: what they reject, what the error suggests instead, and what the engine receives."""

from __future__ import annotations

import inspect
import json
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from quire import BeamSearchParams, RequestOutputKind, SamplingParams, StructuredOutputsParams, json_grammar
from quire.engine.common import request_params
from quire.engine.common.config import DEMO_MODEL
from quire.engine.common.errors import InvalidRequest
from quire.engine.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_pretrained(DEMO_MODEL)


def test_sampling_params_have_engine_fields_and_defaults() -> None:
    parameters = inspect.signature(SamplingParams).parameters
    engine_fields = {field.name: field for field in msgspec.structs.fields(request_params.SamplingParams)}
    assert engine_fields.keys() - parameters.keys() == {"bad_words_ids", "dry_sequence_breaker_ids"}
    for name in engine_fields.keys() & parameters.keys():
        assert (parameters[name].default or 0) == (engine_fields[name].default or 0), name


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"temprature": 1}, "SamplingParams has no temprature: did you mean temperature?"),
        (
            {"guided_decoding": 1},
            "has no guided_decoding: use structured_outputs=StructuredOutputsParams(json=SCHEMA)",
        ),
        ({"zzz": 1}, "SamplingParams has no zzz: known are n, temperature, "),
        ({"logits_processors": [print]}, "logits_processors are not supported: functions cannot be sent"),
        ({"bad_words": "the"}, "bad_words must be a list of strings, got 'the'"),
        ({"bad_words": [5]}, "bad_words must be a list of strings"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be -1 or at least 1"),
        ({"output_kind": "delta"}, "output_kind must be of type RequestOutputKind, got 'delta'"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs must be of type StructuredOutputsParams"),
        ({"stop": [5]}, "sampling_params: Expected `str`, got `int` - at `$.stop[0]`"),
        ({"logprobs": -2}, "logprobs must be at least 0"),
    ],
)
def test_invalid_sampling_param_error_says_correct_usage(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        SamplingParams(**wrong)
    assert said in str(error.value)
    assert error.value.param in (*wrong, "sampling_params")


@pytest.mark.parametrize("stop", ["the", ["the"], ("the",), None])
def test_stop_accepts_string_list_tuple_or_none(stop: str | list[str] | None) -> None:
    params = SamplingParams(stop=stop)
    assert params.stop == (["the"] if stop else [])
    assert params.as_sent().stop == (("the",) if stop else ())


def test_sampling_params_accept_numpy_and_torch_numbers() -> None:
    """Such numbers come from a sweep's `np.linspace` or from `rng.integers`."""
    numbers = {"temperature": np.float64(0.5), "top_p": torch.tensor(0.5), "seed": np.int64(7), "n": np.int32(2)}
    lists = {"stop_token_ids": np.array([3, 4]), "allowed_token_ids": [np.int64(5)], "logit_bias": {np.int64(5): 1.0}}
    sent = SamplingParams(**numbers, **lists, truncate_prompt_tokens=np.int64(9)).as_sent()
    assert (sent.temperature, sent.top_p, sent.seed, sent.n) == (0.5, 0.5, 7, 2)
    assert (sent.stop_token_ids, sent.allowed_token_ids, sent.logit_bias) == ((3, 4), (5,), {5: 1.0})
    with pytest.raises(InvalidRequest, match="seed"):
        SamplingParams(seed=np.float64(0.5))


def test_sampling_params_are_mutable_and_clone_is_independent() -> None:
    params = SamplingParams(stop_token_ids=[3])
    copied = params.clone()
    params.max_tokens, params.stop = 5, "x"
    assert (params.as_sent().max_tokens, params.as_sent().stop) == (5, ("x",))
    assert (copied.max_tokens, copied.stop, copied.stop_token_ids) == (16, [], [3])
    params.max_tokens = -1
    with pytest.raises(InvalidRequest, match="max_tokens must be at least 1"):
        params.as_sent()


def test_for_model_encodes_bad_words_and_structured_outputs(tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    params = SamplingParams(bad_words=["fox"], structured_outputs=StructuredOutputsParams(json=schema), logprobs=-1)
    sent = params.for_model(tokenizer, 4096)
    assert sent.bad_words_ids == tuple(
        tuple(tokenizer.encode(form, add_special_tokens=False)) for form in ("fox", " fox")
    )
    assert sent.grammar == json_grammar({**schema, "additionalProperties": False})
    assert sent.logprobs == 4096
    same = StructuredOutputsParams(json=json.dumps(schema)).as_grammar()
    assert same == sent.grammar
    with pytest.raises(InvalidRequest, match="bad_words must not contain an empty word"):
        SamplingParams(bad_words=[" "]).for_model(tokenizer, 4096)
    with pytest.raises(InvalidRequest, match="stop_token_ids has token id 4096, which is out of vocabulary"):
        SamplingParams(stop_token_ids=[4096]).for_model(tokenizer, 4096)


def test_structured_outputs_require_single_valid_constraint() -> None:
    for wrong in ({}, {"json": {}, "regex": "a"}, {"structural_tag": "x"}, {"jsn": {}}, {"choice": 5}, {"json": 5}):
        with pytest.raises(InvalidRequest):
            StructuredOutputsParams(**wrong)  # type: ignore[arg-type]
    tag = {"format": {"type": "const_string", "value": "<|endoftext|>x"}}
    assert StructuredOutputsParams(structural_tag=tag).as_grammar().text.startswith('start: "<|endoftext|>x"')
    with pytest.raises(InvalidRequest, match="only one of structured_outputs and grammar"):
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"), grammar=json_grammar({}))


def test_beam_search_params_reject_invalid_values() -> None:
    for wrong in ({"beam_width": 0}, {"beam_width": 2.0}, {"max_tokens": 0}, {"temperature": 0.5}, {"width": 2}):
        with pytest.raises(InvalidRequest, match=next(iter(wrong))):
            BeamSearchParams(**({"beam_width": 2, "max_tokens": 3} | wrong))  # type: ignore[arg-type]


def test_request_output_kinds_equal_vllm() -> None:
    assert [each.name for each in RequestOutputKind] == ["CUMULATIVE", "DELTA", "FINAL_ONLY"]
    assert SamplingParams().output_kind is RequestOutputKind.CUMULATIVE
