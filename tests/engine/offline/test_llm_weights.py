"""Tests `LLM` with weights passed as tensors, with sleep and wake-up, and with token ids without a tokenizer."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoModelForCausalLM

from quire import LLM, AsyncLLM, SamplingParams
from quire.engine.common.errors import ConfigError, EngineError, InvalidRequest, ModelError
from quire.engine.offline.outputs import CompletionOutput, RequestOutput
from tests.tiny_models import VOCAB, save_tiny_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel  # its import takes a second

PROMPT = [5, 6, 7, 8, 9]
PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=24, logprobs=0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with fused linears with biases and an embedding tied to the head; it has no tokenizer."""
    return save_tiny_model(tmp_path_factory.mktemp("model"), "llama-tied-biased", max_position_embeddings=4096)


def trained_model(folder: Path) -> PreTrainedModel:
    """The model with changed weights, as after training."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1 * (parameter.std() + 0.1))
    return model


def open_llm(folder: Path, **options: object) -> LLM:
    settings = {"dtype": "float32", "num_kv_blocks": 200, "threads": 1, "skip_tokenizer_init": True}
    return LLM(str(folder), **settings | options)


def generate_output(llm: LLM) -> RequestOutput:
    (generation,) = llm.generate([PROMPT], PARAMS, use_tqdm=False)
    return generation


def output(llm: LLM) -> CompletionOutput:
    """The completion without the versions of its weights."""
    return replace(generate_output(llm).outputs[0], weights_versions=[])


def max_logprob_difference(model: PreTrainedModel, generation: RequestOutput) -> float:
    """The largest absolute difference between transformers' logprobs and those of the generated tokens."""
    (output,) = generation.outputs
    assert output.logprobs is not None
    with torch.no_grad():
        logprobs = model(torch.tensor([PROMPT + output.token_ids])).logits[0].log_softmax(-1)
    pairs = [
        (float(logprobs[len(PROMPT) - 1 + place, token]), output.logprobs[place][token].logprob)
        for place, token in enumerate(output.token_ids)
    ]
    return max(abs(theirs - ours) for theirs, ours in pairs)


@pytest.mark.slow
def test_load_weights_from_tensors_equals_transformers(folder: Path) -> None:
    llm, model = open_llm(folder), trained_model(folder)
    before = generate_output(llm)
    assert before.weights_version == llm.weights_version == "1"
    assert max_logprob_difference(model, before) > 0.05, "the two weights are far apart"
    assert llm.load_weights(model.state_dict().items()) == "2"
    after = generate_output(llm)
    assert after.weights_version == "2"
    assert after.num_cached_tokens == 0
    assert max_logprob_difference(model, after) < 1e-3
    assert llm.load_weights(iter(model.named_parameters()), version="named") == llm.weights_version == "named"
    assert output(llm).token_ids == after.outputs[0].token_ids
    llm.close()


@pytest.mark.slow
def test_load_weights_quantizes_tensors_like_checkpoint_files(folder: Path, tmp_path: Path) -> None:
    model = trained_model(folder)
    model.save_pretrained(tmp_path)
    from_files = open_llm(tmp_path, quantization="int8", dtype="bfloat16")
    expected = output(from_files)
    from_files.close()
    llm = open_llm(folder, quantization="int8", dtype="bfloat16")
    assert output(llm).token_ids != expected.token_ids
    llm.load_weights(model.state_dict().items())
    assert output(llm) == expected
    llm.close()


@pytest.mark.slow
def test_failed_load_weights_keeps_checkpoint_weights(folder: Path) -> None:
    llm, model = open_llm(folder), trained_model(folder)
    before = output(llm)

    def failing_tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(model.state_dict().items())[:4]
        raise ZeroDivisionError("the trainer's own")

    bad: dict[str, torch.Tensor] = {**model.state_dict(), "model.norm.weight": torch.zeros(3)}
    for tensors, error, words in (
        (list(model.state_dict().items())[:4], ModelError, "lack"),
        (bad.items(), ModelError, "model.norm.weight has shape"),
        (failing_tensors(), ZeroDivisionError, "the trainer's own"),
    ):
        with pytest.raises(error, match=words):
            llm.load_weights(tensors)
        assert output(llm) == before
    assert llm.weights_version == "1"
    llm.close()


