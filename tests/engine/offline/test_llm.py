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


def test_greedy_text_is_that_of_transformers(llm: LLM) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype="float32")
    prompts = ["Once upon a time", "The old king looked at the fox and"]
    found = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True), use_tqdm=False)
    for prompt, generation in zip(prompts, found, strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        assert generation.prompt == prompt
        assert generation.prompt_token_ids == ids[0].tolist()
        wanted = model.generate(ids, do_sample=False, max_new_tokens=24, eos_token_id=-1)[0, ids.shape[1] :]
        (output,) = generation.outputs
        assert output.token_ids == wanted.tolist()
        assert output.text == tokenizer.decode(wanted, skip_special_tokens=True)
        assert output.finish_reason == "length"


def test_chat_equals_generate_on_the_rendered_template(llm: LLM) -> None:
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


def test_n_stop_and_logprobs(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=11, max_tokens=40, logprobs=2, stop=("the",), prompt_logprobs=0)
    (generation,) = llm.generate("The princess", params, use_tqdm=False)
    assert [output.index for output in generation.outputs] == [0, 1, 2]
    assert len({output.text for output in generation.outputs}) == 3
    assert generation.prompt_logprobs is not None
    assert generation.prompt_logprobs[0] is None
    found = [set(logprobs or ()) for logprobs in generation.prompt_logprobs[1:]]
    assert found == [{token} for token in generation.prompt_token_ids[1:]]
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


def test_listed_tokens_have_the_log_probabilities_of_transformers(llm: LLM) -> None:
    listed = [2, 700, 5]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprob_token_ids=listed)
    (generation,) = llm.generate("The princess", params, use_tqdm=False)
    (output,) = generation.outputs
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype="float32")
    ids = generation.prompt_token_ids + output.token_ids
    logits = model(torch.tensor([ids])).logits[0, len(generation.prompt_token_ids) - 1 : -1]
    assert output.logprobs is not None
    for logprob, token, row in zip(output.logprobs, output.token_ids, logits.log_softmax(-1), strict=True):
        found = {each: given.logprob for each, given in logprob.items()}
        assert found == pytest.approx({each: row[each].item() for each in {token, *listed}}, abs=1e-3)
    for wrong in ({"logprob_token_ids": (-1,)}, {"logprob_token_ids": (5, 10**6)}, {"allowed_token_ids": (10**6,)}):
        with pytest.raises(InvalidRequest, match=f"{next(iter(wrong))} has token id"):
            llm.generate("Once", SamplingParams(**wrong), use_tqdm=False)
    assert llm.generate("Once", SamplingParams(max_tokens=1), use_tqdm=False)


def test_prompts_come_in_all_the_forms_that_people_have(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6)
    (wanted,) = llm.generate("Once upon a time", params, use_tqdm=False)
    ids = wanted.prompt_token_ids
    forms = [np.array(ids), tuple(ids), {"prompt_token_ids": ids}, {"prompt": "Once upon a time"}]
    for found in llm.generate(forms, sampling_params=params, use_tqdm=False):
        assert (found.prompt_token_ids, found.outputs[0].text) == (ids, wanted.outputs[0].text)
    with pytest.raises(InvalidRequest, match="prompt 1 must be a text or a list of token ids, got int"):
        llm.generate([[1], 5], params)


@pytest.mark.parametrize("wrong", [{"logprobs": True}, {"max_tokens": 3.5}, {"top_k": None}, {"logit_bias": {"5": 1}}])
def test_params_of_the_wrong_type_are_refused_before_they_end_the_engine(llm: LLM, wrong: dict[str, object]) -> None:
    (name,) = wrong
    with pytest.raises(InvalidRequest, match=f"sampling_params: .*{name}"):
        SamplingParams(**wrong)
    params = SamplingParams()
    setattr(params, name, wrong[name])
    with pytest.raises(InvalidRequest, match=f"sampling_params: .*{name}"):
        llm.generate("Once", params, use_tqdm=False)
    assert llm.generate("Once", SamplingParams(max_tokens=1, stop_token_ids=[2]), use_tqdm=False)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_is_told_that_it_has_no_engine_and_ends(llm: LLM) -> None:
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


def test_a_chat_goes_on_where_its_last_message_ends(llm: LLM) -> None:
    talk = [{"role": "user", "content": "Tell me a story."}, {"role": "assistant", "content": "Once there was"}]
    (found,) = llm.chat(talk, SamplingParams(max_tokens=3), use_tqdm=False, continue_final_message=True)
    assert found.prompt is not None
    assert found.prompt.endswith("Once there was")


