"""Receipts on real engines with tiny models: replays on another engine give the same tokens or find differences."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from quire import LLM, LoRARequest, SamplingParams, StructuredOutputsParams
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.weights import Weights
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import InvalidRequest
from quire.engine.common.request_params import SamplingParams as Sent
from quire.engine.common.types import EngineCoreRequest
from quire.engine.offline.in_process_client import InProcessClient
from quire.engine.receipts.receipt import (
    ChoiceReceipt,
    ComputeInfo,
    PromptReceipt,
    Receipt,
    encode_receipt,
    parse_receipt_json,
    truncate_weight_versions,
)
from tests.adapters import save_adapter
from tests.engine.test_weights import folders

__all__ = ["folders"]
PROMPT = [3 + 7 * index % 300 for index in range(40)]
OPTIONS: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 200, "threads": 1, "skip_tokenizer_init": True}


@pytest.fixture(scope="module")
def llm(folders: tuple[Path, Path]) -> Iterator[LLM]:
    made = LLM(str(folders[0]), **OPTIONS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def other(folders: tuple[Path, Path]) -> Iterator[LLM]:
    """Other weights and a short context."""
    made = LLM(str(folders[1]), **{**OPTIONS, "num_kv_blocks": 20, "max_model_len": 90})
    yield made
    made.close()


def receipt_of(llm: LLM, prompt: list[int] | str = PROMPT, **params: Any) -> Receipt:
    sampling_params = SamplingParams(**{"temperature": 1.0, "max_tokens": 20, "ignore_eos": True, **params})
    (output,) = llm.generate([prompt], sampling_params, use_tqdm=False, receipts=True)
    assert output.receipt is not None
    assert [each.token_ids for each in output.receipt.choices] == [each.token_ids for each in output.outputs]
    return parse_receipt_json(encode_receipt(output.receipt))  # as it is read from a file


def test_receipt_replay_reproduces_sampled_answers(llm: LLM, folders: tuple[Path, Path]) -> None:
    """Unseeded, with several choices, penalties, drafts and log probabilities; replayed with other batches and
    prefixes.
    """
    guessing = LLM(str(folders[0]), **OPTIONS, speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    params_of_requests: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"n": 3, "logprobs": 2},
        {"seed": 7, "n": 2, "top_p": 0.8, "top_k": 40, "prompt_logprobs": 0},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "logit_bias": {5: 2.0, 9: -3.0}, "min_tokens": 4},
        {"dry_multiplier": 0.8, "xtc_probability": 0.5, "xtc_threshold": 0.001, "dry_sequence_breakers": []},
    ]
    receipts = [receipt_of(guessing, PROMPT * 2, **params) for params in params_of_requests]
    guessing.close()
    assert len({each.seed for receipt in receipts for each in receipt.choices}) == 8
    for receipt in [*receipts, *reversed(receipts)]:  # in the second round the prompt is cached
        verdict = llm.replay(receipt)
        assert (verdict.outcome, verdict.warning) == ("equal", ""), verdict
        assert verdict.tokens == sum(len(each.token_ids) for each in receipt.choices)


def with_changed_choice(receipt: Receipt, **fields: Any) -> Receipt:
    """The receipt with other fields in its first choice."""
    first = msgspec.structs.replace(receipt.choices[0], **fields)
    return msgspec.structs.replace(receipt, choices=[first, *receipt.choices[1:]])


def test_replay_reports_first_difference(llm: LLM) -> None:
    receipt = receipt_of(llm, logprobs=0, prompt_logprobs=0)
    (choice,) = receipt.choices
    assert choice.logprobs is not None
    assert choice.prompt_logprobs is not None
    assert len(choice.prompt_logprobs) == len(PROMPT) - 1
    ids = [*choice.token_ids[:7], (choice.token_ids[7] + 1) % 320, *choice.token_ids[8:]]
    verdict = llm.replay(with_changed_choice(receipt, token_ids=ids))
    assert verdict.outcome == "different"
    there, here = (f"'token_id:{each}' ({each})" for each in (ids[7], choice.token_ids[7]))
    assert verdict.what == f"token 7: expected {there}, got {here}"
    one_bit = torch.tensor(choice.logprobs[3]).nextafter(torch.tensor(0.0)).item()
    logprobs = [*choice.logprobs[:3], one_bit, *choice.logprobs[4:]]
    assert llm.replay(with_changed_choice(receipt, logprobs=logprobs)).what.startswith(
        "log probability of token 3: expected"
    )
    prompt = [*choice.prompt_logprobs[:5], 0.0, *choice.prompt_logprobs[6:]]
    assert "prompt's token 6" in llm.replay(with_changed_choice(receipt, prompt_logprobs=prompt)).what
    assert llm.replay(with_changed_choice(receipt, seed=choice.seed ^ 1)).outcome == "different"
    longer = with_changed_choice(
        receipt,
        token_ids=[*choice.token_ids, 5],
        logprobs=[*choice.logprobs, -1.0],
        versions=[("1", len(choice.token_ids) + 1)],
    )
    assert llm.replay(longer).what.endswith("expected 'token_id:5' (5), got the end")


def test_replay_names_differing_weights_tokenizer_or_config(llm: LLM, other: LLM) -> None:
    receipt = receipt_of(llm)
    verdict = other.replay(receipt)
    assert verdict.outcome == "refused"
    assert verdict.what.startswith("the weights differ: the answer was computed by ")
    long = receipt_of(llm, PROMPT * 2)
    hashes = msgspec.structs.replace(long.hashes, weights=receipt_of(other).hashes.weights)
    assert "max_model_len: it has 100 tokens" in other.replay(msgspec.structs.replace(long, hashes=hashes)).what
    for name, told in (("tokenizer", "the tokenizer of this model differ"), ("config", "config.json of this model")):
        hashes = msgspec.structs.replace(receipt.hashes, **{name: "0" * 32})
        assert told in llm.replay(msgspec.structs.replace(receipt, hashes=hashes)).what
    images = [PromptReceipt(ids=PROMPT, images=[(2, 3, "ab" * 16)])]
    assert "--image FILE" in llm.replay(msgspec.structs.replace(receipt, prompts=images)).what
    computed = msgspec.structs.replace(receipt.computed, backend="other kernels", deterministic=False)
    verdict = llm.replay(msgspec.structs.replace(receipt, computed=computed))
    assert verdict.outcome == "equal"
    assert verdict.warning.startswith("backend was other kernels, is cpu (")
    assert verdict.warning.endswith("its tokens may have depended on other requests")


@pytest.mark.slow
async def test_replay_checks_only_tokens_of_loaded_weights_version(
    folders: tuple[Path, Path], llm: LLM, other: LLM
) -> None:
    """Weights change in the middle of an answer; each engine replays only what its weights computed."""
    first, second = folders
    client = EngineClient(InProcessClient(EngineConfig(model=str(first), max_model_len=300, **OPTIONS)))
    await client.engine_core.start()
    sent = Sent(temperature=1.0, max_tokens=40, ignore_eos=True, logprobs=0)
    stream = client.submit([EngineCoreRequest(id="a", prompt_ids=PROMPT, params=sent, seed=11)])
    versions = stream.record_versions()
    record = ChoiceReceipt(index=0, seed=11)
    updated = False
    async for outputs in stream:
        for output in outputs:
            record.add_output(output)
        if len(record.token_ids) >= 12 and not updated:
            updated = True
            assert await Weights(client).update(str(second)) == "2"
    await client.engine_core.stop()
    record.versions = truncate_weight_versions(versions["a"], len(record.token_ids))
    (one, before), (two, behind) = record.versions
    assert (one, two, before + behind) == ("1", "2", 40)
    assert min(before, behind) > 5
    models = [receipt_of(each, max_tokens=1) for each in (llm, other)]
    weights = {str(number): each.hashes.weights["1"] for number, each in enumerate(models, 1)}
    receipt = Receipt(
        id="x",
        created=0,
        model="m",
        hashes=msgspec.structs.replace(models[0].hashes, weights=weights),
        computed=models[0].computed,
        adapter=None,
        params=sent,
        prompts=[PromptReceipt(ids=PROMPT)],
        choices=[record],
    )
    for each, own, others in zip((llm, other), (before, behind), (behind, before), strict=True):
        verdict = each.replay(receipt)
        assert (verdict.outcome, verdict.tokens) == ("equal", own)
        assert f"{others} more were generated by other weights" in verdict.what


@pytest.mark.slow
def test_replay_compares_adapters_by_content(folders: tuple[Path, Path], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32)
    lora_requests = [LoRARequest("a", i, str(save_adapter(tmp_path / str(i), model, 4, seed=i))) for i in (1, 2)]
    llm = LLM(str(folders[0]), **OPTIONS, enable_lora=True, max_lora_rank=8)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    (output,) = llm.generate([PROMPT], params, use_tqdm=False, lora_request=lora_requests[0], receipts=True)
    assert output.receipt is not None
    renamed = LoRARequest("another name", 3, lora_requests[0].lora_path)
    assert llm.replay(output.receipt, lora_request=renamed).outcome == "equal"
    assert "the adapter a (" in llm.replay(output.receipt, lora_request=lora_requests[1]).what
    assert "was not given: --adapter" in llm.replay(output.receipt).what
    llm.close()


def test_replay_reproduces_texts_grammars_and_stop_strings() -> None:
    """The server's half applies stop strings while the engine computes further tokens; the engine applies grammars."""
    llm = LLM(threads=1)
    schema = StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": "integer"}}})
    for params in ({"stop": ["e"]}, {"structured_outputs": schema, "max_tokens": 60}, {"ignore_eos": False}):
        receipt = receipt_of(llm, "Once upon a time", **params)
        assert llm.replay(json.loads(encode_receipt(receipt))).outcome == "equal"
        assert llm.replay({"id": "an answer", "receipt": msgspec.to_builtins(receipt)}).outcome == "equal"
    assert receipt.hashes.weights["1"] is not None
    llm.close()


