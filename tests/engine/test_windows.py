"""Layers of several sliding windows, a block table per KV cache group: the same tokens from fewer blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from quire.engine.architecture.attention import AttentionLayerSpec
from quire.engine.architecture.kv_cache_spec import attention_kv_cache_spec
from quire.engine.checkpoint.kv_cache_groups import KVBlockNeeds, build_kv_cache_groups, single_kv_cache_group
from quire.engine.checkpoint.kv_cache_plan import GIB
from quire.engine.checkpoint.model_resolver import read_model_config
from quire.engine.checkpoint.sizes.model_sizes import read_model_sizes
from quire.engine.common.config import EngineConfig
from quire.engine.common.types import EngineCoreRequest
from quire.engine.engine_core import EngineCore
from quire.engine.models import decoder_spec
from quire.engine.worker import device_plan
from quire.engine.worker.loading import model_loader as loading
from quire.server.cli.plan.machine import Machine
from quire.server.cli.plan.model_plan import predict_kv_tokens
from tests.engine.harness import Answer, request, run
from tests.tiny_models import FAMILIES, VOCAB, save_tiny_model

FOUR = (16, 40, 100, None)


@pytest.fixture
def four_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The four layers of a model have different windows; one has none."""
    plain = device_plan.decoder_spec
    monkeypatch.setattr(
        device_plan,
        "decoder_spec",
        lambda config: plain(config).replace_sublayer_fields(AttentionLayerSpec, window=[*FOUR]),
    )


@pytest.fixture
def as_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """One KV cache group of all layers, whose blocks are all kept."""
    with monkeypatch.context() as patch:
        patch.setattr(loading, "build_kv_cache_groups", lambda states, *_, **__: single_kv_cache_group(len(states)))
        yield patch


def engine(path: Path, **options: object) -> EngineCore:
    defaults = {"num_kv_blocks": 160, "max_num_batched_tokens": 64, "dtype": "float32"}
    return EngineCore(EngineConfig(model=str(path), **defaults | options))


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    common = torch.randint(3, VOCAB, (max(lengths),), generator=generator).tolist()
    return [[*common[: length - 1], 3 + index] for index, length in enumerate(lengths)]


def asked() -> list[EngineCoreRequest]:
    """Long prompts, and short ones whose answers outgrow a small cache together."""
    long = [request(f"long {i}", each, max_tokens=20, logprobs=0) for i, each in enumerate(prompts(1, 50, 130, 240))]
    return long + [request(f"{i}", [i + 3, *range(9, 25)], max_tokens=50, logprobs=0) for i in range(5)]


def tokens(answers: dict[str, Answer]) -> dict[str, tuple[list[int], list[float]]]:
    return {name: (each.ids, [one.logprob for one in each.logprobs]) for name, each in answers.items()}


OPTIONS = {
    "chunks": {"max_num_batched_tokens": 9},
    "preempted": {"num_kv_blocks": 14, "max_model_len": 280, "max_num_batched_tokens": 16},
    "guessed": {"speculative_config": "ngram"},
    "no cache": {"enable_prefix_caching": False},
    "plain PyTorch": {"attention_backend": "reference"},
    "tiers": {"kv_offload_memory": 0.01},
}


@pytest.mark.few(1)
@pytest.mark.usefixtures("four_windows")
@pytest.mark.parametrize(("family", "kv"), [("gemma2", "auto"), ("gemma3", "int8")])
def test_sliding_window_tokens_equal_engine_that_keeps_all_blocks(
    family: str, kv: str, tmp_path: Path, as_one: pytest.MonkeyPatch
) -> None:
    path = save_tiny_model(tmp_path, family)
    whole = engine(path, kv_cache_dtype=kv)
    assert whole.info.page_groups == 1
    expected = tokens(run(whole, asked()))
    as_one.undo()
    first = engine(path, kv_cache_dtype=kv)
    assert first.info.page_groups == 4
    assert tokens(run(first, asked())) == expected
    cached_answers = run(first, asked())
    assert tokens(cached_answers) == expected
    assert [each.cached_tokens for each in cached_answers.values()][:4] == [0, 48, 128, 224]
    for name, options in OPTIONS.items():
        other = engine(path, kv_cache_dtype=kv, **options)
        actual = tokens(run(other, asked()))
        if name == "plain PyTorch":
            assert {key: ids for key, (ids, _) in actual.items()} == {key: ids for key, (ids, _) in expected.items()}
        else:
            assert actual == expected, name
        assert (other.engine_stats.preemptions > 0) == (name == "preempted")
        assert other.info.page_groups == (1 if name == "tiers" else 4)
        assert ("keep all tokens, because kv_offload_memory" in " ".join(other.info.notes)) == (name == "tiers")


