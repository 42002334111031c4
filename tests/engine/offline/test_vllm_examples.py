"""Tests programs in the form of vLLM's offline examples, with only the import line changed.

Their names in vLLM: basic/basic.py, basic/generate.py, basic/chat.py, structured_outputs.py, prefix_caching.py,
basic/embed.py, basic/classify.py, basic/score.py, llm_engine_example.py and async_llm_streaming.py. Each function here
uses the API as its example does, on tiny models and with other texts.
"""

from __future__ import annotations

import json
import re
from argparse import ArgumentParser as FlexibleArgumentParser
from enum import StrEnum
from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict, Field

from quire import (
    LLM,
    AsyncLLM,
    EngineArgs,
    LLMEngine,
    PoolingParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from quire.engine.common.config import DEMO_MODEL
from quire.engine.common.errors import InvalidRequest
from tests.texts import pair_tokenizer
from tests.tiny_encoders import save_tiny_encoder

PROMPTS = ["Once upon a time", "The old king", "In the deep forest", "The fox said"]
SMALL = {"num_kv_blocks": 600, "threads": 1}


def save_encoder(path: Path, **options: int) -> str:
    save_tiny_encoder(path, "bert", **options)
    pair_tokenizer().tokenizer.backend.save(str(path / "tokenizer.json"))
    return str(path)


def parse_cli_args(*argv: str, **defaults: object) -> tuple[dict[str, object], FlexibleArgumentParser]:
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(**defaults)
    sampling = parser.add_argument_group("Sampling parameters")
    sampling.add_argument("--max-tokens", type=int)
    sampling.add_argument("--top-p", type=float)
    return vars(parser.parse_args(argv)), parser


@pytest.mark.slow
def test_vllm_llm_engine_example() -> None:
    args = parse_cli_args("--num-kv-blocks", "600", "--threads", "1", model=DEMO_MODEL)[1].parse_args([])
    args.num_kv_blocks, args.threads = 600, 1
    engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))
    test_prompts = [(prompt, SamplingParams(temperature=0.0, max_tokens=8)) for prompt in PROMPTS]
    request_id, finished = 0, []
    while test_prompts or engine.has_unfinished_requests():
        if test_prompts:
            prompt, sampling_params = test_prompts.pop(0)
            engine.add_request(str(request_id), prompt, sampling_params)
            request_id += 1
        finished += [output for output in engine.step() if output.finished]
    assert {output.prompt for output in finished} == set(PROMPTS)


def test_vllm_basic_example() -> None:
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    llm = LLM(model=DEMO_MODEL, **SMALL)
    outputs = llm.generate(PROMPTS, sampling_params)
    assert [output.prompt for output in outputs] == PROMPTS
    for output in outputs:
        assert output.outputs[0].text
        assert len(output.outputs[0].token_ids) <= 16
    llm.close()


def test_vllm_generate_and_chat_examples_with_cli_args(tmp_path: Path) -> None:
    args, _ = parse_cli_args("--max-tokens", "7", "--dtype", "float32", "--max-num-seqs=4", model=DEMO_MODEL, **SMALL)
    max_tokens, top_p = args.pop("max_tokens"), args.pop("top_p")
    llm = LLM(**args)
    sampling_params = llm.get_default_sampling_params()
    if max_tokens is not None:
        sampling_params.max_tokens = max_tokens
    if top_p is not None:
        sampling_params.top_p = top_p
    conversation = [
        {"role": "system", "content": "You tell stories."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello! Which one?"},
        {"role": "user", "content": "The one of the fox and the king."},
    ]
    (alone,) = llm.chat(conversation, sampling_params, use_tqdm=False)
    many = llm.chat([conversation for _ in range(10)], sampling_params, use_tqdm=True)
    assert len(many) == 10
    assert 0 < len(alone.outputs[0].token_ids) <= 7
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }} {% endfor %}")
    (mine,) = llm.chat(conversation, sampling_params, use_tqdm=False, chat_template=template.read_text())
    assert mine.prompt == " ".join(message["content"] for message in conversation) + " "
    llm.close()


class Kind(StrEnum):
    FOX = "fox"
    KING = "king"


class Hero(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=12)
    age: int = Field(ge=1, le=99)
    kind: Kind


GRAMMAR = """
root ::= sentence
sentence ::= "The " hero " has " number hero
hero ::= "fox " | "king "
number ::= "1 " | "2 "
"""


