"""Draft heads (EAGLE, EAGLE-3, Medusa) propose what a plain computation of them proposes, and change no token."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.train_head import story_requests, train_head
from quire.engine.common.config import DEMO_MODEL, EngineConfig, SpeculativeConfig
from quire.engine.common.errors import ConfigError
from quire.engine.common.request_params import PoolingParams, SamplingParams
from quire.engine.common.scheduler_output import HeadDraftRequest
from quire.engine.common.types import EngineCoreRequest
from quire.engine.core.drafter import Draft, Drafter, RequestsToDraft
from quire.engine.engine_builder.drafter_builder import make_model_or_head_drafter
from quire.engine.engine_core import EngineCore
from quire.engine.spec_decode.draft_length import AdaptiveLengthDrafter, StepCosts
from quire.engine.spec_decode.head_drafter import HeadDrafter
from quire.engine.text.grammar_compiler import json_grammar
from quire.engine.worker.draft_head_runner import DraftHeadRunner
from quire.engine.worker.startup_steps.started_worker import StartedWorker
from tests.engine.harness import run
from tests.engine.test_out_of_memory import limit_memory
from tests.engine.test_speculation import KINDS, always, known
from tests.tiny_heads import (
    Reference,
    Tensors,
    eagle3_tensors,
    eagle_config,
    eagle_tensors,
    medusa_tensors,
    save_head,
)
from tests.tiny_models import VOCAB, save_tiny_model

HIDDEN = 64
TAPS = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
METHODS = ["eagle", "eagle3", "medusa"]


def made_head(path: Path, method: str, hidden: int = HIDDEN, vocab: int = VOCAB) -> tuple[Path, Tensors]:
    if method == "medusa":
        tensors = medusa_tensors(hidden, vocab, 3)
        config = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "tiny"}
        return save_head(path, tensors, config, "medusa_lm_head.pt"), tensors
    if method == "eagle":
        tensors = eagle_tensors(hidden, vocab)
        return save_head(path, tensors, eagle_config(hidden, vocab)), tensors
    tensors = eagle3_tensors(hidden, vocab, 3)
    more: dict[str, Any] = {"draft_vocab_size": vocab // 2} | TAPS
    return save_head(path, tensors, eagle_config(hidden, vocab, **more), "model.safetensors"), tensors


def started(
    model: Path,
    head: Path | None,
    method: str = "",
    tokens: int = 4,
    make_drafter: Callable[[StartedWorker, EngineConfig], Drafter | None] | None = None,
    **options: Any,
) -> EngineCore:
    speculative = None
    if head is not None:
        speculative = SpeculativeConfig(method=method, model=str(head), num_speculative_tokens=tokens)
    options = {"num_kv_blocks": 200, "max_model_len": 200, "dtype": "float32"} | options
    config = EngineConfig(model=str(model), speculative_config=speculative, threads=1, **options)
    return EngineCore(config, make_drafter=make_drafter)


def make_head_drafter(worker: StartedWorker, config: EngineConfig) -> HeadDrafter:
    """The drafter of the heads, without the choice of draft lengths."""
    found = make_model_or_head_drafter(worker, config)
    assert found is not None
    assert isinstance(found[0], HeadDrafter)
    return found[0]


@dataclass
class Recorded(Drafter):
    """Records the heads' drafts, with the token ids and hidden states that they saw. All drafts are verified."""

    most: int = 3
    drafter: HeadDrafter = field(init=False)
    guesses: list[tuple[list[int], list[int]]] = field(default_factory=list)
    states: list[torch.Tensor] = field(default_factory=list)

    def make(self, worker: StartedWorker, config: EngineConfig) -> Drafter:
        """The drafter for the engine whose heads are recorded."""
        self.drafter = make_head_drafter(worker, config)
        return self

    def propose(self, asked: RequestsToDraft, tokens: int) -> list[Draft]:
        found = self.drafter.propose([(seq, min(most, self.most)) for seq, most in asked], tokens)
        heads = self.drafter._heads
        assert isinstance(heads, DraftHeadRunner)
        for (seq, _), guess in zip(asked, found, strict=True):
            assert seq.slot is not None
            place = heads._find_place_in_slot_states(HeadDraftRequest(seq.slot, len(seq.token_ids), 1, []))
            assert (place is None) == (seq.num_output_tokens == 0), (
                "before its first pick there is nothing to go on from"
            )
            if place is None:
                assert not guess.token_ids
            else:
                self.states.append(heads._hidden_by_slot[seq.slot, place].clone())
                self.guesses.append((list(seq.token_ids), guess.token_ids))
        return found


def traffic(kinds: Sequence[dict[str, Any]]) -> list[EngineCoreRequest]:
    rng = random.Random(3)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(rng.choice([2, 16, 40, 70]))] for _ in kinds]
    params = [SamplingParams(**{"max_tokens": 24, "ignore_eos": True} | kind) for kind in kinds]
    return [
        EngineCoreRequest(id=str(index), prompt_ids=prompt, params=each, seed=index)
        for index, (prompt, each) in enumerate(zip(prompts, params, strict=True))
    ]


