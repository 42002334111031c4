"""Every drafter with random request parameters: tokens and log probabilities equal those without drafts.

`QUIRE_LOSSLESS_EXAMPLES=500 pytest tests/engine/test_lossless.py` runs more cases.
"""

from __future__ import annotations

import os
import random
import shutil
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from quire.engine.common.config import DEMO_MODEL, EngineConfig, SpeculativeConfig
from quire.engine.common.request_params import Grammar, SamplingParams, ThinkingBudget
from quire.engine.common.types import EngineCoreRequest
from quire.engine.core.drafter import Drafter, NullDrafter
from quire.engine.engine_core import EngineCore
from quire.engine.spec_decode.draft_length import AdaptiveLengthDrafter, StepCosts
from quire.engine.spec_decode.drafter_factory import choose_drafter
from quire.engine.spec_decode.grammar_drafter import GrammarDrafter
from quire.engine.spec_decode.load_aware_drafter import LoadAwareDrafter
from quire.engine.spec_decode.ngram_drafter import NgramDrafter, SuffixDrafter
from quire.engine.text.grammar_compiler import json_grammar
from tests.engine.harness import Answer, run
from tests.engine.test_heads import made_head
from tests.engine.test_speculation import CHEAP, PHRASES, Garbage, Replaceable, Right, always, known
from tests.tiers import examples
from tests.tiny_models import save_tiny_model
from tests.tiny_mtp import save_tiny_mtp

EXAMPLES = int(os.environ.get("QUIRE_LOSSLESS_EXAMPLES", examples(40)))
JSON = Grammar("json", '{"type": "array", "items": {"enum": ["once", "upon", "a time"]}, "minItems": 4, "maxItems": 9}')
STORY = json_grammar(
    {
        "type": "object",
        "properties": {"name": {"enum": ["Tom", "Anna Maria"]}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)
WORDS = Grammar("regex", "(the|and)( (cat|dog|fox))+")
CALL = Grammar(
    "lark",
    r"""start: text ("<tool_call>" call "</tool_call>")+
text: /[a-z ]{0,9}/
call: %json {"type": "object", "properties": {"name": {"enum": ["look", "go_home"]}, "to": {"type": "integer"}},
  "required": ["name", "to"], "additionalProperties": false}""",
)
PARAMS = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.0, 0.7, 1.2])},
    optional={
        "top_p": st.sampled_from([0.5, 0.95]),
        "top_k": st.sampled_from([1, 5, 40]),
        "min_p": st.sampled_from([0.05, 0.3]),
        "top_n_sigma": st.sampled_from([1.5]),
        "typical_p": st.sampled_from([0.7]),
        "xtc_probability": st.sampled_from([0.5]),
        "xtc_threshold": st.sampled_from([0.01]),
        "repetition_penalty": st.sampled_from([0.8, 1.3]),
        "dry_multiplier": st.sampled_from([0.5, 3.0]),
        "dry_allowed_length": st.integers(1, 2),
        "dry_sequence_breaker_ids": st.sampled_from([((35,), (104, 4))]),
        "presence_penalty": st.sampled_from([-1.0, 0.7]),
        "frequency_penalty": st.sampled_from([-0.5, 0.4]),
        "logit_bias": st.dictionaries(st.integers(3, 290), st.sampled_from([-5.0, 3.0]), max_size=4),
        "allowed_token_ids": st.sampled_from([tuple(range(3, 250)), (17, 40, 41)]),
        "bad_words_ids": st.sampled_from([((40,),), ((41, 42), (30,))]),
        "min_tokens": st.integers(0, 12),
        "stop_token_ids": st.sampled_from([tuple(range(3, 300, 40)), (30,)]),
        "ignore_eos": st.booleans(),
        "logprobs": st.integers(0, 3),
        "prompt_logprobs": st.integers(0, 2),
        "logprob_token_ids": st.sampled_from([(7, 3, 200, 11)]),
        "grammar": st.sampled_from([JSON, STORY, WORDS, CALL]),
        "thinking": st.sampled_from([ThinkingBudget(4, end_id=30, begin_id=None), ThinkingBudget(3, 30, 31)]),
    },
)
REQUEST = st.tuples(
    st.lists(st.sampled_from(PHRASES), min_size=1, max_size=8).map("".join), PARAMS, st.sampled_from([1, 1, 2, 3])
)
"""Prompt, parameters, n."""
SHAPES = [(100, 512), (100, 23), (14, 64)]
"""(KV blocks, tokens per step): all at once; chunked prompts; preemptions without a prefix cache."""
LOOKING = ["ngram", "seldom", "suffix", "garbage", "right", "grammar", "grammar and garbage", "grammar and right"]
DEAR = StepCosts((1, 64), (1.0, 60.0))
LOADED = ["itself", "other", "eagle", "eagle3", "medusa", "other, ngram", "eagle3, suffix", "medusa, ngram"]
"""Drafters with their own weights, and a lookup that continues their drafts; the first two are models."""
Served = Literal["demo", "lfm2", "qwen3_5"]
OWN: list[tuple[Served, str]] = [("qwen3_5", "mtp"), ("qwen3_5", "mtp, suffix")]
"""A model whose checkpoint has an MTP layer."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lossless")


@cache
def weights(folder: Path, name: str) -> tuple[str, str]:
    """The speculative method and the folder of a drafter for the embedded model."""
    if name == "itself":
        return "draft_model", str(DEMO_MODEL)
    if name == "other":
        return "draft_model", str(save_tiny_model(folder / name, "llama", num_hidden_layers=1, vocab_size=4096))
    return name, str(made_head(folder / name, name, 256, 4096)[0])


@cache
def hybrid(folder: Path, family: str) -> Path:
    """A recurrent model with the embedded one's tokenizer; it may have an MTP layer."""
    save = save_tiny_model if family == "lfm2" else save_tiny_mtp
    path = save(folder / family, family, vocab_size=4096)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(DEMO_MODEL) / name, path)
    return path


