"""Recurrent models with quantization, grammars, choices and beams, crashes, sleep and new weights, vectors, and unusual
shapes: always the tokens of an engine that computes each request alone and uncached.
"""

from __future__ import annotations

import random
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quire import LLM, BeamSearchParams
from quire import SamplingParams as Params
from quire.engine.checkpoint.model_resolver import read_model_config
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.weights import Weights
from quire.engine.common.config import DEMO_MODEL, EngineConfig
from quire.engine.common.scheduler_output import SlotCopy
from quire.engine.common.types import EngineCoreRequest
from quire.engine.core.kv_cache.block_pool import BlockPool
from quire.engine.core.kv_cache.state_snapshots import SnapshotConfig, StateSnapshots
from quire.engine.engine_core import EngineCore
from quire.engine.models import decoder_spec
from quire.engine.offline.in_process_client import InProcessClient
from quire.engine.spec_decode.draft_length import AdaptiveLengthDrafter
from quire.engine.text.grammar_compiler import json_grammar
from tests.engine.harness import request, run
from tests.engine.test_speculation import CHEAP, Garbage
from tests.engine.test_states import known
from tests.engine.vectors import same, vectors
from tests.tiers import pair_in_rotation, slow
from tests.tiny_models import VOCAB, save_tiny_model

BASE = {"max_model_len": 176, "num_kv_blocks": 90, "threads": 1, "max_num_seqs": 6, "snapshot_tokens": 16}
LARGE = ["qwen3_5", "qwen3-next", "falcon_h1", "granite-hybrid", "nemotron_h-latent", "mamba2", "mamba", "jamba"]
LARGE += ["zamba2", "zamba2-blocks", "kimi_linear"]
"""Families whose states are too large to be kept with every block."""
RECURRENT = [*LARGE, "lfm2", "lfm3"]
SHAPES: list[dict[str, Any]] = [
    {},
    {"max_num_batched_tokens": 7},
    {"num_kv_blocks": 14, "state_memory": 5e-4},
    {"num_kv_blocks": 14, "state_memory": 5e-4, "kv_offload_memory": 0.02},
]


def engine(path: Path, make_drafter: Any = None, **options: Any) -> EngineCore:
    return EngineCore(EngineConfig(model=str(path), **BASE | options), make_drafter=make_drafter)


def make_prompts(seed: int = 5) -> list[list[int]]:
    """The last prompts begin like earlier ones. Lengths are at and next to the ends of blocks and chunks."""
    rng = random.Random(seed)
    own = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (1, 3, 16, 31, 48, 65, 90)]
    return [*own, own[-1][:64] + own[1], own[-1][:63], own[-2][:33] + own[2]]


def asked(**params: Any) -> list[EngineCoreRequest]:
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.9}, {"prompt_logprobs": 1}]
    each = enumerate(make_prompts())
    options = {"max_tokens": 20, "logprobs": 0, **params}
    return [request(str(at), prompt, seed=at, **options | kinds[at % 3]) for at, prompt in each]


def answers_alone(path: Path, requests: list[EngineCoreRequest], **options: Any) -> dict[str, object]:
    made = engine(path, enable_prefix_caching=False, **options)
    return {name: told for each in requests for name, told in known(run(made, [each])).items()}


