"""Tests `LLMEngine`, which takes requests singly and runs step by step: its tokens equal those of `LLM.generate`."""

from __future__ import annotations

import pytest

from quire import LLM, LLMEngine, PoolingParams, RequestOutput, RequestOutputKind, SamplingParams
from quire.engine.common.errors import EngineError, InvalidRequest

PROMPTS = ["Once upon a time", "The old king", "In the deep forest"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", num_kv_blocks=600, threads=1)


def step_until_finished(engine: LLMEngine) -> list[RequestOutput]:
    outputs = []
    while engine.has_unfinished_requests():
        new = engine.step()
        assert new
        outputs += new
    assert engine.step() == []
    return outputs


def sampling_params(seed: int, kind: RequestOutputKind) -> SamplingParams:
    return SamplingParams(temperature=0.9, seed=seed, max_tokens=12, ignore_eos=True, output_kind=kind)


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_add_request_and_step_loop_equals_generate(llm: LLM, kind: RequestOutputKind) -> None:
    """Each request runs alone in the reference, and together with others here, with every output kind."""
    expected = [
        llm.generate(prompt, sampling_params(n, kind), use_tqdm=False)[0].outputs[0] for n, prompt in enumerate(PROMPTS)
    ]
    engine, waiting = llm.llm_engine, list(enumerate(PROMPTS))
    ids: dict[str, list[int]] = {str(n): [] for n, _ in waiting}
    texts = dict.fromkeys(ids, "")
    ends = []
    while waiting or engine.has_unfinished_requests():
        if waiting:
            n, prompt = waiting.pop(0)
            assert engine.add_request(str(n), prompt, sampling_params(n, kind)) == str(n)
        for output in engine.step():
            delta = kind is RequestOutputKind.DELTA
            ids[output.request_id] = ids[output.request_id] * delta + output.outputs[0].token_ids
            texts[output.request_id] = texts[output.request_id] * delta + output.outputs[0].text
            ends += [output.request_id] * output.finished
    assert (list(ids.values()), list(texts.values())) == ([a.token_ids for a in expected], [a.text for a in expected])
    assert sorted(ends) == ["0", "1", "2"]


def test_aborted_request_yields_no_output_and_frees_id(llm: LLM) -> None:
    engine, long = llm.llm_engine, SamplingParams(max_tokens=None, ignore_eos=True)
    engine.add_request("a", PROMPTS[0], long)
    engine.add_request("b", PROMPTS[1], SamplingParams(max_tokens=3))
    with pytest.raises(InvalidRequest, match="request_id 'a' is in use"):
        engine.add_request("a", PROMPTS[0], long)
    while not any(output.request_id == "a" for output in engine.step()):
        pass
    engine.abort_request(["a", "unknown"])
    assert all(output.request_id == "b" for output in step_until_finished(engine))
    engine.add_request("a", PROMPTS[2], SamplingParams(max_tokens=2, ignore_eos=True))
    assert [len(output.outputs[0].token_ids) for output in step_until_finished(engine)][-1] == 2
    for _ in range(3):  # the request aborted before may still be ending
        engine.add_request("a", PROMPTS[0], long)
        engine.abort_request("a")
        engine.abort_request("a")
    assert (engine.step(), llm.generate("The fox", SamplingParams(max_tokens=1), use_tqdm=False)[0].finished) == (
        [],
        True,
    )


def test_n_choices_with_priority_equal_generate(llm: LLM) -> None:
    params = SamplingParams(n=2, seed=1, max_tokens=4, output_kind=RequestOutputKind.FINAL_ONLY)
    llm.llm_engine.add_request("many", PROMPTS[0], params, priority=-3)
    (output,) = step_until_finished(llm.llm_engine)
    (expected,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    assert [each.token_ids for each in output.outputs] == [each.token_ids for each in expected.outputs]


def test_add_request_rejects_invalid_prompt_or_params(llm: LLM) -> None:
    engine = llm.llm_engine
    for prompt, params, message in (
        ([], SamplingParams(), "prompt is empty"),
        ([5000], SamplingParams(), "out of vocabulary"),
        ("a", PoolingParams(task="classify"), "serves .*, not classify"),
        ("a", {}, "params must be SamplingParams or PoolingParams"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            engine.add_request("x", prompt, params)  # type: ignore[arg-type]
    assert not engine.has_unfinished_requests()


@pytest.mark.slow
def test_step_raises_engine_error_after_engine_closes() -> None:
    engine = LLM(dtype="float32", num_kv_blocks=64, threads=1).llm_engine
    engine.add_request("a", PROMPTS[0], SamplingParams(max_tokens=None, ignore_eos=True))
    engine.step()
    engine._running_engine.close()  # its LLM is unreferenced by now: the engine has kept the running engine alive
    with pytest.raises(EngineError):
        step_until_finished(engine)
    assert engine._open_requests == {}


def test_public_classes_import_from_vllm_module_paths() -> None:
    import quire
    from quire.inputs import PromptType, TextPrompt, TokensPrompt
    from quire.lora.request import LoRARequest
    from quire.outputs import CompletionOutput, RequestOutput
    from quire.pooling_params import PoolingParams
    from quire.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams, StructuredOutputsParams

    for thing in (LoRARequest, CompletionOutput, RequestOutput, PoolingParams, TextPrompt, TokensPrompt):
        assert getattr(quire, thing.__name__) is thing
    for thing in (BeamSearchParams, RequestOutputKind, SamplingParams, StructuredOutputsParams):
        assert getattr(quire, thing.__name__) is thing
    assert quire.PromptType is PromptType
