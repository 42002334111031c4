"""Log probabilities have the same bits from decoding, as prompt log probabilities, and from a forward pass alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from transformers import AutoModelForCausalLM

from quire import LLM, Forward, SamplingParams, score
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import EngineError, InvalidRequest
from quire.engine.engine_core import EngineCore
from tests.engine.harness import request, run
from tests.tiny_models import FAMILIES, VOCAB, save_tiny_model


@cache
def save_model(family: str) -> Path:
    return save_tiny_model(Path(mkdtemp()), family)


def prompt_of(length: int, seed: int = 1) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, VOCAB) for _ in range(length)]


def bits(values: Sequence[float]) -> list[int]:
    return torch.tensor(values, dtype=torch.float32).view(torch.int32).tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.few(3)
def test_logprobs_of_decode_prompt_and_forward_are_bit_equal(family: str, dtype: str) -> None:
    """Decodes share batches of many sizes, prompts come in chunks, and the forward pass takes a sequence at once."""
    path = str(save_model(family))
    options = {"dtype": dtype, "threads": 1, "num_kv_blocks": 64, "max_model_len": 256, "warmup_seconds": 0.0}
    engine = EngineCore(EngineConfig(model=path, **{**options, "max_num_batched_tokens": 19, "max_num_seqs": 7}))
    requests = [
        request(str(i), prompt_of(5 + 9 * i, i), max_tokens=23, logprobs=0, temperature=1.0, seed=i) for i in range(7)
    ]
    decoded = run(engine, requests)
    wholes = {each.id: each.prompt_ids + decoded[each.id].ids for each in requests}
    read = run(engine, [request(f"{id}+", ids, max_tokens=1, prompt_logprobs=0) for id, ids in wholes.items()])
    engine.shut_down()
    forward = Forward(path, dtype=dtype, threads=1, max_model_len=256)
    for each in requests:
        whole, start = wholes[each.id], len(each.prompt_ids)
        prompt = bits([value.logprob for value in read[f"{each.id}+"].prompt_logprobs or [] if value is not None])
        assert bits([value.logprob for value in decoded[each.id].logprobs]) == prompt[start - 1 :]
        alone = forward.logprobs(whole)
        assert alone.view(torch.int32).tolist() == prompt
        every = forward.logprobs(whole, full_vocabulary=True)
        assert every.shape == (len(whole) - 1, VOCAB)
        assert torch.equal(every.gather(1, torch.tensor(whole[1:])[:, None]).squeeze(1), alone)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_full_vocabulary_scores_equal_prompt_logprobs(dtype: str) -> None:
    llm = LLM(str(save_model("llama")), dtype=dtype, threads=1, num_kv_blocks=64, skip_tokenizer_init=True)
    ids = prompt_of(60)
    params = SamplingParams(max_tokens=1, prompt_logprobs=VOCAB)
    (output,) = llm.generate([ids], params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    prompt_logprobs = [
        [each[token].logprob for token in range(VOCAB)] for each in output.prompt_logprobs[1:] if each is not None
    ]
    first, second = score(llm, [ids, ids[:9]], full_vocabulary=True)
    assert first.view(torch.int32).tolist() == [bits(row) for row in prompt_logprobs]
    assert torch.equal(second, first[:8])
    llm.sleep()
    with pytest.raises(EngineError, match="asleep"):
        score(llm, ids)
    llm.close()


def test_scores_equal_float64_transformers() -> None:
    ids = prompt_of(80)
    model = AutoModelForCausalLM.from_pretrained(save_model("llama"), dtype=torch.float64)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].log_softmax(-1)[:-1]
    actual = score(str(save_model("llama")), ids, full_vocabulary=True)
    assert isinstance(actual, torch.Tensor)
    assert (actual - expected).abs().max() < 2e-5


def test_forward_accepts_tensors_and_rejects_invalid_input() -> None:
    path = save_model("llama")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    from_tensors = Forward(path, tensors=model.state_dict().items(), dtype="float32", threads=1)
    ids = prompt_of(30)
    assert torch.equal(from_tensors.logprobs(ids), Forward(path, dtype="float32", threads=1).logprobs(ids))
    for wrong, told in (([5], "1 tokens"), ([5, VOCAB], "outside the vocabulary")):
        with pytest.raises(InvalidRequest, match=told):
            from_tensors.logprobs(wrong)
    with pytest.raises(InvalidRequest, match="pipeline_parallel_size"):
        Forward(path, pipeline_parallel_size=2)