GREEDY: list[dict[str, Any]] = [{"temperature": 0.0}]


@pytest.mark.few(2)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("budget", "memory"), [(2048, None), (21, None), (2048, 16)])
def test_head_drafts_equal_reference_computation(
    method: str, budget: int, memory: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts that are all rejected, and drafts that are all accepted: requests that allow one token only. `memory`:
    steps of more tokens run out of memory and are split.
    """
    model = save_tiny_model(tmp_path / "model", "llama")
    head, tensors = made_head(tmp_path / "head", method)
    recorded, options = Recorded(), {"enable_prefix_caching": False, "max_num_batched_tokens": budget}
    engine = started(model, head, method, make_drafter=recorded.make, **options)
    if memory is not None:
        limit_memory(engine, memory, monkeypatch)
    one = SamplingParams(allowed_token_ids=(40,), max_tokens=40)
    requests = [EngineCoreRequest(id="one", prompt_ids=[7, 9, 11], params=one, seed=0), *traffic(GREEDY * 5)]
    run(engine, requests)
    assert sum(engine.engine_stats.accepted_drafts) >= 10
    served = AutoModelForCausalLM.from_pretrained(model).double()
    exact = {name: each.double() if each.is_floating_point() else each for name, each in tensors.items()}
    reference = Reference(exact, served.get_input_embeddings().weight.data, served.lm_head.weight.data)
    compared = 0
    for (tokens, guesses), state in zip(recorded.guesses, recorded.states, strict=True):
        with torch.no_grad():
            states = served(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        expected_state, expected_guesses = reference.guesses(
            states[-1][0], [each[0] for each in states[:3]], tokens, len(guesses) or 1
        )
        torch.testing.assert_close(state.double(), expected_state, rtol=1e-3, atol=1e-3)
        if tokens[:3] != [7, 9, 11]:
            assert guesses == expected_guesses[: len(guesses)], tokens
            compared += len(guesses)
    assert compared > 200
    ones = {token for tokens, guesses in recorded.guesses if tokens[:3] == [7, 9, 11] for token in guesses}
    assert ones == {40}


@pytest.mark.few(1)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "shape", [{}, {"max_num_batched_tokens": 21, "max_num_seqs": 4}, {"num_kv_blocks": 13}], ids=str
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_head_drafts_do_not_change_tokens(method: str, shape: dict[str, int], dtype: str, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", "qwen3")
    head, _ = made_head(tmp_path / "head", method)
    few = {"allowed_token_ids": (40, 41), "prompt_logprobs": 1}
    requests = traffic([*KINDS, *KINDS, few, few])
    options = shape | {"dtype": dtype}
    expected = known(run(started(model, None, **options), requests))
    engine = started(model, head, method, make_drafter=always, **options)
    for _ in range(2):  # in the second round prompts are cached
        assert known(run(engine, requests)) == expected
    assert engine.engine_stats.draft_tokens > 50
    assert sum(engine.engine_stats.accepted_drafts) > 0
    assert engine.engine_stats.preemptions > 0 or "num_kv_blocks" not in shape


@pytest.mark.parametrize("method", METHODS)
def test_pooling_vectors_are_unchanged_with_draft_head(method: str, tmp_path: Path) -> None:
    """No token follows a pooling prompt's last one; what the slot holds there must do no harm."""
    model = save_tiny_model(tmp_path / "model", "llama")
    head, _ = made_head(tmp_path / "head", method)
    prompts = [list(range(5, 45)), [7]]
    requests = [
        EngineCoreRequest(id=str(i), prompt_ids=ids, params=PoolingParams(), seed=0) for i, ids in enumerate(prompts)
    ]
    vectors = []
    for engine in (started(model, None, pooling_type="last"), started(model, head, method, pooling_type="last")):
        engine.executor._input_batch.token_ids.fill_(2**31 - 1)
        for each in requests:
            engine.add_request(each)
        outputs = [output for _ in range(3) for output in engine.step()]
        vectors.append({output.id: output.vector for output in outputs})
    assert vectors[0] == vectors[1]
    assert None not in vectors[0].values()
    assert len(vectors[0]) == 2


@pytest.mark.few(1)
@pytest.mark.parametrize("method", METHODS)
def test_int8_head_drafts_do_not_change_tokens(method: str, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", "llama")
    head, _ = made_head(tmp_path / "head", method)
    requests, options = traffic(KINDS), {"quantization": "int8", "dtype": "bfloat16"}
    expected = known(run(started(model, None, **options), requests))
    engine = started(model, head, method, make_drafter=always, **options)
    assert known(run(engine, requests)) == expected
    assert engine.engine_stats.draft_tokens > 20


@pytest.mark.few(1)
@pytest.mark.parametrize("method", METHODS)
def test_replayed_request_resumes_same_tokens_with_draft_head(method: str, tmp_path: Path) -> None:
    """After a crash a new engine gets the request with the tokens that its caller has."""
    model = save_tiny_model(tmp_path / "model", "llama")
    head, _ = made_head(tmp_path / "head", method)
    story = json_grammar({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    few = {"allowed_token_ids": (40, 41), "temperature": 1.0}
    requests = traffic([{"temperature": 0.9}, {"temperature": 0.0}, few, {"grammar": story, "temperature": 1.0}])
    engine = started(model, head, method, make_drafter=always, tokenizer=DEMO_MODEL)
    whole = run(engine, requests)
    for cut in (1, 3, 8):
        new_engine = started(model, head, method, make_drafter=always, tokenizer=DEMO_MODEL)
        parts = [msgspec.structs.replace(each, emitted_ids=whole[each.id].ids[:cut]) for each in requests]
        rest = run(new_engine, parts)
        assert {name: (answer.ids, answer.finish_reason) for name, answer in rest.items()} == {
            name: (answer.ids[cut:], answer.finish_reason) for name, answer in whole.items()
        }
    assert new_engine.engine_stats.draft_tokens > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_trained_eagle_head_has_one_third_acceptance(tmp_path: Path) -> None:
    """The head is trained on some stories of the embedded model and drafts others."""
    head = train_head(tmp_path / "head", "eagle", stories=48, rounds=5)
    speculative = SpeculativeConfig(method="eagle", model=str(head), num_speculative_tokens=4)
    options = {"max_model_len": 512, "num_kv_blocks": 200, "threads": 1}
    requests = story_requests(6, seed=7, tokens=120)
    expected = known(run(EngineCore(EngineConfig(**options)), requests))
    # Pretend that a step of the model takes ten times as long as one of the head: with both so small no draft would
    # pay.
    costs, own = StepCosts((1, 64), (1.0, 3.0)), StepCosts((1, 64), (0.1, 0.2))

    def drafter(worker: StartedWorker, config: EngineConfig) -> Drafter:
        return AdaptiveLengthDrafter(make_head_drafter(worker, config), 4, costs, own)

    engine = EngineCore(EngineConfig(speculative_config=speculative, **options), make_drafter=drafter)
    assert known(run(engine, requests)) == expected
    assert engine.engine_stats.draft_tokens > 200
    assert sum(engine.engine_stats.accepted_drafts) > engine.engine_stats.draft_tokens / 3


def test_vllm_and_wrapped_head_layouts_load_same_heads(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", "llama")
    requests = traffic(GREEDY * 2)

    def guesses(head: Path, method: str) -> object:
        recorded = Recorded()
        run(started(model, head, method, make_drafter=recorded.make), requests)
        return recorded.guesses

    head, tensors = made_head(tmp_path / "medusa", "medusa")
    renamed = {name.replace(".0.linear.", ".layers.0."): each for name, each in tensors.items() if ".linear." in name}
    lasts = {f"lm_heads.{name.partition('.')[0]}.weight": each for name, each in tensors.items() if ".1." in name}
    of_vllm = {f"blocks.{name}": each for name, each in renamed.items()} | lasts
    other = save_head(tmp_path / "vllm", of_vllm, {"model_type": "medusa"}, "model.safetensors")
    assert guesses(other, "medusa") == guesses(head, "medusa")
    head, tensors = made_head(tmp_path / "eagle", "eagle")
    wrapped = {f"model.{name}": each for name, each in tensors.items()}
    other = save_head(tmp_path / "wrapped", wrapped, eagle_config(HIDDEN, VOCAB), "model.safetensors")
    assert guesses(other, "eagle") == guesses(head, "eagle")


def test_mismatched_draft_head_is_rejected(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", "llama")

    def refused(match: str, method: str, tensors: Tensors, config: dict[str, Any], name: str, **kind: str) -> None:
        with pytest.raises(ConfigError, match=rf"speculative_config\.model: .*{match}"):
            started(model, save_head(tmp_path / name, tensors, config, **kind), method)

    eagle, third = eagle_tensors(HIDDEN, VOCAB), eagle3_tensors(HIDDEN, VOCAB, 3)
    config = eagle_config(HIDDEN, VOCAB)
    refused("hidden size is 32, the served model's 64", "eagle", eagle, config | {"hidden_size": 32}, "a")
    refused("vocabulary is 9, the served model's 320", "eagle", eagle, config | {"vocab_size": 9}, "b")
    refused("the weights lack", "eagle", {k: v for k, v in eagle.items() if "fc." not in k}, config, "c")
    refused("hidden_act 'gelu'", "eagle", eagle, config | {"hidden_act": "gelu"}, "d")
    refused("are not layers of the served 3", "eagle3", third, config | {"draft_vocab_size": 160}, "e")
    wrong = third | {"d2t": third["d2t"] + 9}
    refused("d2t: has a token", "eagle3", wrong, config | {"draft_vocab_size": 160} | TAPS, "f")
    refused("tensors are those of 0 Medusa heads", "medusa", eagle, {}, "g")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"lacks model\.safetensors"):
        started(model, tmp_path / "empty", "medusa")
    (tmp_path / "empty" / "medusa_lm_head.pt").write_bytes(b"no pickle")
    with pytest.raises(ConfigError, match=r"medusa_lm_head\.pt cannot be read"):
        started(model, tmp_path / "empty", "medusa")