def test_a_chat_s_roles_are_checked(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[0\].role: unknown role 'usr'; did you mean user\?"):
        llm.chat([{"role": "usr", "content": "Tell me a story."}], use_tqdm=False)


def test_without_params_the_models_own_are_taken(llm: LLM) -> None:
    defaults = llm.get_default_sampling_params()
    assert (defaults.temperature, defaults.top_p) == (0.7, 0.95)
    defaults.temperature = 0.0  # a copy, so that the caller may change it
    assert llm.get_default_sampling_params().temperature == 0.7
    assert llm.generate("Once", use_tqdm=False)[0].outputs[0].finish_reason in ("length", "stop")


def test_progress_is_told_beside_the_output(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate(["Once", "The"], SamplingParams(max_tokens=2))
    out, err = capfd.readouterr()
    assert out == ""
    assert "2/2" in err


def test_options_that_are_none_are_named() -> None:
    with pytest.raises(ConfigError, match=r"max_num_seqs: .*got 0 \(argument max_num_seqs\); max_seq_len: no such"):
        LLM(max_num_seqs=0, max_seq_len=4)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"max_seq_len: no such setting, did you mean max_model_len\? \(argument"):
        LLM(max_seq_len=512)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="model: must be a folder, a file or a hub id, got 5"):
        LLM(5)  # type: ignore[arg-type]


def test_a_closed_one_says_so_and_holds_no_engine_any_more() -> None:
    llm = LLM(num_kv_blocks=64, max_model_len=64, threads=1)
    engine = weakref.ref(llm._client.engine_core._engine)
    llm.close()
    assert engine() is None
    with pytest.raises(EngineError, match="closed"):
        llm.generate("Once", use_tqdm=False)


def test_one_that_its_own_thread_finds_to_be_garbage_ends() -> None:
    """The garbage collector may free the LLM in the engine's own thread, which then waited for itself forever."""

    class Trainer:
        def __init__(self) -> None:
            self.llm, self.me = LLM(num_kv_blocks=64, max_model_len=64, threads=1), self

    trainer = Trainer()
    loop, engine = trainer.llm._running_engine._loop, weakref.ref(trainer.llm._client.engine_core._engine)
    threads = {each for each in threading.enumerate() if each.name == "quire-engine"}
    (thread,) = (each for each in threads if each.ident == trainer.llm._run_coroutine(_ident()))
    del trainer
    loop.call_soon_threadsafe(gc.collect)
    thread.join(30)
    assert not thread.is_alive()
    assert engine() is None


async def _ident() -> int:
    return threading.get_ident()


def test_where_one_answer_fails_the_others_are_computed_for_nobody_no_more(llm: LLM) -> None:
    others = SamplingParams(max_tokens=900, ignore_eos=True)
    with pytest.raises(EngineError, match="unclosed group"):
        llm.generate(["Once"] * 3, [others, SamplingParams(grammar=Grammar("regex", "(")), others], use_tqdm=False)
    for _ in range(9):  # iterations of the engine loop
        llm.reset_prefix_cache()
    assert not llm._client.has_unheld


def test_prompts_may_be_the_column_of_a_table(llm: LLM) -> None:
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


def test_half_a_character_is_no_text(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        llm.generate("a fox \ud83e", use_tqdm=False)
    with pytest.raises(InvalidRequest, match="surrogate"):
        llm.chat([{"role": "user", "content": "\ud83e"}], use_tqdm=False)
    with pytest.raises(InvalidRequest, match="surrogate"):
        llm.generate("Once", SamplingParams(bad_words=["\ud83e"]), use_tqdm=False)


def test_prompt_log_probabilities_of_the_whole_vocabulary(llm: LLM) -> None:
    (found,) = llm.generate("Once upon", SamplingParams(max_tokens=1, prompt_logprobs=-1), use_tqdm=False)
    assert found.prompt_logprobs is not None
    assert [each and len(each) for each in found.prompt_logprobs] == [None, llm.llm_engine.model_config.vocab_size]


@pytest.mark.parametrize("prompt", [[], [10**6], [1] * 5000, torch.tensor(5)])
def test_prompts_that_cannot_be_served_are_refused(llm: LLM, prompt: list[int]) -> None:
    with pytest.raises(InvalidRequest):
        llm.generate(prompt if isinstance(prompt, torch.Tensor) else [prompt], use_tqdm=False)


def test_params_out_of_range_name_themselves() -> None:
    for name, value in {"temperature": -1.0, "top_p": 0.0, "min_p": 2.0, "max_tokens": 0, "n": 0}.items():
        with pytest.raises(InvalidRequest, match=name) as error:
            SamplingParams(**{name: value})
        assert error.value.param == name


def test_answers_follow_a_grammar(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"year": {"type": "integer", "minimum": 1900, "maximum": 2100}}}
    grammar = json_grammar(schema | {"required": ["year"], "additionalProperties": False})
    (found,) = llm.generate("Once upon a time", SamplingParams(grammar=grammar, n=3, max_tokens=60), use_tqdm=False)
    assert all(1900 <= json.loads(output.text)["year"] <= 2100 for output in found.outputs)
    with pytest.raises(EngineError, match="unclosed group"):
        llm.generate("Once", SamplingParams(grammar=Grammar("regex", "(")), use_tqdm=False)


@pytest.mark.slow
def test_options_win_over_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_MODEL_LEN", "MAX_NUM_SEQS"):
        monkeypatch.setenv(f"QUIRE_{name}", "64")
    llm = LLM(num_kv_blocks=64, max_model_len=32, threads=1)
    assert llm.info.max_model_len == 32
    llm.close()
    monkeypatch.setenv("QUIRE_MAX_NUM_SEQS", "many")
    with pytest.raises(ConfigError, match=r"max_num_seqs: .*got 'many' \(environment variable QUIRE_MAX_NUM_SEQS\)"):
        LLM()