@pytest.mark.slow
def test_vllm_structured_outputs_example() -> None:
    llm = LLM(model=DEMO_MODEL, max_model_len=300, **SMALL)

    def generate_output(prompt: str, sampling_params: SamplingParams) -> str:
        outputs = llm.generate(prompts=prompt, sampling_params=sampling_params)
        return outputs[0].outputs[0].text

    choice = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["Happy", "Sad"]))
    assert generate_output("How does it end? ", choice) in ("Happy", "Sad")
    regex = StructuredOutputsParams(regex=r"[a-z]{1,8}@[a-z]{1,8}\.com\n")
    address = generate_output("Write to ", SamplingParams(structured_outputs=regex, stop=["\n"], max_tokens=50))
    assert re.fullmatch(r"[a-z]{1,8}@[a-z]{1,8}\.com", address)
    schema = StructuredOutputsParams(json=Hero.model_json_schema())
    hero = generate_output("The hero: ", SamplingParams(structured_outputs=schema, max_tokens=100))
    assert Hero.model_validate_json(hero).kind in Kind
    grammar = SamplingParams(structured_outputs=StructuredOutputsParams(grammar=GRAMMAR), max_tokens=40)
    assert re.fullmatch(r"The (fox|king)  has [12] (fox|king) ", generate_output("Once ", grammar))
    llm.close()


@pytest.mark.slow
def test_vllm_prefix_caching_example() -> None:
    prefix = "There was once a king who had three sons, and a fox who knew more than all of them. " * 8
    prompts = [prefix + prompt for prompt in PROMPTS]
    sampling_params = SamplingParams(temperature=0.0)
    regular_llm = LLM(model=DEMO_MODEL, enable_prefix_caching=False, gpu_memory_utilization=0.4, **SMALL)
    outputs = regular_llm.generate(prompts, sampling_params)
    assert {output.num_cached_tokens for output in outputs} == {0}
    regular = [output.outputs[0].text for output in outputs]
    del regular_llm
    cached_llm = LLM(model=DEMO_MODEL, enable_prefix_caching=True, gpu_memory_utilization=0.4, **SMALL)
    cached_llm.generate(prompts[0], sampling_params)
    outputs = cached_llm.generate(prompts, sampling_params)
    assert all(output.num_cached_tokens > 100 for output in outputs)
    assert [output.outputs[0].text for output in outputs] == regular
    cached_llm.close()


@pytest.mark.slow
def test_vllm_embed_example(tmp_path: Path) -> None:
    args, _ = parse_cli_args(model=save_encoder(tmp_path), runner="pooling", enforce_eager=True)
    del args["max_tokens"], args["top_p"]
    llm = LLM(**args)
    outputs = llm.embed(PROMPTS)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        embeds = output.outputs.embedding
        assert len(embeds) == len(outputs[0].outputs.embedding) > 1
        assert sum(value * value for value in embeds) == pytest.approx(1.0, abs=1e-4)
        assert output.prompt == prompt
        assert json.dumps(embeds[:16])
    encoded = llm.encode(PROMPTS, pooling_task="embed")
    assert [each.outputs.embedding for each in encoded] == [each.outputs.embedding for each in outputs]
    with pytest.raises(InvalidRequest, match="pooling_task must be embed or classify"):
        llm.encode(PROMPTS, pooling_task="token_embed")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="serves embed, not classify"):
        llm.encode(PROMPTS, pooling_task="classify")
    assert llm.llm_engine.add_request("a", PROMPTS[0], PoolingParams()) == "a"
    (vector,) = llm.llm_engine.step()
    assert (vector.request_id, vector.outputs.embedding) == ("a", outputs[0].outputs.embedding)
    llm.close()


@pytest.mark.slow
def test_vllm_classify_and_score_examples(tmp_path: Path) -> None:
    llm = LLM(model=save_encoder(tmp_path / "classifier", labels=3), runner="pooling")
    for output in llm.classify(PROMPTS):
        assert len(output.outputs.probs) == 3
        assert sum(output.outputs.probs) == pytest.approx(1.0, abs=1e-4)
    llm.close()
    llm = LLM(model=save_encoder(tmp_path / "scorer", labels=1), runner="pooling")
    scores = [output.outputs.score for output in llm.score(PROMPTS[0], PROMPTS[1:])]
    assert all(0 <= score <= 1 for score in scores)
    llm.close()


@pytest.mark.slow
async def test_vllm_async_llm_streaming_example() -> None:
    engine_args = EngineArgs(model=DEMO_MODEL, enforce_eager=True, **SMALL)
    engine = AsyncLLM.from_engine_args(engine_args)
    texts = {}
    try:
        for number, prompt in enumerate(PROMPTS[:2]):
            sampling_params = SamplingParams(
                max_tokens=30, temperature=0.8, top_p=0.95, seed=42, output_kind=RequestOutputKind.DELTA
            )
            text = ""
            async for output in engine.generate(
                request_id=f"stream-{number}", prompt=prompt, sampling_params=sampling_params
            ):
                for completion in output.outputs:
                    text += completion.text
                if output.finished:
                    break
            texts[prompt] = text
    finally:
        engine.shutdown()
    llm = LLM(model=DEMO_MODEL, **SMALL)
    whole = llm.generate(PROMPTS[:2], SamplingParams(max_tokens=30, temperature=0.8, top_p=0.95, seed=42))
    assert texts == {output.prompt: output.outputs[0].text for output in whole}
    llm.close()