@pytest.mark.slow
def test_weights_loaded_from_tensors_have_no_hash(llm: LLM, folders: tuple[Path, Path]) -> None:
    other = LLM(str(folders[0]), **OPTIONS)
    receipt_before = receipt_of(other)
    model = AutoModelForCausalLM.from_pretrained(folders[1], dtype=torch.float32)
    other.load_weights(model.state_dict().items())
    receipt = receipt_of(other)
    assert receipt.hashes.weights == {"2": None}
    assert receipt.choices[0].versions == [("2", 20)]
    assert "some that were in no file" in llm.replay(receipt).what
    assert other.replay(receipt_before).outcome == "refused"
    other.update_weights(str(folders[1]), version="2")  # a name that was used before
    receipt_after = receipt_of(other)
    assert receipt_after.hashes.weights["2"] not in (None, receipt_before.hashes.weights["1"])
    assert other.replay(receipt_after).outcome == "equal"
    other.close()


@pytest.mark.parametrize("given", ["{", "[]", '{"receipt": 3}', '{"object": "receipt"}', '{"receipt": {"id": "x"}}'])
def test_invalid_receipt_raises_invalid_request(given: str) -> None:
    with pytest.raises(InvalidRequest, match="this is not a receipt"):
        parse_receipt_json(given.encode())


def test_replay_rejects_inconsistent_choices(llm: LLM) -> None:
    receipt = receipt_of(llm, max_tokens=2)
    for wrong in (
        with_changed_choice(receipt, index=1),
        with_changed_choice(receipt, index=-1),
        with_changed_choice(receipt, versions=[("1", 3)]),
    ):
        with pytest.raises(InvalidRequest, match="do not fit"):
            llm.replay(wrong)


def test_receipt_records_compute_info(llm: LLM) -> None:
    computed = receipt_of(llm).computed
    assert isinstance(computed, ComputeInfo)
    assert (computed.dtype, computed.device, computed.deterministic) == ("float32", "cpu", True)
    assert len(computed.kernels) == 32
