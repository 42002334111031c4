"""Tests `LLM` on the embedded model."""

import contextlib
import gc
import json
import os
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quire import LLM, Grammar, SamplingParams, json_grammar
from quire.engine.common.config import DEMO_MODEL
from quire.engine.common.errors import ConfigError, EngineError, InvalidRequest


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", num_kv_blocks=600, threads=1)


def test_greedy_tokens_and_text_equal_transformers(llm: LLM) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype="float32")
    prompts = ["Once upon a time", "The old king looked at the fox and"]
    generations = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True), use_tqdm=False)
    for prompt, generation in zip(prompts, generations, strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        assert generation.prompt == prompt
        assert generation.prompt_token_ids == ids[0].tolist()
        expected_ids = model.generate(ids, do_sample=False, max_new_tokens=24, eos_token_id=-1)[0, ids.shape[1] :]
        (output,) = generation.outputs
        assert output.token_ids == expected_ids.tolist()
        assert output.text == tokenizer.decode(expected_ids, skip_special_tokens=True)
        assert output.finish_reason == "length"


def test_chat_equals_generate_on_rendered_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Tell me a story about a fox."}]
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=30)
    (chat,) = llm.chat(messages, params, use_tqdm=False)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    (direct,) = llm.generate(ids, params, use_tqdm=False)
    assert chat.prompt_token_ids == ids
    assert chat.outputs[0].text == direct.outputs[0].text != ""
    both = llm.chat([messages, messages], params, use_tqdm=False)
    assert [each.outputs[0].text for each in both] == [chat.outputs[0].text] * 2


def test_n_choices_stop_string_and_logprobs_combine(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=11, max_tokens=40, logprobs=2, stop=("the",), prompt_logprobs=0)
    (generation,) = llm.generate("The princess", params, use_tqdm=False)
    assert [output.index for output in generation.outputs] == [0, 1, 2]
    assert len({output.text for output in generation.outputs}) == 3
    assert generation.prompt_logprobs is not None
    assert generation.prompt_logprobs[0] is None
    prompt_tokens = [set(logprobs or ()) for logprobs in generation.prompt_logprobs[1:]]
    assert prompt_tokens == [{token} for token in generation.prompt_token_ids[1:]]
    for output in generation.outputs:
        assert "the" not in output.text
        assert output.logprobs is not None
        assert [next(iter(logprobs)) for logprobs in output.logprobs] == output.token_ids
        picked = [logprobs[token] for logprobs, token in zip(output.logprobs, output.token_ids, strict=True)]
        assert output.cumulative_logprob == pytest.approx(sum(each.logprob for each in picked))
        assert "".join(each.decoded_token or "" for each in picked).startswith(output.text)
        for logprobs in output.logprobs:
            assert {each.rank for each in logprobs.values()} >= {1, 2}
            assert sorted(logprobs.values(), key=lambda each: -each.logprob) == sorted(
                logprobs.values(), key=lambda each: each.rank or 0
            )
        if output.finish_reason == "stop":
            assert output.stop_reason == "the"
    assert any(output.finish_reason == "stop" for output in generation.outputs)


def test_logprob_token_ids_equal_transformers_logprobs(llm: LLM) -> None:
    listed = [2, 700, 5]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprob_token_ids=listed)
    (generation,) = llm.generate("The princess", params, use_tqdm=False)
    (output,) = generation.outputs
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype="float32")
    ids = generation.prompt_token_ids + output.token_ids
    logits = model(torch.tensor([ids])).logits[0, len(generation.prompt_token_ids) - 1 : -1]
    assert output.logprobs is not None
    for logprob, token, row in zip(output.logprobs, output.token_ids, logits.log_softmax(-1), strict=True):
        logprob_by_token = {each: entry.logprob for each, entry in logprob.items()}
        assert logprob_by_token == pytest.approx({each: row[each].item() for each in {token, *listed}}, abs=1e-3)
    for wrong in ({"logprob_token_ids": (-1,)}, {"logprob_token_ids": (5, 10**6)}, {"allowed_token_ids": (10**6,)}):
        with pytest.raises(InvalidRequest, match=f"{next(iter(wrong))} has token id"):
            llm.generate("Once", SamplingParams(**wrong), use_tqdm=False)
    assert llm.generate("Once", SamplingParams(max_tokens=1), use_tqdm=False)


