"""Tests whole engines with tiers: tokens and logprobs are bit-identical wherever blocks are."""

from __future__ import annotations

import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError
from quire.engine.common.types import EngineCoreRequest
from quire.engine.engine_core import EngineCore
from quire.engine.tiers.kv_identity import numeric_code_folders
from quire.kernels.cpu.backend import CpuBackend
from tests.engine.harness import Answer, request, run
from tests.engine.test_heads import METHODS, Recorded, made_head
from tests.engine.tiers.fakes import always, always_late
from tests.tiny_models import VOCAB, save_tiny_model
from tests.tree import ROOT

MISSING = CpuBackend().missing_reason
compiled = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
HOST = {"kv_offload_memory": 0.1}
CONVERSATIONS, TURNS = 6, 4


def engine(path: Path, make_drafter: Any = None, make_tiers: Any = always, **options: object) -> EngineCore:
    config = EngineConfig(model=str(path), **{"num_kv_blocks": 14, "max_model_len": 192} | options)
    return EngineCore(config, make_drafter=make_drafter, make_tiers=make_tiers)


def disk(folder: Path) -> dict[str, object]:
    return {"kv_offload_dir": str(folder / "pages")}


Results = dict[str, tuple[list[int], list[float]]]


def ids_and_logprobs(answers: dict[str, Answer]) -> Results:
    return {name: (each.ids, [one.logprob for one in each.logprobs]) for name, each in answers.items()}


def turn(conversation: int, number: int, history: list[int], **params: object) -> EngineCoreRequest:
    new_ids = [random.Random(conversation * 100 + number).randrange(3, VOCAB) for _ in range(17)]
    params = {"max_tokens": 8, "logprobs": 0} | params
    return request(f"{conversation}-{number}", history + new_ids, seed=conversation, temperature=0.8, **params)


def converse(made: EngineCore, turns: range = range(TURNS), **params: object) -> Results:
    """Run conversations turn by turn, two of them at a time."""
    histories = {each: list[int]() for each in range(CONVERSATIONS)}
    answers_by_id: Results = {}
    for number in turns:
        for first in range(0, CONVERSATIONS, 2):
            requests = [turn(each, number, histories[each], **params) for each in (first, first + 1)]
            answers = run(made, requests)
            for each, one in zip((first, first + 1), requests, strict=True):
                histories[each] = one.prompt_ids + answers[one.id].ids
            answers_by_id |= ids_and_logprobs(answers)
    return answers_by_id


@pytest.mark.few(2)
@compiled
@pytest.mark.parametrize(
    ("dtype", "kv", "where"),
    [
        *(("float32", "auto", where) for where in ("host", "disk", "both")),
        *(("bfloat16", kv, "both") for kv in ("auto", "int8", "fp8")),
    ],
)
def test_tiers_keep_tokens_and_avoid_recompute(dtype: str, kv: str, where: str, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "gemma2" if kv == "auto" else "llama")
    options = {"dtype": dtype, "kv_cache_dtype": kv}
    plain = engine(path, **options)
    expected = converse(plain)
    tiers = (HOST if where != "disk" else {}) | (disk(tmp_path) if where != "host" else {})
    engine_core = engine(path, **options | tiers)
    assert converse(engine_core) == expected
    assert ("below it host 0.1 GiB = " in engine_core.info.arithmetic) == (where != "disk")
    assert ("disk 10 GiB = " in engine_core.info.arithmetic) == (where != "host")
    assert engine_core.engine_stats.prompt_tokens < plain.engine_stats.prompt_tokens * 0.75
    assert engine_core.engine_stats.tiers[0].fetched_pages > 0
    engine_core.shut_down()
    if where != "host":
        again = engine(path, **options | disk(tmp_path))
        assert converse(again) == expected
        assert again.engine_stats.prompt_tokens < CONVERSATIONS * TURNS * 40
        again.shut_down()


