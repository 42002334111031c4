"""Tests `LLMEngine`, which takes requests singly and runs step by step: its tokens equal those of `LLM.generate`."""

from __future__ import annotations

import pytest

from quire import LLM, LLMEngine, PoolingParams, RequestOutput, RequestOutputKind, SamplingParams
from quire.engine.common.errors import EngineError, InvalidRequest

PROMPTS = ["Once upon a time", "The old king", "In the deep forest"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", num_kv_blocks=600, threads=1)


def steps(engine: LLMEngine) -> list[RequestOutput]:
    found = []
    while engine.has_unfinished_requests():
        new = engine.step()
        assert new
        found += new
    assert engine.step() == []
    return found


def sampled(seed: int, kind: RequestOutputKind) -> SamplingParams:
    return SamplingParams(temperature=0.9, seed=seed, max_tokens=12, ignore_eos=True, output_kind=kind)


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_the_loop_of_vllm_gives_the_tokens_of_generate(llm: LLM, kind: RequestOutputKind) -> None:
    """Each request runs alone in the reference, and together with others here, with every output kind."""
    alone = [llm.generate(prompt, sampled(n, kind), use_tqdm=False)[0].outputs[0] for n, prompt in enumerate(PROMPTS)]
    engine, waiting = llm.llm_engine, list(enumerate(PROMPTS))
    ids: dict[str, list[int]] = {str(n): [] for n, _ in waiting}
    texts = dict.fromkeys(ids, "")
    ends = []
    while waiting or engine.has_unfinished_requests():
        if waiting:
            n, prompt = waiting.pop(0)
            assert engine.add_request(str(n), prompt, sampled(n, kind)) == str(n)
        for output in engine.step():
            delta = kind is RequestOutputKind.DELTA
            ids[output.request_id] = ids[output.request_id] * delta + output.outputs[0].token_ids
            texts[output.request_id] = texts[output.request_id] * delta + output.outputs[0].text
            ends += [output.request_id] * output.finished
    assert (list(ids.values()), list(texts.values())) == ([a.token_ids for a in alone], [a.text for a in alone])
    assert sorted(ends) == ["0", "1", "2"]


def test_an_aborted_request_is_heard_of_no_more_and_its_id_is_free(llm: LLM) -> None:
    engine, long = llm.llm_engine, SamplingParams(max_tokens=None, ignore_eos=True)
    engine.add_request("a", PROMPTS[0], long)
    engine.add_request("b", PROMPTS[1], SamplingParams(max_tokens=3))
    with pytest.raises(InvalidRequest, match="request_id 'a' is in use"):
        engine.add_request("a", PROMPTS[0], long)
    while not any(output.request_id == "a" for output in engine.step()):
        pass
    engine.abort_request(["a", "unknown"])
    assert all(output.request_id == "b" for output in steps(engine))
    engine.add_request("a", PROMPTS[2], SamplingParams(max_tokens=2, ignore_eos=True))
    assert [len(output.outputs[0].token_ids) for output in steps(engine)][-1] == 2
    for _ in range(3):  # the request aborted before may still be ending
        engine.add_request("a", PROMPTS[0], long)
        engine.abort_request("a")
        engine.abort_request("a")
    assert (engine.step(), llm.generate("The fox", SamplingParams(max_tokens=1), use_tqdm=False)[0].finished) == (
        [],
        True,
    )


def test_choices_and_priorities_pass_through(llm: LLM) -> None:
    params = SamplingParams(n=2, seed=1, max_tokens=4, output_kind=RequestOutputKind.FINAL_ONLY)
    llm.llm_engine.add_request("many", PROMPTS[0], params, priority=-3)
    (found,) = steps(llm.llm_engine)
    (wanted,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    assert [each.token_ids for each in found.outputs] == [each.token_ids for each in wanted.outputs]


def test_what_cannot_be_served_is_said_at_once(llm: LLM) -> None:
    engine = llm.llm_engine
    for prompt, params, said in (
        ([], SamplingParams(), "prompt is empty"),
        ([5000], SamplingParams(), "out of vocabulary"),
        ("a", PoolingParams(task="classify"), "serves .*, not classify"),
        ("a", {}, "params must be SamplingParams or PoolingParams"),
    ):
        with pytest.raises(InvalidRequest, match=said):
            engine.add_request("x", prompt, params)  # type: ignore[arg-type]
    assert not engine.has_unfinished_requests()


@pytest.mark.slow
def test_a_request_that_the_engine_fails_is_raised_by_its_step() -> None:
    engine = LLM(dtype="float32", num_kv_blocks=64, threads=1).llm_engine
    engine.add_request("a", PROMPTS[0], SamplingParams(max_tokens=None, ignore_eos=True))
    engine.step()
    engine._running_engine.close()  # its LLM is unreferenced by now: the engine has kept the running engine alive
    with pytest.raises(EngineError):
        steps(engine)
    assert engine._open_requests == {}


def test_modules_are_where_vllm_has_them() -> None:
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
