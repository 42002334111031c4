"""Models with recurrent states (LFM2's convolutions, Qwen3.5's delta nets, Mamba 2's state spaces, Mamba's selective
scans), with and without attention: the same tokens with all features on, and only new tokens are computed.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from quire.engine.architecture.kv_cache_spec import RecurrentStateSpec
from quire.engine.checkpoint.kv_cache_plan import GIB
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError
from quire.engine.common.types import EngineCoreRequest
from quire.engine.core.drafter import NullDrafter
from quire.engine.engine_core import EngineCore
from quire.engine.spec_decode.draft_length import AdaptiveLengthDrafter
from quire.server.cli import main as cli
from quire.server.cli.plan.machine import Machine
from quire.server.cli.plan.model_plan import predict_kv_tokens
from tests.engine.harness import Answer, request, run
from tests.engine.ranks import thread_ranks
from tests.engine.test_ranks import MISSING, one_thread
from tests.engine.test_speculation import CHEAP, Garbage, Replaceable, always
from tests.engine.tiers.fakes import always as of_tiers
from tests.engine.tiers.fakes import always_late
from tests.engine.tiers.test_engine import CONVERSATIONS, HOST, TURNS, converse, disk
from tests.tiers import examples, slow
from tests.tiny_models import VOCAB, save_tiny_model
from tests.tiny_mtp import save_tiny_mtp

__all__ = ["one_thread", "thread_ranks"]
SMALL = {"max_model_len": 256, "num_kv_blocks": 80, "threads": 1, "max_num_seqs": 6}
FAMILIES = ["lfm2", "lfm2-biased", "lfm3", "qwen3_5", "qwen3_5-grouped", "qwen3-next", "kimi_linear"]
FAMILIES += ["mamba2", "mamba2-tied", "bamba", "granite-hybrid", "falcon_h1", "falcon_h1-normed", "nemotron_h"]
FAMILIES += ["mamba", "mamba-tied", "falcon_mamba", "jamba", "zamba2", "zamba2-blocks", "nemotron_h-latent"]
SHAPES: list[dict[str, Any]] = [
    {"snapshot_tokens": 64},
    {"max_num_batched_tokens": 7, "snapshot_tokens": 16},
    {
        "num_kv_blocks": 11,
        "max_model_len": 176,
        "max_num_batched_tokens": 48,
        "snapshot_tokens": 16,
        "state_memory": 2.5e-4,
    },
    {"long_prefill_token_threshold": 19, "max_num_seqs": 2},
    {
        "num_kv_blocks": 14,
        "max_model_len": 176,
        "snapshot_tokens": 16,
        "state_memory": 2.5e-4,
        "kv_offload_memory": 0.02,
    },
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states")


@cache
def model(folder: Path, family: str) -> Path:
    return save_tiny_model(folder / family, family)


@cache
def engine(folder: Path, family: str, dtype: str, shape: int | None) -> tuple[EngineCore, Replaceable]:
    """shape None: requests run alone, without prefix caching."""
    chosen, drafts = {"enable_prefix_caching": False} if shape is None else SHAPES[shape], Replaceable()
    config = EngineConfig(model=str(model(folder, family)), dtype=dtype, **(SMALL | chosen))
    return EngineCore(config, make_drafter=lambda *_: drafts), drafts


def known(answers: dict[str, Answer]) -> dict[str, object]:
    return {name: (each.ids, each.logprobs, each.prompt_logprobs) for name, each in answers.items()}


PROMPT = st.tuples(st.integers(0, 2), st.integers(0, 90), st.integers(1, 40), st.integers(0, 2**20))
"""Which common prefix and how many of its tokens; how many tokens of its own, and their seed."""
PARAMS = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 24), "temperature": st.sampled_from([0.0, 0.9])},
    optional={"prompt_logprobs": st.integers(0, 1), "repetition_penalty": st.just(1.3)},
)


def asked(traffic: list[tuple[tuple[int, int, int, int], dict[str, Any]]]) -> list[EngineCoreRequest]:
    made = []
    for at, ((which, shared, own, seed), params) in enumerate(traffic):
        common, rng = random.Random(which), random.Random(seed)
        prompt = [common.randrange(3, VOCAB) for _ in range(shared)] + [rng.randrange(3, VOCAB) for _ in range(own)]
        made.append(request(str(at), prompt, seed=at, logprobs=0, **params))
    return made


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    traffic=st.lists(st.tuples(PROMPT, PARAMS), min_size=1, max_size=7),
    shape=st.integers(0, len(SHAPES) - 1),
    family=st.sampled_from(FAMILIES),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    guesses=st.one_of(st.none(), st.integers(0, 99)),
)
def test_recurrent_logprobs_do_not_depend_on_batch_cache_or_drafts(
    folder: Path,
    traffic: list[tuple[tuple[int, int, int, int], dict[str, Any]]],
    shape: int,
    family: str,
    dtype: str,
    guesses: int | None,
) -> None:
    requests, (alone, _) = asked(traffic), engine(folder, family, dtype, None)
    expected: dict[str, object] = {}
    for each in requests:
        expected |= known(run(alone, [each]))
    made, drafts = engine(folder, family, dtype, shape)
    before, garbage = made.engine_stats, Garbage(random.Random(guesses))
    drafts.drafter = NullDrafter() if guesses is None else AdaptiveLengthDrafter(garbage, 8, CHEAP)
    for _ in range(2):
        assert known(run(made, requests)) == expected
    event(
        f"drafts {made.engine_stats.draft_tokens > before.draft_tokens}, "
        f"hits {made.engine_stats.prefix_hits > before.prefix_hits}"
    )
    event(f"preempted {made.engine_stats.preemptions > before.preemptions}")


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "distance"),
    [
        ("lfm2", 16),
        ("qwen3_5", 48),
        ("mamba2", 48),
        ("falcon_h1", 48),
        *slow(("jamba", 48), ("zamba2", 48), ("lfm3", 16)),
    ],
)
def test_conversation_turn_computes_only_new_tokens(family: str, distance: int, dtype: str, folder: Path) -> None:
    """With n-gram drafts, against an engine without prefix caching."""
    path, options = str(model(folder, family)), {"dtype": dtype, **SMALL, "max_model_len": 400, "snapshot_tokens": 48}
    lookup = {"method": "ngram", "num_speculative_tokens": 8}
    made = EngineCore(EngineConfig(model=path, speculative_config=lookup, **options), make_drafter=always)
    fresh = EngineCore(EngineConfig(model=path, enable_prefix_caching=False, **options))
    rng, history = random.Random(3), [random.Random(4).randrange(3, VOCAB) for _ in range(45)]
    for turn in range(6):
        user_tokens = [rng.randrange(3, VOCAB) for _ in range(11)]
        before, known_before = made.engine_stats.prompt_tokens, len(history) if turn else 0
        each = request(str(turn), history + user_tokens, max_tokens=24, logprobs=1, frequency_penalty=0.2)
        (answer,) = run(made, [each]).values()
        assert (answer.ids, answer.logprobs) == (lambda one: (one.ids, one.logprobs))(run(fresh, [each])[each.id])
        computed, new = made.engine_stats.prompt_tokens - before, len(each.prompt_ids) - known_before
        assert computed <= new + distance, "what is behind the last full page, or snapshot, is computed again"
        history = each.prompt_ids + answer.ids
    assert made.engine_stats.draft_tokens > 20
    assert fresh.engine_stats.prompt_tokens > (3 if distance == 16 else 2) * made.engine_stats.prompt_tokens


def test_repeated_prompt_resumes_at_last_full_block(folder: Path) -> None:
    """Also without a regular snapshot nearby. After a reset nothing is found."""
    made = EngineCore(EngineConfig(model=str(model(folder, "qwen3_5")), **SMALL, dtype="float32"))
    prompt = [random.Random(9).randrange(3, VOCAB) for _ in range(150)]
    each = request("0", prompt, max_tokens=5, logprobs=0)
    expected = known(run(made, [each]))
    for _ in range(2):
        before = made.engine_stats.prompt_tokens
        assert known(run(made, [each])) == expected
        assert made.engine_stats.prompt_tokens - before == 150 - 144
    made.reset_prefix_cache()
    assert known(run(made, [each])) == expected
    assert made.engine_stats.prompt_tokens - before == 6 + 150


@pytest.mark.parametrize("cached", [True, False])
def test_state_memory_is_shared_by_slots_and_snapshots(cached: bool, folder: Path) -> None:
    slot = 2 * 4 * (3 * (2 * 4 * 12 + 4 * 32) + 4 * 12 * 32)
    config = EngineConfig(
        model=str(model(folder, "qwen3_5")),
        dtype="float32",
        kv_cache_memory=2 / 1024,
        state_memory=20 * slot / GIB,
        max_model_len=128,
        max_num_seqs=12,
        enable_prefix_caching=cached,
        speculative_config={"method": "none"},
    )
    made = EngineCore(config)
    assert made.info.state_bytes == (20 if cached else 13) * slot
    assert made.info.state_bytes == sum(t.nbytes for each in made.executor._input_batch.recurrent_states for t in each)
    assert ("states of 9 sequences and 10 snapshots" in made.info.arithmetic) == cached
    assert any("9 sequences run at a time" in note for note in made.info.notes) == cached
    assert predict_kv_tokens(config, Machine("here", 2**34, None, None)) == made.info.num_blocks * 16


@pytest.mark.parametrize(
    "asked",
    [
        {"state_memory": 1e-6},
        {"speculative_config": {"method": "draft_model", "model": "", "num_speculative_tokens": 3}},
    ],
)
def test_large_states_reject_unsupported_settings(asked: dict[str, Any], folder: Path) -> None:
    path = str(model(folder, "qwen3_5"))
    if "speculative_config" in asked:
        asked["speculative_config"]["model"] = path
    with pytest.raises(ConfigError, match=f"^{next(iter(asked))}"):
        EngineCore(EngineConfig(model=path, **SMALL, **asked))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "kv"),
    [
        ("lfm2", "auto"),
        ("lfm2", "int8"),
        ("qwen3_5", "auto"),
        ("falcon_h1", "int8"),
        ("mamba2", "auto"),
        *slow(("jamba", "int8"), ("zamba2", "auto"), ("lfm3", "auto"), ("lfm3", "int8")),
    ],
)
def test_state_snapshots_load_from_tiers_with_kv_blocks(family: str, kv: str, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model", family)
    options = {"model": str(path), "num_kv_blocks": 14, "max_model_len": 192, "kv_cache_dtype": kv}
    options |= {"snapshot_tokens": 16, "max_num_seqs": 3, "state_memory": 5e-4}
    plain = EngineCore(EngineConfig(**options))
    expected = converse(plain)
    made = EngineCore(EngineConfig(**options, **HOST, **disk(tmp_path)), make_tiers=of_tiers)
    assert converse(made) == expected
    assert made.engine_stats.prompt_tokens < plain.engine_stats.prompt_tokens * 0.75
    assert made.engine_stats.tiers[0].fetched_pages > 0
    made.shut_down()
    again = EngineCore(EngineConfig(**options, **disk(tmp_path)), make_tiers=of_tiers)
    assert converse(again) == expected
    assert again.engine_stats.prompt_tokens < CONVERSATIONS * TURNS * 40
    again.shut_down()


@pytest.mark.parametrize("family", ["qwen3_5", "mamba2"])
def test_state_snapshots_load_with_late_copies_and_preemption(family: str, folder: Path) -> None:
    """Threads copy the blocks, and sequences are preempted meanwhile."""
    options = {"model": str(model(folder, family)), "max_model_len": 192, "snapshot_tokens": 16, "state_memory": 5e-4}
    expected = converse(EngineCore(EngineConfig(**options, num_kv_blocks=90)))
    made = EngineCore(EngineConfig(**options, num_kv_blocks=14, **HOST))
    for _ in range(2):
        assert converse(made) == expected
    made.shut_down()


@pytest.mark.parametrize("what", ["damaged", "gone"])
def test_kv_blocks_without_state_snapshot_are_no_hit(what: str, tmp_path: Path) -> None:
    """On disk a snapshot's file is larger than a block's."""
    path = save_tiny_model(tmp_path / "model", "qwen3_5")
    options = {"model": str(path), "max_model_len": 192, "num_kv_blocks": 40, "snapshot_tokens": 48, **disk(tmp_path)}
    each = request("0", [3 + at % 200 for at in range(170)], max_tokens=4, logprobs=0)
    first = EngineCore(EngineConfig(**options), make_tiers=always_late)
    expected = known(run(first, [each]))
    first.shut_down()

    def again() -> int:
        made = EngineCore(EngineConfig(**options), make_tiers=always_late)
        assert known(run(made, [each])) == expected
        made.shut_down()
        return made.engine_stats.prompt_tokens

    assert again() == 170 - 144
    files = [file for file in tmp_path.rglob("*") if file.is_file() and "model" not in file.parts]
    sizes = Counter(file.stat().st_size for file in files)
    pages = sizes.most_common(1)[0][0]
    snapshots = [file for file in files if file.stat().st_size > pages]
    assert len(snapshots) == 3  # of 48, 96 and 144 tokens
    for file in snapshots:
        if what == "gone":
            file.unlink()
        else:
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)
    assert again() == 170


@pytest.mark.parametrize("method", ["none", "ngram"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plan_counts_conv_states_and_kv_blocks(dtype: str, method: str, folder: Path) -> None:
    speculative = {"method": method, "num_speculative_tokens": 4}
    config = EngineConfig(
        model=str(model(folder, "lfm2")),
        dtype=dtype,
        kv_cache_memory=300 * 2**10 / GIB,
        max_model_len=128,
        max_num_seqs=12,
        speculative_config=speculative,
    )
    made = EngineCore(config)
    width, columns = {"float32": 4, "bfloat16": 2}[dtype], 2 + (4 if method == "ngram" else 0)
    slots = 13 * 2 * columns * 64 * width
    assert (
        made.info.state_bytes
        == slots
        == sum(t.nbytes for each in made.executor._input_batch.recurrent_states for t in each)
    )
    page = (2 * 16 * 2 * 16 + 2 * 2 * 64) * width
    assert made.info.kv_bytes == made.info.num_blocks * page
    assert made.info.num_blocks == min((300 * 2**10 - slots) // page, 12 * 8)
    assert predict_kv_tokens(config, Machine("here", 2**34, None, None)) == made.info.num_blocks * 16
    assert "states of 12 sequences: " in made.info.arithmetic


@pytest.mark.parametrize(
    "family", ["mamba2", "falcon_h1", "nemotron_h", "granite-hybrid", "mamba", "jamba", "zamba2", "kimi_linear"]
)
def test_plan_counts_state_space_states(family: str, folder: Path) -> None:
    config = EngineConfig(
        model=str(model(folder, family)), dtype="bfloat16", kv_cache_memory=4 / 1024, max_model_len=128, max_num_seqs=9
    )
    info = EngineCore(config).info
    assert info.state_bytes > 0
    assert predict_kv_tokens(config, Machine("here", 2**34, None, None)) == info.num_blocks * 16


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.usefixtures("thread_ranks", "one_thread")
@pytest.mark.parametrize(
    ("family", "asked"),
    [
        ("gemma4-small", {}),
        ("gemma4", {"kv_cache_dtype": "int8"}),
        ("gemma4-small", {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}),
        ("mtp", {"tensor_parallel_size": 2, "speculative_config": "mtp"}),
    ],
)
def test_plan_counts_kv_blocks_of_unlike_layers(family: str, asked: dict[str, Any], tmp_path: Path) -> None:
    """Layers that read other layers' KV, have heads of two sizes, or are an MTP layer, which is whole on every rank."""
    path = save_tiny_mtp(tmp_path / "m", "deepseek_v3") if family == "mtp" else save_tiny_model(tmp_path, family)
    options = {"dtype": "bfloat16", "kv_cache_memory": 2 / 1024, "max_model_len": 128, "max_num_seqs": 99, "threads": 2}
    config = EngineConfig(model=str(path), attention_backend="cpu", **options, **asked)
    info = EngineCore(config).info
    assert predict_kv_tokens(config, Machine("here", 2**34, None, None)) == info.num_blocks * info.block_size


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.usefixtures("thread_ranks", "one_thread")
@pytest.mark.parametrize("parts", [{"pipeline_parallel_size": 2}, {"pipeline_parallel_size": 3}])
@pytest.mark.parametrize("family", ["lfm2", "qwen3_5"])
def test_stages_have_block_count_and_state_bytes_of_single_process(
    family: str, parts: dict[str, int], folder: Path
) -> None:
    """The layers are unlike: convolution, attention, convolution."""
    options = {"kv_cache_memory": 2 / 1024, "max_model_len": 128, "max_num_seqs": 60, "threads": 3, "dtype": "float32"}
    whole, divided = (
        EngineCore(EngineConfig(model=str(model(folder, family)), attention_backend="cpu", **options, **own)).info
        for own in ({}, parts)
    )
    assert (divided.num_blocks, divided.state_bytes) == (whole.num_blocks, whole.state_bytes)
    assert divided.arithmetic == whole.arithmetic


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.usefixtures("thread_ranks", "one_thread")
@pytest.mark.parametrize("parts", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
@pytest.mark.parametrize("family", ["qwen3_5", *slow("mamba2", "jamba", "qwen3-next", "lfm2", "kimi_linear")])
def test_every_rank_restores_local_part_of_snapshot(family: str, parts: dict[str, int], folder: Path) -> None:
    options = {"max_model_len": 128, "threads": 2, "dtype": "float32", "num_kv_blocks": 40, "snapshot_tokens": 16}
    made = EngineCore(EngineConfig(model=str(model(folder, family)), attention_backend="cpu", **options, **parts))
    requests = [request(str(at), [3 + (at + 7 * each) % 300 for each in range(40)], max_tokens=3) for at in range(2)]
    expected = known(run(made, requests))
    assert made.engine_stats.prefix_hits == 0
    assert known(run(made, requests)) == expected
    assert made.engine_stats.prefix_hits >= 2 * 32


@pytest.mark.few(1)
@pytest.mark.parametrize("shape", [{}, {"max_num_batched_tokens": 11}, {"num_kv_blocks": 11, "max_model_len": 176}])
@pytest.mark.parametrize("served", ["lfm2", "llama"])
def test_recurrent_draft_model_does_not_change_tokens(served: str, shape: dict[str, int], folder: Path) -> None:
    """For itself it drafts right, however it has caught up; for another model it changes nothing."""
    path, options = str(model(folder, served)), {"dtype": "float32", **SMALL, **shape}
    plain = EngineCore(EngineConfig(model=path, **options))
    draft = {"method": "draft_model", "model": str(model(folder, "lfm2")), "num_speculative_tokens": 5}
    made = EngineCore(EngineConfig(model=path, speculative_config=draft, **options), make_drafter=always)
    prompts = [[3 + (at * at + each) % 300 for at in range(each)] for each in (5, 16, 31, 48, 64)]
    requests = [request(str(at), prompt, max_tokens=40, logprobs=0) for at, prompt in enumerate(prompts)]
    expected = known(run(plain, requests))
    for _ in range(2):
        assert known(run(made, requests)) == expected
    right, drafts = sum(made.engine_stats.accepted_drafts), made.engine_stats.draft_tokens
    assert drafts > 50
    if served == "lfm2":
        assert right > 0.98 * drafts
    assert (made.engine_stats.preemptions > 0) == ("num_kv_blocks" in shape)


def written_indices(tensors: list[torch.Tensor]) -> set[int]:
    """Indices along the first axis with nonzero content."""
    return {at for each in tensors for at in range(len(each)) if each[at].float().abs().sum() > 0}


@pytest.mark.parametrize(
    ("family", "drafts"),
    [
        ("lfm2", 4),
        ("qwen3_5", 0),
        ("mamba2", 4),
        ("jamba", 4),
        ("kimi_linear", 4),
        *slow(("falcon_h1", 4), ("zamba2", 4), ("nemotron_h-latent", 4)),
    ],
)
def test_sequences_use_planned_blocks_slots_and_snapshots(
    family: str, drafts: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan's sizes equal what is allocated, and each sequence writes to as many as the plan counts for it."""
    path = str(model(folder, family))
    guesses = {"method": "ngram", "num_speculative_tokens": drafts} if drafts else {"method": "none"}
    options: dict[str, Any] = {"kv_cache_memory": 0.004, "max_model_len": 192, "max_num_seqs": 3, "dtype": "bfloat16"}
    options["state_memory"] = 0.002  # the plan is for a GPU, whose default differs from this CPU's
    flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    flags += ["--speculative-config", json.dumps(guesses)]
    assert cli.main(["plan", path, "--memory", "4", "--json", *flags]) == 0
    planned = json.loads(capsys.readouterr().out)
    made = EngineCore(EngineConfig(model=path, speculative_config=guesses, snapshot_tokens=32, **options))
    states = [each for layer in made.executor._input_batch.recurrent_states for each in layer]
    assert planned["state_bytes"] == sum(each.nbytes for each in states) == made.info.state_bytes
    pages = made.executor._kv_tensors
    kv_bytes = sum(each.nbytes for each in pages)
    token = planned["kv"]["page_bytes"] // planned["kv"]["block_size"]
    tokens = made.info.num_blocks * made.info.block_size
    assert kv_bytes == (0 if family == "mamba2" else token * tokens), "a page of Mamba 2 holds nothing"
    for each in (*states, *pages):
        each.zero_()
    prompts = [[3 + (7 * at + each) % 300 for each in range(100)] for at in range(2)]
    run(made, [request(str(at), prompt, max_tokens=3) for at, prompt in enumerate(prompts)])
    large = any(isinstance(each, RecurrentStateSpec) for each in made.executor._model.spec.kv_cache_specs)
    snapshots = 2 * 3 if large else 0  # at 32, 64 and 96 tokens
    assert len(written_indices(states)) == 2 + snapshots
    assert len(written_indices([each.transpose(0, 1) for each in pages])) == (0 if family == "mamba2" else 2 * 7)