IDLE = {"mamba2", "mamba", "jamba"}
"""Families for which one of SHAPES hits no cached prefix in test_recurrent_quantized_tokens_equal_requests_alone, or
preempts nothing.
"""


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "quantization"),
    [*pair_in_rotation(RECURRENT, ["int8", "int4", "fp8"]), ("qwen3_5", "int4"), ("qwen3_5", "fp8")],
)
def test_recurrent_quantized_tokens_equal_requests_alone(family: str, quantization: str, tmp_path: Path) -> None:
    """Together, with prefix hits, chunked, preempted, from host memory, and with wrong drafts."""
    path, few = save_tiny_model(tmp_path, family, dtype=torch.bfloat16), {"quantization": quantization}
    requests = asked()
    expected = answers_alone(path, requests, **few)
    assert expected != answers_alone(path, requests), "weights are rounded"
    for shape in SHAPES:
        made = engine(path, lambda *_: AdaptiveLengthDrafter(Garbage(random.Random(4)), 8, CHEAP), **few | shape)
        for _ in range(2):
            assert known(run(made, requests)) == expected, shape
        assert made.engine_stats.prefix_hits > 0 or family in IDLE
        assert made.engine_stats.draft_tokens > 0
        assert made.engine_stats.preemptions > 0 or "state_memory" not in shape or family in IDLE
        made.shut_down()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "dtype"), [*pair_in_rotation(RECURRENT, ["float32", "bfloat16"]), ("qwen3_5", "bfloat16")]
)
def test_replayed_request_resumes_same_tokens_with_states(family: str, dtype: str, tmp_path: Path) -> None:
    """After a crash another engine gets the request with the tokens that its caller has. Drafts are on, and prompts are
    chunked anew.
    """
    path = save_tiny_model(tmp_path, family)
    requests = [
        msgspec.structs.replace(each, params=each.params) for each in asked() if not each.params.prompt_logprobs
    ]
    expected = {each.id: run(engine(path, dtype=dtype), [each])[each.id].ids for each in requests}
    for cut, shape in zip((1, 8, 17), SHAPES, strict=False):
        again = engine(path, dtype=dtype, speculative_config="ngram", **shape)
        rest = run(again, [msgspec.structs.replace(each, emitted_ids=expected[each.id][:cut]) for each in requests])
        assert {name: each.ids for name, each in rest.items()} == {name: ids[cut:] for name, ids in expected.items()}


def test_snapshot_with_pending_slot_copy_is_not_evicted() -> None:
    """Otherwise a sequence that was to start from the snapshot and got no slot had none, and its engine ended."""
    pages, digest = BlockPool(2), b"page"
    (page,) = pages.allocate(1)
    pages.cache_block(page, digest)
    snapshots = StateSnapshots(pages, 16, SnapshotConfig(1, 16), first_slot=3)
    slot = snapshots.reserve_slot_for_load()
    assert slot == 3
    snapshots.finish_load(slot, digest, is_complete=True)
    snapshots._slot_copies.append(SlotCopy(slot, 0))
    assert snapshots.reserve_slot_for_load() is None
    assert snapshots.num_usable_blocks([digest]) == 1
    snapshots.take_slot_copies()
    assert snapshots.reserve_slot_for_load() == slot
    assert snapshots.num_usable_blocks([digest]) == 0


