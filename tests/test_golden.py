"""The parts of the golden set detect changes of every kind. `make golden` runs the whole set."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from tests.golden.__main__ import differences_of
from tests.golden.masks import mask, mask_log_line, rename
from tests.golden.models import capture_plans, capture_specs, capture_tokens, write_models
from tests.golden.requests import bad_requests, chats
from tests.golden.serving import merge_ndjson, metric_names, sort_choices
from tests.golden.tree import Tree
from tests.tree import ROOT


def test_mask_replaces_ids_times_and_given_strings() -> None:
    text = '{"id":"chatcmpl-0f3acc12deadbeef","created":1790000000,"text":"at 5 of 4096 tokens","dir":"/tmp/x/y"}'
    assert mask(text, {"/tmp/x": "WORK"}) == (
        '{"id":"chatcmpl-ID","created":TIME,"text":"at 5 of 4096 tokens","dir":"WORK/y"}'
    )


def test_mask_keeps_numbers_of_answers() -> None:
    assert mask("[-2.679999828338623, 12721, 16]") == "[-2.679999828338623, 12721, 16]"


def test_mask_log_line_removes_numbers() -> None:
    assert mask_log_line("2026-11-28 21:00:01,123 INFO GET /v1/models 200 in 1.52 ms") == (
        "TIME INFO GET /v1/models # in # ms"
    )


def test_rename_replaces_whole_identifiers() -> None:
    assert rename("Row(RowSpec, Row)", {"Row": "ScheduledRequest"}) == "ScheduledRequest(RowSpec, ScheduledRequest)"


def test_differences_include_texts_of_one_tree_only() -> None:
    assert list(differences_of({"a": "1", "b": "2"}, {"a": "1", "c": "3"})) == ["b", "c"]


def test_sort_choices_ignores_interleaving_of_choices() -> None:
    def event(number: int, index: int, text: str) -> str:
        return f"id: cmpl-1:{number}\ndata: " + json.dumps({"choices": [{"index": index, "text": text}]})

    one = "\n\n".join([event(1, 0, "a"), event(2, 1, "x"), event(3, 0, "b"), "data: [DONE]"])
    other = "\n\n".join([event(1, 1, "x"), event(2, 0, "a"), event(3, 0, "b"), "data: [DONE]"])
    swapped = "\n\n".join([event(1, 1, "x"), event(2, 0, "b"), event(3, 0, "a"), "data: [DONE]"])
    assert sort_choices(one) == sort_choices(other)
    assert sort_choices(one) != sort_choices(swapped)


def test_merge_ndjson_ignores_line_boundaries() -> None:
    def line(text: str, *, done: bool = False) -> str:
        return json.dumps({"message": {"role": "assistant", "content": text}, "done": done, "created_at": text})

    apart = "\n".join([line("a"), line("b"), line("", done=True)])
    assert merge_ndjson(apart) == merge_ndjson("\n".join([line("ab"), line("", done=True)]))
    assert merge_ndjson(apart) != merge_ndjson("\n".join([line("ba"), line("", done=True)]))


def test_metric_names_ignore_values_and_keep_labels() -> None:
    one = '# TYPE requests counter\nrequests{model="a",reason="stop"} 5\n'
    assert metric_names(one) == metric_names(one.replace("5", "7"))
    assert metric_names(one) != metric_names(one.replace("reason", "cause"))


def test_bad_requests_are_deterministic() -> None:
    assert list(bad_requests(50)) == list(bad_requests(50))


def test_chats_are_at_least_50_with_unique_names() -> None:
    names = [name for name, _ in chats()]
    assert len(names) == len(set(names)) >= 50


@pytest.mark.slow
def test_tree_captures_equal_themselves(tmp_path: Path) -> None:
    folders = write_models(tmp_path, ["llama", "gemma2", "images-qwen3_vl", "encoder-bert"])
    for capture in (partial(capture_plans, work=tmp_path), capture_specs, capture_tokens):
        once, again = (capture(Tree(name, ROOT), folders) for name in ("base", "head"))
        assert once
        assert differences_of(once, again) == {}
    assert all("Error" not in text for text in once.values()), once
