"""Tests methods of vLLM's `LLM` other than `generate`, against transformers where it has the same function."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quire import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from quire.engine.common.config import DEMO_MODEL
from quire.engine.common.errors import InvalidRequest
from quire.engine.offline.metrics import Counter, Gauge

TALK = [{"role": "user", "content": "Tell me a story."}]
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", num_kv_blocks=600, threads=1)


def test_get_tokenizer_equals_transformers_tokenizer(llm: LLM) -> None:
    tokenizer, transformers_tokenizer = llm.get_tokenizer(), AutoTokenizer.from_pretrained(DEMO_MODEL)
    text = "Once upon a time, in “Bern”…"
    assert tokenizer.encode(text) == transformers_tokenizer.encode(text)
    assert tokenizer.decode(transformers_tokenizer.encode(text)) == text
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (
        transformers_tokenizer.eos_token_id,
        transformers_tokenizer.bos_token_id,
    )
    rendered = [
        each.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
        for each in (tokenizer, transformers_tokenizer)
    ]
    assert rendered[0] == rendered[1]
    (output,) = llm.generate(rendered[0], SamplingParams(max_tokens=1), use_tqdm=False)
    assert output.prompt_token_ids == llm.chat(TALK, SamplingParams(max_tokens=1), use_tqdm=False)[0].prompt_token_ids


@pytest.mark.parametrize("penalty", [1.0, 0.2])
def test_beam_search_equals_transformers(llm: LLM, penalty: float) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype="float32")
    prompt = "The old king looked at the fox and"
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    expected = model.generate(
        ids,
        do_sample=False,
        num_beams=4,
        num_return_sequences=4,
        max_new_tokens=8,
        early_stopping="never",
        length_penalty=penalty,
    )
    params = BeamSearchParams(beam_width=4, max_tokens=8, length_penalty=penalty)
    (output,) = llm.beam_search(prompt, params)
    ends = model.generation_config.pad_token_id
    assert [each.tokens for each in output.sequences] == [[t for t in row.tolist() if t != ends] for row in expected]
    best = output.sequences[0]
    with torch.inference_mode():
        rows = model(torch.tensor([best.tokens])).logits[0, ids.shape[1] - 1 : -1].log_softmax(-1)
    new = best.tokens[ids.shape[1] :]
    total = sum(row[token].item() for row, token in zip(rows, new, strict=True))
    assert best.cum_logprob == pytest.approx(total, abs=1e-3)
    assert best.text == prompt + tokenizer.decode(new)
    scores = [each.cum_logprob / len(each.logprobs) ** penalty for each in output.sequences]
    assert all(one >= two for one, two in pairwise(scores))


def test_chat_renders_given_chat_template(llm: LLM) -> None:
    template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    (output,) = llm.chat(TALK, SamplingParams(max_tokens=1), chat_template=template, use_tqdm=False)
    assert output.prompt == "<user>Tell me a story."
    with pytest.raises(InvalidRequest, match="not valid, line 1"):
        llm.chat(TALK, chat_template="{% for %}", use_tqdm=False)


def test_tools_are_put_into_prompt_when_template_has_no_tools(llm: LLM) -> None:
    (output,) = llm.chat(TALK, SamplingParams(max_tokens=1), tools=[TOOL], use_tqdm=False)
    assert '"name": "look_up"' in (output.prompt or "")
    with pytest.raises(InvalidRequest, match="tools must be a list of objects, got 5"):
        llm.chat(TALK, tools=5, use_tqdm=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "talk",
    [
        "Tell me a story.",
        [5],
        [[5]],
        ["Tell me a story."],
        [{"content": "x"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        5,
        None,
    ],
)
def test_chat_rejects_malformed_conversation(llm: LLM, talk: object) -> None:
    with pytest.raises(InvalidRequest, match="message"):
        llm.chat(talk, use_tqdm=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "prompts",
    [
        iter("ab"),
        5,
        None,
        b"abc",
        {"a", "b"},
        [None],
        [b"a"],
        [5.5],
        {"prompt": "a", "multi_modal_data": {"audio": 1}},
    ],
)
def test_generate_rejects_malformed_prompts(llm: LLM, prompts: object) -> None:
    with pytest.raises(InvalidRequest, match="prompt"):
        llm.generate(prompts, use_tqdm=False)  # type: ignore[arg-type]


def test_truncate_prompt_tokens_and_detokenize_false(llm: LLM) -> None:
    ids = llm.tokenizer.encode("The old king looked at the fox and the fox looked at the king")
    (whole,) = llm.generate([ids[-5:]], SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
    params = SamplingParams(temperature=0, max_tokens=6, truncate_prompt_tokens=5, detokenize=False)
    (cut,) = llm.generate([ids], params, use_tqdm=False)
    assert cut.prompt_token_ids == ids[-5:]
    assert (cut.outputs[0].token_ids, cut.outputs[0].text) == (whole.outputs[0].token_ids, "")
    longest = llm.llm_engine.model_config.max_model_len
    params = SamplingParams(max_tokens=1, truncate_prompt_tokens=-1)
    (fitted,) = llm.generate([[5] * 3 * longest], params, use_tqdm=False)
    assert len(fitted.prompt_token_ids) == longest - 1


def test_bad_words_never_appear_in_output(llm: LLM) -> None:
    def words(bad_words: list[str] | None) -> list[str]:
        params = SamplingParams(temperature=0, max_tokens=40, bad_words=bad_words)
        (answer,) = llm.generate("The king looked at the", params, use_tqdm=False)
        return re.findall(r"\w+", answer.outputs[0].text)

    common = [word for word in dict.fromkeys(words(None)) if len(llm.tokenizer.encode(" " + word)) == 1][:3]
    assert len(common) == 3
    assert not set(common) & set(words(common))


def test_output_matches_gbnf_grammar(llm: LLM) -> None:
    grammar = 'root ::= "SELECT " column " FROM t"\ncolumn ::= "col_1" | "col_2"\n'
    params = SamplingParams(structured_outputs=StructuredOutputsParams(grammar=grammar), max_tokens=40, n=4)
    (output,) = llm.generate("Once", params, use_tqdm=False)
    assert {each.text for each in output.outputs} <= {"SELECT col_1 FROM t", "SELECT col_2 FROM t"}


def test_prefix_cache_metrics_count_hits_until_reset(llm: LLM) -> None:
    def values() -> dict[str, float]:
        return {each.name: each.value for each in llm.get_metrics() if isinstance(each, Counter | Gauge)}

    def cached() -> int:
        (output,) = llm.generate("There was once a fox " * 40, SamplingParams(max_tokens=1), use_tqdm=False)
        assert output.metrics is not None
        times = output.metrics
        assert times.queued_ts <= times.scheduled_ts <= times.first_token_ts <= times.last_token_ts
        return output.num_cached_tokens

    before = values()
    hits = [cached(), cached()]
    assert (hits[0], hits[1] > 100) == (0, True)
    after = values()
    assert after["vllm:prefix_cache_hits"] - before["vllm:prefix_cache_hits"] == hits[1]
    assert after["vllm:generation_tokens"] - before["vllm:generation_tokens"] == 2
    assert llm.reset_prefix_cache()
    assert [cached(), cached()] == hits


def test_llm_engine_exposes_vllm_config_objects(llm: LLM) -> None:
    engine = llm.llm_engine
    assert engine.vllm_config.model_config.max_model_len == llm.info.max_model_len
    assert engine.model_config.get_vocab_size() == engine.get_tokenizer().vocab_size == 4096
    assert engine.cache_config.num_gpu_blocks == 600
    assert engine.cache_config.num_cpu_blocks == 0
    assert engine.scheduler_config.max_num_batched_tokens == llm.info.step_tokens == 2048
    assert engine.vllm_config.scheduler_config.max_num_seqs == 256
    assert (engine.parallel_config.world_size, engine.parallel_config.tensor_parallel_size) == (1, 1)
    assert not engine.has_unfinished_requests()


def test_unsupported_vllm_names_raise_with_replacement(llm: LLM) -> None:
    with pytest.raises(AttributeError, match=r"LLM has no apply_model: LLM\.collective_rpc"):
        _ = llm.apply_model  # type: ignore[attr-defined]
    assert not hasattr(llm, "nothing")
    with pytest.raises(InvalidRequest, match="not embed; with pooling_type='last' it computes embeddings"):
        llm.encode("Once")
    with pytest.raises(ImportError, match="use StructuredOutputsParams"):
        from quire.sampling_params import GuidedDecodingParams  # type: ignore[attr-defined]  # noqa: F401