def save_model_with_tokenizer(folder: Path, family: str) -> Path:
    path = save_tiny_model(folder, family, vocab_size=4096)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(DEMO_MODEL) / name, path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["qwen3_5", "lfm3", *slow(*(each for each in RECURRENT if each not in ("qwen3_5", "lfm3")))]
)
def test_grammar_forced_drafts_do_not_change_recurrent_tokens(family: str, tmp_path: Path) -> None:
    """States are restored after rejected drafts."""
    schema = {"type": "object", "properties": {"name": {"enum": ["Tom", "Anna"]}}, "required": ["name"]}
    path, grammar = save_model_with_tokenizer(tmp_path, family), json_grammar(schema)
    kinds: list[dict[str, Any]] = [{"grammar": grammar, "temperature": t, "ignore_eos": False} for t in (0.0, 1.1)]
    requests = [
        request(str(at), text, seed=at, max_tokens=24, logprobs=0, **({} if at % 3 == 2 else kinds[at % 2]))
        for at, text in enumerate(make_prompts())
    ]
    plain = engine(path, enable_prefix_caching=False, speculative_config={"method": "none"})
    expected = {name: told for each in requests for name, told in known(run(plain, [each])).items()}
    for shape in SHAPES[:3]:
        made = engine(path, speculative_config={"method": "grammar", "num_speculative_tokens": 16}, **shape)
        for _ in range(2):
            assert known(run(made, requests)) == expected, shape
        assert sum(made.engine_stats.accepted_drafts) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["qwen3_5", "zamba2", "lfm2", *slow("nemotron_h-latent", "falcon_h1", "jamba", "lfm3")]
)
def test_choices_and_beams_of_recurrent_model_equal_uncached(family: str, tmp_path: Path) -> None:
    """Choices and beams share a prompt's blocks and snapshot."""
    path, prompts = save_model_with_tokenizer(tmp_path, family), [[7, 9, 11] * 12, [5] * 64, [8]]
    options = {"threads": 1, "dtype": "float32", "max_model_len": 176, "snapshot_tokens": 16}
    sampled = Params(n=4, temperature=0.9, seed=3, max_tokens=20, ignore_eos=True, logprobs=0)
    beams = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)

    def outputs_of(llm: LLM) -> list[object]:
        chosen = [
            [(each.token_ids, each.cumulative_logprob) for each in one.outputs]
            for one in llm.generate(prompts, sampled, use_tqdm=False)
        ]
        searched = [
            [(each.tokens, each.cum_logprob) for each in one.sequences] for one in llm.beam_search(prompts, beams)
        ]
        return [chosen, searched]

    fresh = LLM(str(path), num_kv_blocks=90, enable_prefix_caching=False, max_num_seqs=1, **options)
    expected = outputs_of(fresh)
    fresh.close()
    made = LLM(str(path), num_kv_blocks=14, max_num_seqs=6, state_memory=5e-4, speculative_config="ngram", **options)
    assert [outputs_of(made), outputs_of(made)] == [expected, expected]
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5", "lfm2", *slow("falcon_h1", "zamba2", "nemotron_h-latent", "mamba")])
async def test_state_snapshots_do_not_survive_sleep_or_new_weights(family: str, tmp_path: Path) -> None:
    first, second = save_tiny_model(tmp_path / "first", family), tmp_path / "second"
    second.mkdir()
    shutil.copy(first / "config.json", second)
    tensors = {
        name: each * (1.1 if each.ndim > 1 else 1.0) for name, each in load_file(first / "model.safetensors").items()
    }
    save_file(tensors, second / "model.safetensors", metadata={"format": "pt"})
    prompt, config = make_prompts()[6], {"dtype": "float32", "skip_tokenizer_init": True, **BASE}
    each = request("0", prompt, max_tokens=12, logprobs=0)
    expected = [run(EngineCore(EngineConfig(model=str(path), **config)), [each])["0"].ids for path in (first, second)]
    assert expected[0] != expected[1]
    client = EngineClient(InProcessClient(EngineConfig(model=str(first), **config)))
    await client.engine_core.start()
    weights, number = Weights(client), 0

    async def tokens() -> tuple[list[int], int]:
        nonlocal number
        number += 1
        ids, cached = list[int](), 0
        async for outputs in client.submit([msgspec.structs.replace(each, id=str(number))]):
            for output in outputs:
                ids, cached = ids + output.new_ids, max(cached, output.cached_tokens)
        return ids, cached

    try:
        assert await tokens() == (expected[0], 0)
        assert await tokens() == (expected[0], 80)
        await weights.sleep(1)
        await weights.wake_up()
        ids, _ = await tokens()
        assert ids == expected[0]
        await weights.update(str(second))
        assert await tokens() == (expected[1], 0)
        assert await tokens() == (expected[1], 80)
        await weights.update(str(first))
        assert await tokens() == (expected[0], 0)
    finally:
        await client.engine_core.stop()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "mode", "dtype"),
    [
        (family, mode, dtype)
        for (family, mode), dtype in pair_in_rotation(
            product(["qwen3_5", "falcon_h1", "nemotron_h-latent", "zamba2", "jamba"], ["last", "mean", "cls"]),
            ["float32", "bfloat16"],
        )
    ],
)
def test_recurrent_vectors_do_not_depend_on_batch(family: str, mode: str, dtype: str, tmp_path: Path) -> None:
    path, options = save_tiny_model(tmp_path, family), {"pooling_type": mode, "dtype": dtype}
    plain = engine(path, **options, enable_prefix_caching=False)
    expected = [vectors(plain, [prompt])[0] for prompt in make_prompts()]
    others = [request(f"t{at}", prompt, max_tokens=20, temperature=1.0) for at, prompt in enumerate(make_prompts(9))]
    for shape in SHAPES:
        made = engine(path, **options | shape)
        for _ in range(2):
            assert same(vectors(made, make_prompts(), others=others), expected), shape
        made.shut_down()


