"""Latent attention: what pages hold, what the plan says of it, and the same tokens with everything on."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.engine.checkpoint.files import read_model_config
from quire.engine.checkpoint.kv_plan import GIB
from quire.engine.config import EngineConfig
from quire.engine.drafting.adaptive import Adaptive
from quire.engine.errors import ConfigError
from quire.engine.loop import Engine
from quire.engine.models import decoder_spec
from quire.engine.worker.device import check_attention
from quire.server.cli.plan.configured import predicted_tokens
from quire.server.cli.plan.machine import Machine
from tests.engine.harness import run
from tests.engine.test_speculation import CHEAP, Garbage
from tests.engine.test_states import PARAMS, PROMPT, SHAPES, SMALL, asked, known
from tests.engine.tiers.fakes import Always, Inline
from tests.engine.tiers.test_engine import CONVERSATIONS, HOST, TURNS, converse, disk
from tests.tiny_models import save_tiny_model
from tests.variants import examples


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("latents")


@cache
def model(folder: Path, family: str) -> Path:
    return save_tiny_model(folder / family, family)


@cache
def engine(folder: Path, family: str, dtype: str, kv: str, shape: int | None) -> Engine:
    """None: alone, with no cached prefixes."""
    chosen = {"enable_prefix_caching": False} if shape is None else SHAPES[shape]
    return Engine(EngineConfig(model=str(model(folder, family)), dtype=dtype, kv_cache_dtype=kv, **(SMALL | chosen)))


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    traffic=st.lists(st.tuples(PROMPT, PARAMS), min_size=1, max_size=7),
    shape=st.integers(0, len(SHAPES) - 1),
    family=st.sampled_from(["deepseek_v2-lite", "deepseek_v3", "youtu"]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    kv=st.sampled_from(["auto", "auto", "int8", "fp8"]),
    guesses=st.one_of(st.none(), st.integers(0, 99)),
)
def test_neither_neighbours_nor_chunks_nor_hits_nor_guesses_change_a_bit(
    folder: Path,
    traffic: list[tuple[tuple[int, int, int, int], dict[str, Any]]],
    shape: int,
    family: str,
    dtype: str,
    kv: str,
    guesses: int | None,
) -> None:
    requests, alone = asked(traffic), engine(folder, family, dtype, kv, None)
    wanted: dict[str, object] = {}
    for each in requests:
        wanted |= known(run(alone, [each]))
    made = engine(folder, family, dtype, kv, shape)
    plain = made.scheduler._drafter
    if guesses is not None:
        made.scheduler._drafter = Adaptive(Garbage(random.Random(guesses)), 8, CHEAP)
    for _ in range(2):
        assert known(run(made, requests)) == wanted
    made.scheduler._drafter = plain


@pytest.mark.parametrize(("kv", "beside"), [("auto", 0), ("int8", 2), ("fp8", 0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_page_holds_one_latent_and_one_key_of_each_token(dtype: str, kv: str, beside: int, folder: Path) -> None:
    config = EngineConfig(
        model=str(model(folder, "deepseek_v3")),
        dtype=dtype,
        kv_cache_dtype=kv,
        kv_cache_memory=300 * 2**10 / GIB,
        max_model_len=128,
        max_num_seqs=12,
    )
    made = Engine(config)
    width = {"float32": 4, "bfloat16": 2}[dtype] if kv == "auto" else 1
    page = 3 * 16 * (32 + 16 + beside) * width
    assert made.info.kv_bytes == made.info.num_blocks * page
    assert made.info.num_blocks == min(300 * 2**10 // page, 12 * 8)
    assert "32 latent + 16 rotated" in made.info.arithmetic
    assert predicted_tokens(config, Machine("here", 2**34, None, None)) == made.info.num_blocks * 16


@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_latents_come_back_from_tiers(kv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.tiers.costs.Costs.worthwhile", Always.worthwhile)
    monkeypatch.setattr("quire.engine.tiers.writer.ThreadPoolExecutor", Inline)
    path = save_tiny_model(tmp_path / "model", "deepseek_v2")
    options = {"model": str(path), "num_kv_blocks": 14, "max_model_len": 192, "kv_cache_dtype": kv}
    plain = Engine(EngineConfig(**options))
    wanted = converse(plain)
    made = Engine(EngineConfig(**options, **HOST, **disk(tmp_path)))
    assert converse(made) == wanted
    assert made.stats.tiers[0].fetched_pages > 0
    made.close()
    again = Engine(EngineConfig(**options, **disk(tmp_path)))
    assert converse(again) == wanted
    assert again.stats.prompt_tokens < CONVERSATIONS * TURNS * 40
    again.close()


def test_a_gpu_is_refused_with_what_serves_there(folder: Path) -> None:
    config = read_model_config(model(folder, "deepseek_v2"))
    with pytest.raises(ConfigError, match=r"latent attention .* --device cpu, or --model-impl transformers"):
        check_attention(torch.device("cuda"), config, decoder_spec(config))