@cache
def engine(
    folder: Path, blocks: int, budget: int, dtype: str, name: str = "", served: Served = "demo"
) -> tuple[EngineCore, Replaceable]:
    """Without `name` the test replaces the drafter."""
    speculative = None if served == "demo" else SpeculativeConfig(method="grammar", num_speculative_tokens=32)
    if name:
        name, _, lookup = name.partition(", ")
        method, model = ("mtp", None) if name == "mtp" else weights(folder, name)
        more: dict[str, Any] = {"lookup": lookup, "num_lookup_tokens": 6} if lookup else {}
        speculative = SpeculativeConfig(method=method, model=model, num_speculative_tokens=5, **more)
    options: dict[str, Any] = {"max_model_len": 192, "num_kv_blocks": blocks, "max_num_batched_tokens": budget}
    caching, drafts = blocks > 20, Replaceable()
    made = EngineCore(
        EngineConfig(
            model=DEMO_MODEL if served == "demo" else str(hybrid(folder, served)),
            threads=1,
            dtype=dtype,
            enable_prefix_caching=caching,
            speculative_config=speculative,
            **options,
        ),
        make_drafter=always if name else lambda *_: drafts,
    )
    return made, drafts


def plain_answers(made: EngineCore, drafts: Replaceable, requests: list[EngineCoreRequest]) -> dict[str, Answer]:
    drafts.drafter = NullDrafter()
    return run(made, requests)


def make_lookup_drafter(name: str, seed: int, wanted: dict[str, Answer], made: EngineCore) -> Drafter:
    compiler = made.executor._grammars.start_loading_compiler().result
    drafters: dict[str, Drafter] = {
        "right": Right(wanted),
        "grammar": choose_drafter(None, (), None, compiler) or NullDrafter(),
        "seldom": AdaptiveLengthDrafter(LoadAwareDrafter(GrammarDrafter(NgramDrafter(1), compiler), DEAR), 8, CHEAP),
        "grammar and garbage": GrammarDrafter(Garbage(random.Random(seed)), compiler),
        "grammar and right": GrammarDrafter(Right(wanted), compiler),
        "ngram": AdaptiveLengthDrafter(NgramDrafter(2), 8, CHEAP),
        "suffix": AdaptiveLengthDrafter(SuffixDrafter(1), 5, CHEAP),
        "garbage": Garbage(random.Random(seed)),
    }
    return drafters[name]