@pytest.mark.slow
def test_sleep_and_wake_up_keep_weights_and_output(folder: Path, tmp_path: Path) -> None:
    llm, model = open_llm(folder), trained_model(folder)
    before = output(llm)
    llm.sleep()
    llm.sleep(level=2)
    assert llm.is_sleeping()
    with pytest.raises(EngineError, match="asleep"):
        generate_output(llm)
    llm.wake_up()
    llm.wake_up()
    assert output(llm) == before
    llm.load_weights(model.state_dict().items())
    new = output(llm)
    llm.sleep()
    with pytest.raises(ConfigError, match="in no file"):
        llm.wake_up()
    llm.load_weights(model.state_dict().items())  # also wakes the engine
    assert output(llm) == new
    with pytest.raises(ModelError, match="lack"):
        llm.load_weights([])
    assert llm.is_sleeping(), "the weights before are nowhere any more"
    model.save_pretrained(tmp_path)
    assert llm.update_weights(tmp_path) == llm.weights_version == "4"
    assert output(llm) == new
    llm.sleep()
    llm.wake_up()
    assert output(llm) == new, "the weights of the update, not the first"
    llm.close()


@pytest.mark.slow
def test_load_weights_works_after_update_folder_is_deleted(folder: Path, tmp_path: Path) -> None:
    """The folder of the last update was read again, so that no weights could be loaded once it was deleted."""
    llm, model = open_llm(folder), trained_model(folder)
    shutil.copytree(folder, tmp_path / "step-1")
    llm.update_weights(tmp_path / "step-1")
    shutil.rmtree(tmp_path / "step-1")
    with pytest.raises(ModelError, match="lack"):  # and no error about the deleted folder
        llm.load_weights([])
    assert llm.is_sleeping(), "the weights before are nowhere any more"
    llm.load_weights(model.state_dict())  # a dict is accepted as well as its items
    assert max_logprob_difference(model, generate_output(llm)) < 1e-4
    llm.close()


def test_skip_tokenizer_init_serves_token_ids_and_rejects_text(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        open_llm(folder, skip_tokenizer_init=False)
    llm = open_llm(folder)
    (output,) = generate_output(llm).outputs
    assert (output.text, len(output.token_ids)) == ("", 24)
    for prompt, params in (
        ("text", PARAMS),
        ([VOCAB], PARAMS),
        ([-1], PARAMS),
        (PROMPT, SamplingParams(stop=("a",))),
        (PROMPT, SamplingParams(logit_bias={VOCAB: 1.0})),
        (PROMPT, SamplingParams(stop_token_ids=(VOCAB,))),
    ):
        with pytest.raises(InvalidRequest):
            llm.generate([prompt], params, use_tqdm=False)
    with pytest.raises(InvalidRequest):
        llm.chat([{"role": "user", "content": "x"}], use_tqdm=False)
    llm.close()


def test_token_ids_above_tokenizer_vocabulary_are_accepted(tmp_path: Path) -> None:
    """The model's embedding has more rows than its tokenizer has tokens, as embeddings with padded rows have."""
    from quire.engine.common.config import DEMO_MODEL

    size = 4096 + 64
    folder = save_tiny_model(tmp_path / "model", "llama", vocab_size=size)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(DEMO_MODEL) / name, folder)
    llm = open_llm(folder, skip_tokenizer_init=False)
    params = SamplingParams(allowed_token_ids=(size - 1,), max_tokens=2, temperature=0, ignore_eos=True)
    (generation,) = llm.generate([[size - 1]], params, use_tqdm=False)
    assert generation.outputs[0].token_ids == [size - 1] * 2
    with pytest.raises(InvalidRequest, match="out of vocabulary"):
        llm.generate([[1]], SamplingParams(allowed_token_ids=(size,)), use_tqdm=False)
    llm.close()


@pytest.mark.slow
async def test_async_llm_streams_continue_through_sleep_and_weight_update(folder: Path, tmp_path: Path) -> None:
    trained_model(folder).save_pretrained(tmp_path)
    options = {"dtype": "float32", "num_kv_blocks": 200, "threads": 1, "skip_tokenizer_init": True}
    long = SamplingParams(temperature=1.0, seed=3, max_tokens=2000, ignore_eos=True)
    async with AsyncLLM(str(folder), **options) as llm:
        alone = [each async for each in llm.generate(PROMPT, long)][-1]
        assert (alone.weights_version, len(alone.outputs[0].token_ids)) == ("1", 2000)
        stream = llm.generate(PROMPT, long)
        await anext(stream)
        await llm.sleep()
        assert await llm.is_sleeping()
        await llm.wake_up()
        assert [each async for each in stream][-1].outputs[0].token_ids == alone.outputs[0].token_ids
        stream = llm.generate(PROMPT, long)
        await anext(stream)
        assert await llm.update_weights(tmp_path, version="new") == "new"
        last = [each async for each in stream][-1]
        assert (last.weights_version, len(last.outputs[0].token_ids)) == ("new", 2000)