@compiled
@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_late_tier_copies_do_not_change_tokens(kv: str, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama")
    expected = converse(engine(path, kv_cache_dtype=kv))
    engine_core = engine(path, make_tiers=always_late, kv_cache_dtype=kv, **HOST, **disk(tmp_path))
    assert converse(engine_core) == expected
    engine_core.shut_down()


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", [pytest.param("cpu", marks=compiled), "reference"])
def test_preempted_requests_load_from_host_tier_unchanged(backend: str, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "qwen3")
    requests = [turn(each, 0, [7] * 33, max_tokens=40) for each in range(CONVERSATIONS)]
    expected = ids_and_logprobs(run(engine(path, num_kv_blocks=90, attention_backend=backend), requests))
    engine_core = engine(path, num_kv_blocks=16, attention_backend=backend, **HOST)
    assert ids_and_logprobs(run(engine_core, requests)) == expected
    assert engine_core.engine_stats.preemptions > 0
    assert engine_core.engine_stats.tiers[0].fetched_pages > 0


@pytest.mark.few(1)
@compiled
@pytest.mark.parametrize(
    "speculative", ["ngram", "suffix", {"method": "draft_model", "model": "", "num_speculative_tokens": 3}]
)
def test_tiers_with_speculation_keep_tokens(speculative: str | dict[str, object], tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model", "llama")
    if isinstance(speculative, dict):
        speculative = speculative | {"model": str(save_tiny_model(tmp_path / "draft", "llama", num_hidden_layers=1))}
    expected = converse(engine(path))
    engine_core = engine(path, speculative_config=speculative, **HOST, **disk(tmp_path))
    assert converse(engine_core) == expected
    assert engine_core.engine_stats.tiers[0].fetched_pages > 0
    engine_core.shut_down()


@pytest.mark.few(1)
@compiled
@pytest.mark.parametrize("method", METHODS)
def test_draft_head_kv_is_restored_with_block(method: str, tmp_path: Path) -> None:
    """After a restart the heads draft as in an engine that never lost a block, and no token changes."""
    path = save_tiny_model(tmp_path / "model", "llama")
    head, _ = made_head(tmp_path / "head", method)
    prompt = list(range(3, 100))
    first, probe = turn(0, 0, prompt, max_tokens=1), turn(1, 0, prompt, max_tokens=30)

    def opened(recorded: Recorded, **options: object) -> EngineCore:
        requests = {"method": method, "model": str(head), "num_speculative_tokens": 3}
        options = {"num_kv_blocks": 100, "max_model_len": 200, "dtype": "float32"} | options
        return engine(path, recorded.make, speculative_config=requests, **options)

    plain = engine(path, num_kv_blocks=100, max_model_len=200, dtype="float32")
    run(plain, [first])
    expected = ids_and_logprobs(run(plain, [probe]))
    before, after = Recorded(), Recorded()
    one = opened(before, **disk(tmp_path))
    run(one, [first])
    assert not before.guesses
    assert ids_and_logprobs(run(one, [probe])) == expected
    one.shut_down()
    two = opened(after, **disk(tmp_path))
    assert ids_and_logprobs(run(two, [probe])) == expected
    assert after.guesses == before.guesses
    assert two.engine_stats.tiers[0].fetched_pages == 7
    assert sum(len(guess) for _, guess in before.guesses) > 30
    two.shut_down()


@compiled
def test_reset_prefix_cache_clears_every_tier(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama")
    engine_core = engine(path, **HOST, **disk(tmp_path))
    expected = converse(engine_core)
    engine_core.reset_prefix_cache()
    first = turn(0, 0, [])
    assert run(engine_core, [first])[first.id].cached_tokens == 0
    engine_core.reset_prefix_cache()
    engine_core.shut_down()
    again = engine(path, **disk(tmp_path))
    assert run(again, [first])[first.id].cached_tokens == 0
    assert ids_and_logprobs(run(again, [first]))[first.id] == expected[first.id]
    again.shut_down()


def salted(name: str, salt: str) -> EngineCoreRequest:
    return request(name, list(range(3, 90)), max_tokens=2, salt=salt)


@compiled
@pytest.mark.parametrize("where", ["host", "disk"])
def test_other_cache_salt_misses_prefix_in_every_tier(where: str, tmp_path: Path) -> None:
    """The salts have the form of tenants' salts: server/access/tenants.py."""
    path = save_tiny_model(tmp_path, "llama")
    tiers = HOST if where == "host" else disk(tmp_path)
    engine_core = engine(path, **tiers)
    run(engine_core, [salted("a", "aa/")])
    engine_core.scheduler.kv_cache_manager.block_pool.clear_hashes()
    if where == "disk":
        engine_core.shut_down()
        engine_core = engine(path, **tiers)
    assert run(engine_core, [salted("probe", "bb/")])["probe"].cached_tokens == 0
    assert run(engine_core, [salted("probe", "")])["probe"].cached_tokens == 0
    assert engine_core.engine_stats.tiers[0].fetched_pages == 0
    engine_core.scheduler.kv_cache_manager.block_pool.clear_hashes()
    assert run(engine_core, [salted("own", "aa/")])["own"].cached_tokens == 80
    assert engine_core.engine_stats.tiers[0].fetched_pages == 5
    engine_core.shut_down()


def save_other(folder: Path) -> Path:
    """The model "llama" with one number of one weight changed."""
    path = save_tiny_model(folder, "llama")
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"][0] += 1.0
    save_file(tensors, path / "model.safetensors")
    return path


@compiled
def test_blocks_of_other_weights_dtype_or_layout_are_not_loaded(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "one", "llama")
    changed = save_other(tmp_path / "two")
    first, tiers = turn(0, 0, [5] * 40), disk(tmp_path)
    one = engine(path, dtype="float32", **tiers)
    run(one, [first])
    one.shut_down()
    others = (
        {"dtype": "bfloat16"},
        {"dtype": "float32", "kv_cache_dtype": "int8"},
        {"dtype": "float32", "quantization": "int8"},
        {"dtype": "float32", "attention_backend": "reference"},
        {"dtype": "float32", "weights": str(changed)},
    )
    for options in others:
        other = engine(path, **options, **tiers)
        assert run(other, [first])[first.id].cached_tokens == 0, options
        other.shut_down()
    copied = engine(path, dtype="float32", weights=str(path), **tiers)
    assert run(copied, [first])[first.id].cached_tokens == 48, "the same content under another name is the same"
    copied.shut_down()


@compiled
def test_blocks_of_overwritten_checkpoint_are_not_loaded(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model", "llama")
    first, tiers = turn(0, 0, [5] * 40), disk(tmp_path)
    one = engine(path, **tiers)
    run(one, [first])
    one.shut_down()
    save_other(tmp_path / "model")
    two = engine(path, **tiers)
    assert run(two, [first])[first.id].cached_tokens == 0
    two.shut_down()


def corrupt(folder: Path, chance: random.Random) -> None:
    """Truncate a file, or flip one of its bits."""
    pages = [each for each in folder.rglob("*") if each.is_file() and len(each.name) == 32]
    file = chance.choice(sorted(each for each in pages if each.stat().st_size))
    content = bytearray(file.read_bytes())
    if chance.random() < 0.5:
        content = content[: chance.randrange(len(content))]
    else:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)


@compiled
@pytest.mark.parametrize("rounds", [30, pytest.param(1000, marks=pytest.mark.slow)])
def test_corrupt_tier_files_do_not_change_tokens(rounds: int, tmp_path: Path) -> None:
    path, chance = save_tiny_model(tmp_path, "llama"), random.Random(rounds)
    engine_core = engine(path, **disk(tmp_path))
    requests = [turn(0, 0, list(range(3, 120)))]
    expected = ids_and_logprobs(run(engine_core, requests))
    for _ in range(rounds):
        corrupt(tmp_path / "pages", chance)
        engine_core.scheduler.kv_cache_manager.block_pool.clear_hashes()
        assert ids_and_logprobs(run(engine_core, requests)) == expected
    assert 0 < engine_core.engine_stats.tiers[0].fetched_pages < rounds * 8
    engine_core.shut_down()


@compiled
def test_tensor_weights_use_host_tier_only(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama")
    tensors = load_file(path / "model.safetensors")
    config = EngineConfig(model=str(path), num_kv_blocks=14, max_model_len=192, **HOST, **disk(tmp_path))
    engine_core = EngineCore(config, tensors=tensors.items(), make_tiers=always)
    assert [tier.name for tier in engine_core.engine_stats.tiers] == ["host"]
    assert any("in no file" in note for note in engine_core.info.notes)
    engine_core.shut_down()


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"kv_offload_memory": 1, "enable_prefix_caching": False}, "kv_offload_memory"),
        ({"kv_offload_dir": "/dev/null/x"}, "kv_offload_dir"),
        ({"kv_offload_disk": 10, "kv_offload_memory": 1}, "kv_offload_disk"),
        ({"kv_offload_tier": "no.such.module:make"}, "kv_offload_tier"),
    ],
)
def test_invalid_tier_settings_are_rejected(options: dict[str, object], param: str, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama")
    with pytest.raises(ConfigError) as refused:
        engine(path, **options)
    assert refused.value.param == param


@compiled
def test_custom_tier_example_shares_blocks_between_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of docs/reference/settings.md: two servers share a folder, and somebody changes blocks in it."""
    monkeypatch.syspath_prepend(ROOT / "examples" / "kv_tiers")
    monkeypatch.setenv("SHARED_PAGES", str(tmp_path / "shared"))
    path, first = save_tiny_model(tmp_path, "llama"), turn(0, 0, list(range(3, 100)))
    one = engine(path, kv_offload_tier="shared_folder:make", **HOST)
    expected = ids_and_logprobs(run(one, [first]))
    one.shut_down()
    two = engine(path, kv_offload_tier="shared_folder:make", **HOST)
    answers = run(two, [first])
    assert (ids_and_logprobs(answers), answers[first.id].cached_tokens) == (expected, 112)
    assert {tier.name: tier.fetched_pages for tier in two.engine_stats.tiers} == {"host": 0, "shared": 7}
    two.scheduler.kv_cache_manager.block_pool.clear_hashes()
    assert run(two, [first])[first.id].cached_tokens == 112
    assert two.engine_stats.tiers[0].fetched_pages == 7, "what was fetched is at hand in the host's memory"
    two.shut_down()
    for file in (tmp_path / "shared").rglob("*"):
        if file.is_file():
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
    three = engine(path, kv_offload_tier="shared_folder:make")
    answers = run(three, [first])
    assert (ids_and_logprobs(answers), answers[first.id].cached_tokens) == (expected, 0)
    three.shut_down()


@compiled
def test_idle_warmup_does_not_overwrite_loaded_blocks(tmp_path: Path) -> None:
    """Warm-up writes to blocks that no step has used: see KVPrefaulter."""
    path, first = save_tiny_model(tmp_path, "llama"), turn(0, 0, list(range(3, 100)))
    one = engine(path, num_kv_blocks=800, **disk(tmp_path))
    expected = ids_and_logprobs(run(one, [first]))
    one.shut_down()
    two = engine(path, num_kv_blocks=800, **disk(tmp_path))
    two.add_request(first)
    two.scheduler.schedule()
    assert two.scheduler.kv_offloader.has_open_loads
    two.abort_request(first.id)
    two.scheduler.take_outputs()
    while two.has_work:
        two.step()
    while two.run_next_warmup():
        pass
    answers = run(two, [first])
    assert answers[first.id].cached_tokens == 112
    assert ids_and_logprobs(answers) == expected
    two.shut_down()


@pytest.mark.parametrize(
    "name", ["architecture.rope", "encoders.encoder", "families.qwen3", "layers.rope", "models.decoder"]
)
def test_stored_blocks_are_not_found_after_change_of_code_that_numbers_depend_on(name: str) -> None:
    """KV blocks on disk are found only by the code that wrote them. A family's file says how its layers compute."""
    found = find_spec(f"quire.engine.{name}")
    assert found is not None
    assert found.origin is not None
    assert any(Path(found.origin).is_relative_to(folder) for folder in numeric_code_folders())