def traffic(asked: list[tuple[str, dict[str, Any], int]]) -> list[EngineCoreRequest]:
    requests = []
    for text, kind, choices in asked:
        ids, params = [byte + 3 for byte in text.encode()], SamplingParams(**{"max_tokens": 30} | kind)
        for _ in range(choices):
            seed = len(requests)
            requests.append(
                EngineCoreRequest(
                    id=str(seed), prompt_ids=ids, params=params, seed=seed, cache_salt=str(len(requests) % 2)
                )
            )
    return requests


@pytest.mark.timeout(300 + 20 * EXAMPLES)
@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow])
@given(
    asked=st.lists(REQUEST, min_size=1, max_size=4),
    who=st.sampled_from(
        [*(("demo", name) for name in (*LOOKING, *LOADED, *LOADED)), *(("lfm2", name) for name in LOOKING), *OWN, *OWN]
    ),
    shape=st.sampled_from(SHAPES),
    dtype=st.sampled_from(["bfloat16", "float32"]),
)
def test_drafts_do_not_change_tokens_for_any_parameters_or_batch(
    folder: Path,
    asked: list[tuple[str, dict[str, Any], int]],
    who: tuple[Served, str],
    shape: tuple[int, int],
    dtype: str,
) -> None:
    served, name = who
    (plain, drafts), requests = engine(folder, *shape, dtype, served=served), traffic(asked)
    expected, made = plain_answers(plain, drafts, requests), plain
    if name not in LOOKING:
        made, _ = engine(folder, *shape, dtype, name, served)
    else:
        drafts.drafter = make_lookup_drafter(name, len(requests), expected, plain)
    before = made.engine_stats
    for _ in range(2):  # in the second round prompts are cached and other answers known to lookup drafters
        assert known(run(made, requests)) == known(expected)
    event(f"{served}, {name}: {'some' if made.engine_stats.draft_tokens > before.draft_tokens else 'no'} guesses")
    event(f"{sum(made.engine_stats.accepted_drafts) > sum(before.accepted_drafts)} that one was right")
    event(f"{made.engine_stats.preemptions > before.preemptions} that one was preempted")


@settings(max_examples=max(EXAMPLES // 10, 1), suppress_health_check=[HealthCheck.too_slow])
@given(
    asked=st.lists(REQUEST, min_size=1, max_size=3),
    who=st.sampled_from([*(("demo", name) for name in LOADED), *OWN]),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    cut=st.integers(1, 12),
)
def test_replayed_request_resumes_same_tokens_with_drafts(
    folder: Path, asked: list[tuple[str, dict[str, Any], int]], who: tuple[Served, str], dtype: str, cut: int
) -> None:
    """After a crash a new engine gets the request with the tokens that its caller has."""
    served, name = who
    requests = traffic(
        [(text, {k: v for k, v in kind.items() if k != "prompt_logprobs"}, n) for text, kind, n in asked]
    )
    expected = known(plain_answers(*engine(folder, *SHAPES[0], dtype, served=served), requests))
    ids: dict[str, list[int]] = {one: answer[0] for one, answer in expected.items()}
    parts = [
        msgspec.structs.replace(each, emitted_ids=ids[each.id][:cut]) for each in requests if len(ids[each.id]) > cut
    ]
    rest = run(engine(folder, *SHAPES[0], dtype, name, served)[0], parts)
    assert {one: answer.ids for one, answer in rest.items()} == {each.id: ids[each.id][cut:] for each in parts}