def test_generate_accepts_arrays_tuples_and_prompt_dicts(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6)
    (expected,) = llm.generate("Once upon a time", params, use_tqdm=False)
    ids = expected.prompt_token_ids
    forms = [np.array(ids), tuple(ids), {"prompt_token_ids": ids}, {"prompt": "Once upon a time"}]
    for output in llm.generate(forms, sampling_params=params, use_tqdm=False):
        assert (output.prompt_token_ids, output.outputs[0].text) == (ids, expected.outputs[0].text)
    with pytest.raises(InvalidRequest, match="prompt 1 must be a text or a list of token ids, got int"):
        llm.generate([[1], 5], params)


@pytest.mark.parametrize("wrong", [{"logprobs": True}, {"max_tokens": 3.5}, {"top_k": None}, {"logit_bias": {"5": 1}}])
def test_sampling_params_of_wrong_type_rejected_and_engine_survives(llm: LLM, wrong: dict[str, object]) -> None:
    (name,) = wrong
    with pytest.raises(InvalidRequest, match=f"sampling_params: .*{name}"):
        SamplingParams(**wrong)
    params = SamplingParams()
    setattr(params, name, wrong[name])
    with pytest.raises(InvalidRequest, match=f"sampling_params: .*{name}"):
        llm.generate("Once", params, use_tqdm=False)
    assert llm.generate("Once", SamplingParams(max_tokens=1, stop_token_ids=[2]), use_tqdm=False)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_generate_in_forked_child_raises_engine_error(llm: LLM) -> None:
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(EngineError):
            llm.generate("Once", use_tqdm=False)
            status = 2
        llm.close()
        os._exit(0 if status == 1 else status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert llm.generate("Once", SamplingParams(max_tokens=1), use_tqdm=False)


def test_continue_final_message_leaves_assistant_message_open(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Tell me a story."}, {"role": "assistant", "content": "Once there was"}]
    (output,) = llm.chat(messages, SamplingParams(max_tokens=3), use_tqdm=False, continue_final_message=True)
    assert output.prompt is not None
    assert output.prompt.endswith("Once there was")


def test_chat_rejects_unknown_role_and_suggests_nearest(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[0\].role: unknown role 'usr'; did you mean user\?"):
        llm.chat([{"role": "usr", "content": "Tell me a story."}], use_tqdm=False)


def test_default_sampling_params_come_from_generation_config(llm: LLM) -> None:
    defaults = llm.get_default_sampling_params()
    assert (defaults.temperature, defaults.top_p) == (0.7, 0.95)
    defaults.temperature = 0.0  # a copy, so that the caller may change it
    assert llm.get_default_sampling_params().temperature == 0.7
    assert llm.generate("Once", use_tqdm=False)[0].outputs[0].finish_reason in ("length", "stop")


def test_progress_bar_goes_to_stderr(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate(["Once", "The"], SamplingParams(max_tokens=2))
    out, err = capfd.readouterr()
    assert out == ""
    assert "2/2" in err


def test_llm_names_invalid_and_unknown_options() -> None:
    with pytest.raises(ConfigError, match=r"max_num_seqs: .*got 0 \(argument max_num_seqs\); max_seq_len: no such"):
        LLM(max_num_seqs=0, max_seq_len=4)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"max_seq_len: no such setting, did you mean max_model_len\? \(argument"):
        LLM(max_seq_len=512)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="model: must be a folder, a file or a hub id, got 5"):
        LLM(5)  # type: ignore[arg-type]


def test_closed_llm_raises_and_frees_engine() -> None:
    llm = LLM(num_kv_blocks=64, max_model_len=64, threads=1)
    engine = weakref.ref(llm._client.engine_core._engine)
    llm.close()
    assert engine() is None
    with pytest.raises(EngineError, match="closed"):
        llm.generate("Once", use_tqdm=False)


def test_llm_collected_in_engine_thread_ends_without_deadlock() -> None:
    """The garbage collector may free the LLM in the engine's own thread, which then waited for itself forever."""

    class Trainer:
        def __init__(self) -> None:
            self.llm, self.me = LLM(num_kv_blocks=64, max_model_len=64, threads=1), self

    trainer = Trainer()
    loop, engine = trainer.llm._running_engine._loop, weakref.ref(trainer.llm._client.engine_core._engine)
    threads = {each for each in threading.enumerate() if each.name == "quire-engine"}
    (thread,) = (each for each in threads if each.ident == trainer.llm._run_coroutine(_thread_ident()))
    del trainer
    loop.call_soon_threadsafe(gc.collect)
    thread.join(30)
    assert not thread.is_alive()
    assert engine() is None


async def _thread_ident() -> int:
    return threading.get_ident()


def test_failed_prompt_aborts_other_prompts_of_same_call(llm: LLM) -> None:
    long_params = SamplingParams(max_tokens=900, ignore_eos=True)
    with pytest.raises(EngineError, match="unclosed group"):
        llm.generate(
            ["Once"] * 3, [long_params, SamplingParams(grammar=Grammar("regex", "(")), long_params], use_tqdm=False
        )
    for _ in range(9):  # iterations of the engine loop
        llm.reset_prefix_cache()
    assert not llm._client.has_unheld


def test_generate_accepts_pandas_like_column(llm: LLM) -> None:
    class Column:
        """Like a pandas column, whose first row need not have index 0."""

        def __len__(self) -> int:
            return 2

        def __iter__(self) -> Iterator[str]:
            return iter(("Once", "The fox"))

        def __getitem__(self, row: int) -> str:
            return {7: "Once", 9: "The fox"}[row]

    answers = llm.generate(Column(), SamplingParams(max_tokens=1), use_tqdm=False)  # type: ignore[arg-type]
    assert [answer.prompt for answer in answers] == ["Once", "The fox"]


def test_lone_surrogate_is_rejected_in_prompt_chat_and_bad_words(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        llm.generate("a fox \ud83e", use_tqdm=False)
    with pytest.raises(InvalidRequest, match="surrogate"):
        llm.chat([{"role": "user", "content": "\ud83e"}], use_tqdm=False)
    with pytest.raises(InvalidRequest, match="surrogate"):
        llm.generate("Once", SamplingParams(bad_words=["\ud83e"]), use_tqdm=False)


def test_prompt_logprobs_of_minus_1_return_whole_vocabulary(llm: LLM) -> None:
    (output,) = llm.generate("Once upon", SamplingParams(max_tokens=1, prompt_logprobs=-1), use_tqdm=False)
    assert output.prompt_logprobs is not None
    assert [each and len(each) for each in output.prompt_logprobs] == [None, llm.llm_engine.model_config.vocab_size]


@pytest.mark.parametrize("prompt", [[], [10**6], [1] * 5000, torch.tensor(5)])
def test_unservable_prompt_is_rejected(llm: LLM, prompt: list[int]) -> None:
    with pytest.raises(InvalidRequest):
        llm.generate(prompt if isinstance(prompt, torch.Tensor) else [prompt], use_tqdm=False)


def test_out_of_range_sampling_param_error_has_param_name() -> None:
    for name, value in {"temperature": -1.0, "top_p": 0.0, "min_p": 2.0, "max_tokens": 0, "n": 0}.items():
        with pytest.raises(InvalidRequest, match=name) as error:
            SamplingParams(**{name: value})
        assert error.value.param == name


def test_output_matches_json_schema_grammar(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"year": {"type": "integer", "minimum": 1900, "maximum": 2100}}}
    grammar = json_grammar(schema | {"required": ["year"], "additionalProperties": False})
    (generation,) = llm.generate(
        "Once upon a time", SamplingParams(grammar=grammar, n=3, max_tokens=60), use_tqdm=False
    )
    assert all(1900 <= json.loads(output.text)["year"] <= 2100 for output in generation.outputs)
    with pytest.raises(EngineError, match="unclosed group"):
        llm.generate("Once", SamplingParams(grammar=Grammar("regex", "(")), use_tqdm=False)


@pytest.mark.slow
def test_options_override_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_MODEL_LEN", "MAX_NUM_SEQS"):
        monkeypatch.setenv(f"QUIRE_{name}", "64")
    llm = LLM(num_kv_blocks=64, max_model_len=32, threads=1)
    assert llm.info.max_model_len == 32
    llm.close()
    monkeypatch.setenv("QUIRE_MAX_NUM_SEQS", "many")
    with pytest.raises(ConfigError, match=r"max_num_seqs: .*got 'many' \(environment variable QUIRE_MAX_NUM_SEQS\)"):
        LLM()