ODD: list[tuple[str, dict[str, Any]]] = [
    ("mamba2", {"num_heads": 1, "head_dim": 128, "n_groups": 1, "num_hidden_layers": 1}),
    ("mamba2", {"num_heads": 8, "head_dim": 16, "n_groups": 8, "state_size": 66, "conv_kernel": 5}),
    ("mamba2", {"num_heads": 4, "head_dim": 48, "n_groups": 2, "expand": 3, "tie_word_embeddings": True}),
    (
        "falcon_h1",
        {"mamba_n_heads": 2, "mamba_d_head": 64, "mamba_d_state": 30, "mamba_n_groups": 1, "mamba_d_conv": 2},
    ),
    ("falcon_h1", {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 40, "num_hidden_layers": 1}),
    ("bamba", {"attn_layer_indices": [0, 1], "num_hidden_layers": 2}),
    ("granite-hybrid", {"layer_types": ["full_attention"], "num_hidden_layers": 1}),
    ("granite-hybrid", {"layer_types": ["linear_attention"] * 2, "num_hidden_layers": 2}),
    ("nemotron_h", {"layer_types": ["linear_attention"]}),
    ("nemotron_h", {"layer_types": ["full_attention", "linear_attention"], "n_groups": 1}),
    ("nemotron_h-latent", {"moe_latent_size": 1, "num_experts_per_tok": 6}),
    ("nemotron_h-latent", {"moe_latent_size": 96, "moe_intermediate_size": 31}),
    ("lfm2", {"layer_types": ["full_attention"], "num_hidden_layers": 1}),
    ("lfm2", {"conv_L_cache": 2}),
    ("lfm2", {"conv_L_cache": 16, "layer_types": ["full_attention", "conv", "conv"]}),
    ("lfm3", {"sliding_window": 1, "conv_L_cache": 2}),
    ("lfm3", {"layer_types": ["sliding_attention"], "num_hidden_layers": 1, "tie_word_embeddings": False}),
    ("qwen3_5", {"linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_conv_kernel_dim": 2}),
    ("qwen3_5", {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_value_head_dim": 48}),
    ("qwen3_5", {"layer_types": ["linear_attention"], "num_hidden_layers": 1, "tie_word_embeddings": True}),
    ("qwen3_5", {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2}),
    ("mamba", {"num_hidden_layers": 1, "conv_kernel": 2, "state_size": 2, "time_step_rank": 1}),
    ("mamba", {"intermediate_size": 16, "state_size": 64}),
    ("jamba", {"attn_layer_period": 1, "attn_layer_offset": 0}),
    ("jamba", {"attn_layer_period": 9, "attn_layer_offset": 8, "mamba_d_conv": 2, "mamba_expand": 1}),
    ("zamba2", {"layers_block_type": ["hybrid"], "num_hidden_layers": 1}),
    ("zamba2", {"mamba_d_conv": 2, "mamba_ngroups": 8, "adapter_rank": 1}),
]
"""One head, one group, one layer, all layers alike, wide and narrow convolutions, sizes that divide nothing."""


def _logprobs_of(ids: torch.Tensor, model: Any) -> torch.Tensor:
    """transformers' log probabilities of these tokens [1, T] but the first."""
    with torch.inference_mode():
        every = model(ids, use_cache=False).logits[0].log_softmax(-1)
    return every[:-1].gather(1, ids[0, 1:, None])[:, 0]


@pytest.mark.few(1)
@pytest.mark.parametrize(("family", "fields"), ODD, ids=str)
def test_unusual_recurrent_shapes_equal_float64_transformers(
    family: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    path = save_tiny_model(tmp_path, family, **fields)
    requests = [
        msgspec.structs.replace(each, params=msgspec.structs.replace(each.params, prompt_logprobs=0))
        for each in asked()
    ]
    plain = engine(path, enable_prefix_caching=False, dtype="float32")
    answers = {name: answer for each in requests for name, answer in run(plain, [each]).items()}
    judge, rounded = (
        AutoModelForCausalLM.from_pretrained(path, dtype=dtype, experts_implementation="eager")
        for dtype in (torch.float64, torch.float32)
    )
    for each in requests:
        answer = answers[each.id]
        ids = torch.tensor([each.prompt_ids + answer.ids])
        expected, in_float32 = (_logprobs_of(ids, model) for model in (judge, rounded))
        error = float((in_float32 - expected).abs().max())  # transformers' own float32 error: some shapes lose more
        listed = [*(answer.prompt_logprobs or [None])[1:], *answer.logprobs]
        found = [one.logprob for one in listed if one is not None]
        assert found == pytest.approx(expected.tolist(), abs=max(1e-4, 2 * error))
    drafts = {"speculative_config": "ngram"} if decoder_spec(read_model_config(path)).needs_state_snapshots else {}
    for shape in ({}, drafts, *SHAPES[1:2], {"num_kv_blocks": 14, "state_memory": 3e-3}):
        made = engine(path, dtype="float32", **shape)
        for _ in range(2):
            assert known(run(made, requests)) == known(answers), shape