@pytest.mark.usefixtures("four_windows")
def test_sliding_windows_hold_less_than_60_percent_at_8k_tokens(tmp_path: Path, as_one: pytest.MonkeyPatch) -> None:
    """Shares of blocks are shares of bytes: all blocks of a model have the same size."""
    path = save_tiny_model(tmp_path, "gemma2", max_position_embeddings=8320, hidden_size=32, intermediate_size=32)
    prompt = request("long", prompts(8192)[0], max_tokens=20)

    def held(each: EngineCore) -> tuple[list[int], float, float]:
        """The tokens; and the most blocks of all layers held after the first token, without and with saved ones."""
        found, held, whole = list[int](), 0.0, 0.0
        each.add_request(prompt)
        while each.has_work:
            found += [token for output in each.step() for token in output.new_ids]
            if found:
                used, groups = each.engine_stats.used_blocks, each.info.page_groups
                held, whole = max(held, used / groups), max(whole, (used + each.engine_stats.saved_blocks) / groups)
        return found, held, whole

    options = {"num_kv_blocks": 540, "max_num_batched_tokens": 512, "max_num_seqs": 2}
    wanted, every, whole = held(engine(path, **options))
    as_one.undo()
    got, fewer, both = held(engine(path, **options))
    assert got == wanted
    assert every == whole == both == 514
    assert fewer < 0.6 * every


@pytest.mark.few(27)
@pytest.mark.parametrize("family", [name for name in FAMILIES if "gemma3-with-images" not in name])
def test_plan_sizes_equal_engine_cache_specs(family: str, tmp_path: Path) -> None:
    config = read_model_config(save_tiny_model(tmp_path, family))
    sizes, spec = read_model_sizes(config.raw), decoder_spec(config)
    assert list(sizes.layer_cache_specs) == spec.layer_cache_specs


@pytest.mark.parametrize(
    ("windows", "longest", "groups", "unused"),
    [
        ((None,) * 4, 4096, 1, 0),
        ((64,) * 4, 4096, 1, 0),
        ((4096, None) * 13, 4096, 1, 0),  # a window as long as the context
        ((4096, None) * 13, 8192, 2, 0),
        (((512,) * 5 + (None,)) * 4 + (512, 512), 32768, 7, 2),  # Gemma 3 1B
        ((128, None) * 12, 131072, 2, 0),
        (tuple(range(10, 30)), 4096, 1, 0),  # more windows than tables
    ],
)
def test_kv_cache_groups_have_one_window_and_unique_layer_places(
    windows: tuple[int | None, ...], longest: int, groups: int, unused: int
) -> None:
    states = [(attention_kv_cache_spec(64, window=window),) for window in windows]
    made = build_kv_cache_groups(states, longest, 16)
    assert (made.num_groups, made.layers_per_block * made.num_groups - len(windows)) == (groups, unused)
    assert len(set(zip(made.group_of_layer, made.layer_index_in_block, strict=True))) == len(windows)
    assert set(made.layer_index_in_block) == set(range(made.layers_per_block))
    for window, group in zip(windows, made.group_of_layer, strict=True):
        assert made.windows[group] == window or ((made.windows[group] is None and groups == 1) or window >= longest)
    assert build_kv_cache_groups(states, longest, 16, keep_all_tokens=True) == single_kv_cache_group(len(windows))
    unequal = [*states[1:], (attention_kv_cache_spec(128, window=windows[0]),)]
    assert build_kv_cache_groups(unequal, longest, 16) == single_kv_cache_group(len(windows))


@pytest.mark.parametrize(("window", "at_once"), [(1, 1), (5, 1), (16, 7), (17, 16), (40, 100)])
def test_sequence_never_exceeds_planned_blocks(window: int, at_once: int) -> None:
    needs = KVBlockNeeds((window, None), 16, at_once)
    for length in range(1, 300):
        held = 0
        for start in range(length):
            last = min(start + at_once, length) - 1
            held = max(held, last // 16 - needs.first_visible_block(window, start) + 1)
        assert held <= needs.max_blocks(length) - -(-length // 16) <= -(-length // 16)
        assert needs.max_context_tokens(needs.max_blocks(length), length) == length
        assert needs.max_context_tokens(needs.max_blocks(length) - 1, length) < length


def test_kv_cache_plan_equals_engine_allocation(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "gpt_oss")
    config = EngineConfig(model=str(path), kv_cache_memory=0.004, max_num_seqs=4, max_num_batched_tokens=32)
    made = EngineCore(config)
    assert made.info.page_groups == 3
    assert sum(each.nbytes for each in made.executor._kv_tensors) == made.info.kv_bytes
    assert made.engine_stats.total_blocks == 3 * made.info.num_blocks
    assert predict_kv_tokens(config, Machine("test", memory=4 * GIB, gpu=False)) == made.info.num_blocks * 16
    assert "windows (3 block tables: 2 of 24 tokens, 1 of all tokens) save" in made.info.arithmetic
    longest = KVBlockNeeds((24, 24, None), 16, 32)
    assert made.info.context_pages == longest.max_blocks(made.info.max_model_len)
