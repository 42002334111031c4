"""`quire replay` refuses receipts that it cannot compare. A user saw: it printed "equal" and exited with 0 when nothing
had been compared, wrote a receipt's control characters to the terminal, and lost its engine at an id outside the
vocabulary (issue 56, item 6).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.engine.common.errors import InvalidRequest
from quire.engine.receipts.receipt import encode_receipt, parse_receipt_json
from quire.server.cli import main as cli
from quire.server.cli.replay import escape_unprintable


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    engine = LLM(threads=1)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def receipt(llm: LLM) -> Any:
    """A receipt as decoded JSON."""
    params = SamplingParams(max_tokens=4, seed=1, logprobs=1)
    (output,) = llm.generate("Once", params, receipts=True)
    return json.loads(encode_receipt(output.receipt))


def with_choice(receipt: Any, **fields: Any) -> Any:
    return receipt | {"choices": [receipt["choices"][0] | fields]}


def with_params(receipt: Any, **fields: Any) -> Any:
    return receipt | {"params": receipt["params"] | fields}


def test_replay_refuses_receipt_without_tokens(llm: LLM, receipt: Any) -> None:
    assert llm.replay(receipt).outcome == "equal"
    empty = with_choice(receipt, token_ids=[], versions=[], logprobs=[])
    for each in (receipt | {"choices": []}, empty, with_choice(empty, versions=[["1", 0]])):
        verdict = llm.replay(each)
        assert verdict.outcome == "refused"
        assert "nothing was compared" in verdict.what


def test_receipt_with_missing_versions_or_logprobs_is_invalid(receipt: Any) -> None:
    (choice,) = receipt["choices"]
    for fields in (
        {"versions": [["1", 5], ["1", -1]]},
        {"versions": [["1", 3]]},
        {"logprobs": []},
        {"logprobs": choice["logprobs"][:2]},
        {"logprobs": [*choice["logprobs"], 0.0]},
    ):
        with pytest.raises(InvalidRequest, match="this is not a receipt"):
            parse_receipt_json(json.dumps(with_choice(receipt, **fields)).encode())


@pytest.mark.parametrize("outside", [-1, 10**6, 2**31, 2**40])
def test_replay_refuses_receipt_with_ids_outside_vocabulary(llm: LLM, receipt: Any, outside: int) -> None:
    ids = receipt["choices"][0]["token_ids"]
    wrong = [
        receipt | {"prompts": [{"ids": [outside, *receipt["prompts"][0]["ids"]]}]},
        with_choice(receipt, token_ids=[outside, *ids[1:]]),
        with_params(receipt, logit_bias={str(outside): 1.0}),
        with_params(receipt, thinking={"tokens": 3, "end_id": outside, "begin_id": None}),
        with_params(receipt, bad_words_ids=[[1, outside]]),
        *(
            with_params(receipt, **{name: [outside]})
            for name in ("allowed_token_ids", "stop_token_ids", "logprob_token_ids")
        ),
    ]
    for each in wrong:
        verdict = llm.replay(each)
        assert verdict.outcome == "refused", verdict
        assert f"{outside} is outside" in verdict.what
    assert llm.replay(receipt).outcome == "equal"


def test_replay_refuses_receipt_with_invalid_seed_prompt_or_images(llm: LLM, receipt: Any) -> None:
    for each in (
        with_choice(receipt, seed=2**63),
        with_choice(receipt, seed=-1),
        receipt | {"prompts": [{"ids": []}]},
        receipt | {"prompts": [receipt["prompts"][0] | {"images": [[0, 99, "00"]]}]},
        receipt | {"prompts": [receipt["prompts"][0] | {"images": [[-1, 1, "00"]]}]},
    ):
        assert llm.replay(each).outcome == "refused", each
    assert llm.replay(receipt).outcome == "equal"


def test_escape_unprintable_escapes_control_characters() -> None:
    wild = "a\x1b[2J\r\n\x00\x7f\x9b\u202eb\u2028c\ud800é日"
    assert escape_unprintable(wild) == "a\\x1b[2J\\r\\n\\x00\\x7f\\x9b\\u202eb\\u2028c\\ud800é日"


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_replay_command_prints_no_control_characters_and_fails_on_refusal(
    receipt: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    wild = receipt | {"id": "a\x1b[2J\x9b\u202e"}
    lines = [with_choice(wild, token_ids=[], versions=[], logprobs=[]), with_choice(wild, token_ids=[10**6] * 4), wild]
    for receipts, status in ((lines, 1), (lines[:1], 1), (lines[2:], 0)):
        file = tmp_path / "receipts"
        file.write_text("".join(json.dumps(each) + "\n" for each in receipts))
        assert cli.main(["replay", str(file), "--threads", "1", *flags]) == status
        shown = capfd.readouterr().out
        assert all(each.isprintable() or each == "\n" for each in shown)
        assert ("equal" in shown) == (len(receipts) != 1 or status == 0 or not flags)
