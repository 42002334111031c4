"""Weights are freed, restored and replaced while requests are open, on real engines with tiny models."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quire.engine.client.engine_client import EngineClient
from quire.engine.client.process_client import ProcessClient
from quire.engine.client.weights import MODES, Mode, Weights
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError, InvalidRequest, ModelError, Overloaded, QuireError
from quire.engine.common.request_params import PoolingParams, SamplingParams
from quire.engine.common.types import EngineCoreRequest, TokenLogprob
from quire.engine.engine_core import EngineCore
from quire.engine.engine_core_process import _rebuild_engine_or_previous
from quire.engine.offline.in_process_client import InProcessClient
from quire.engine.processes.heartbeat import NullHeartbeat
from tests.quantized_models import gptq, quantize_checkpoint
from tests.tiers import slow
from tests.tiny_encoders import save_tiny_encoder
from tests.tiny_models import save_tiny_model

LONG = 2000
"""Tokens of answers that stay open during a change."""
FILE = "model.safetensors"
PREFIX = [3 + 7 * index % 300 for index in range(40)]
"""The common beginning of all prompts, several blocks long."""


@dataclass
class Answer:
    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    """The stream's weights version at each token."""
    version: str = ""
    finish_reason: str | None = None
    cached_tokens: int = 0


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models of the same shape."""
    first = save_tiny_model(tmp_path_factory.mktemp("first"), "llama", max_position_embeddings=4096)
    second = tmp_path_factory.mktemp("second")
    shutil.copy(first / "config.json", second)
    torch.manual_seed(5)
    tensors = {name: each + torch.randn_like(each) * 0.1 * each.std() for name, each in load_file(first / FILE).items()}
    save_file(tensors, second / FILE, metadata={"format": "pt"})
    return first, second


def config_of(folder: Path, **options: object) -> EngineConfig:
    settings = {"model": str(folder), "num_kv_blocks": 2000, "threads": 1, "dtype": "float32", "max_model_len": 2100}
    return EngineConfig.model_validate(settings | {"skip_tokenizer_init": True} | options)


@asynccontextmanager
async def running(client: EngineClient) -> AsyncIterator[Weights]:
    await client.engine_core.start()
    try:
        yield Weights(client)
    finally:
        await client.engine_core.stop()


async def ask(client: EngineClient, name: str, tokens: int = 8, ends: int = 0) -> Answer:
    """`ends`: selects the last token of the prompt, and the seed."""
    answer = Answer([*PREFIX, 1 + ends])
    params = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, logprobs=0)
    stream = client.submit([EngineCoreRequest(id=name, prompt_ids=answer.prompt, params=params, seed=ends)])
    async for outputs in stream:
        for output in outputs:
            answer.ids += output.new_ids
            answer.logprobs += output.logprobs or []
            answer.versions += [stream.weights_version] * len(output.new_ids)
            answer.finish_reason = output.finish_reason
            answer.cached_tokens = max(answer.cached_tokens, output.cached_tokens)
    answer.version = stream.weights_version
    return answer


async def start_open_answers(client: EngineClient, count: int, tokens: int) -> list[asyncio.Task[Answer]]:
    """Answers that have begun and are far from their end."""
    tasks = [asyncio.create_task(ask(client, f"open-{index}", tokens, index)) for index in range(count)]
    while client.engine_core.stats.generation_tokens < 4 * count:  # noqa: ASYNC110, there is no event to wait for
        await asyncio.sleep(0.002)
    assert not any(task.done() for task in tasks)
    return tasks


def expected(folder: Path, answer: Answer) -> list[float]:
    """transformers' log probabilities of the answer's tokens with these weights."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        every = model(torch.tensor([answer.prompt + answer.ids])).logits[0].log_softmax(-1)
    begin = len(answer.prompt) - 1
    return [float(every[begin + place, token]) for place, token in enumerate(answer.ids)]


def max_logprob_error(folder: Path, answer: Answer, begin: int = 0, end: int | None = None) -> float:
    """The largest difference to transformers' log probabilities, among tokens begin to end."""
    logprobs = [each.logprob for each in answer.logprobs]
    return max(abs(a - b) for a, b in list(zip(logprobs, expected(folder, answer), strict=True))[begin:end])


async def same_tokens(client: EngineClient, expected: list[int]) -> bool:
    return (await ask(client, os.urandom(8).hex(), len(expected))).ids == expected


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2])
async def test_streams_resume_unchanged_after_sleep(folders: tuple[Path, Path], level: int) -> None:
    client = EngineClient(ProcessClient(config_of(folders[0])))
    async with running(client) as weights:
        alone = [await ask(client, f"alone-{index}", LONG, index) for index in range(3)]
        before = client.engine_core.stats.generation_tokens
        tasks = [asyncio.create_task(ask(client, f"open-{index}", LONG, index)) for index in range(3)]
        while client.engine_core.stats.generation_tokens < before + 60:  # noqa: ASYNC110, there is no event to wait for
            await asyncio.sleep(0.002)
        await weights.sleep(level)
        assert client.engine_core.asleep
        assert client.healthy
        assert not client.responsive
        assert (client.engine_core.pid is None) == (level == 2)
        late = asyncio.create_task(ask(client, "late"))
        await asyncio.sleep(0.2)
        assert not any(task.done() for task in [*tasks, late])
        await weights.sleep(level)  # a second call changes nothing
        await weights.wake_up()
        assert [task.ids for task in await asyncio.gather(*tasks)] == [each.ids for each in alone]
        assert (await late).ids == alone[0].ids[:8]
        assert client.engine_core.deaths == client.engine_core.replays == 0
        assert client.engine_core.stats.generation_tokens >= before


@pytest.mark.slow
async def test_killed_sleeping_engine_wakes_up(folders: tuple[Path, Path]) -> None:
    client = EngineClient(ProcessClient(config_of(folders[0])))
    async with running(client) as weights:
        ids = (await ask(client, "first")).ids
        await weights.sleep()
        assert client.engine_core.pid is not None
        os.kill(client.engine_core.pid, signal.SIGKILL)
        while client.engine_core.pid is not None:  # noqa: ASYNC110, there is no event to wait for
            await asyncio.sleep(0.01)
        assert client.engine_core.asleep
        await weights.wake_up()
        assert await same_tokens(client, ids)


@pytest.mark.slow
async def test_tokens_match_weights_version_during_update_under_32_streams(folders: tuple[Path, Path]) -> None:
    """No token uses KV that other weights computed. An engine that is killed restarts with the new weights."""
    first, second = folders
    client = EngineClient(ProcessClient(config_of(first)))
    async with running(client) as weights:
        tasks = await start_open_answers(client, 32, 800)
        assert await weights.update(str(second), version="step-1") == "step-1"
        later = await asyncio.gather(*[ask(client, f"later-{index}", 8, 40 + index) for index in range(4)])
        answers = await asyncio.gather(*tasks)
        for answer in answers:
            switch = answer.versions.index("step-1")
            assert answer.versions == ["1"] * switch + ["step-1"] * (800 - switch)
            assert answer.version == "step-1"
        for answer in answers[:6]:
            switch = answer.versions.index("step-1")
            assert max_logprob_error(first, answer, 0, switch) < 1e-3
            assert max_logprob_error(second, answer, switch) < 1e-3
            assert max_logprob_error(first, answer, switch) > 0.05, "the two weights are far apart"
        for answer in later:
            assert answer.version == "step-1"
            assert max_logprob_error(second, answer) < 1e-3
        later_answer = await ask(client, "again", 8, 40)
        assert later_answer.cached_tokens > 0
        assert later_answer.ids == later[0].ids
        assert client.engine_core.pid is not None
        os.kill(client.engine_core.pid, signal.SIGKILL)
        after = await ask(client, "after", 8, 40)
        assert after.ids == later_answer.ids
        assert after.version == "step-1"
        assert await weights.update(str(first)) == "3"


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", MODES)
async def test_weight_update_mode_aborts_awaits_or_keeps_open_requests(folders: tuple[Path, Path], mode: Mode) -> None:
    first, second = folders
    client = EngineClient(ProcessClient(config_of(first)))
    async with running(client) as weights:
        tasks = await start_open_answers(client, 2, LONG)
        update = asyncio.create_task(weights.update(str(second), mode))
        for number in count():  # while the new weights are checked, the old ones still answer
            new = await ask(client, f"new {number}")
            if not new.versions:  # aborted with the others before its first token
                continue
            if new.versions[0] == "2":
                break
            assert new.version == "2" or max_logprob_error(first, new) < 1e-3
        assert await update == "2"
        assert max_logprob_error(second, new) < 1e-3
        for answer in await asyncio.gather(*tasks):
            assert answer.finish_reason == ("abort" if mode == "abort" else "length")
            assert answer.version == ("2" if mode == "keep" else "1")
            assert (len(answer.ids) == LONG) == (mode != "abort")


@pytest.mark.slow
async def test_requests_can_be_cancelled_during_weight_update(folders: tuple[Path, Path]) -> None:
    client = EngineClient(ProcessClient(config_of(folders[0])))
    async with running(client) as weights:
        tasks = await start_open_answers(client, 1, LONG)
        update = asyncio.create_task(weights.update(str(folders[1]), "wait"))
        await asyncio.sleep(0.01)
        stream = client.submit([EngineCoreRequest(id="held", prompt_ids=[5], params=SamplingParams(), seed=0)])
        stream.close()
        assert client.num_open == 1
        client.cancel("open-0")
        assert (await tasks[0]).finish_reason == "abort"
        assert await update == "2"
        assert client.num_open == 0


def lacks_a_tensor(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    del tensors["model.norm.weight"]


def has_one_more(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    tensors["model.layers.9.extra"] = torch.zeros(3)


def has_a_wrong_shape(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    tensors["model.norm.weight"] = torch.zeros(65)


def has_a_wrong_type(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    tensors["model.norm.weight"] = torch.zeros(64, dtype=torch.int8)


def has_another_config(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"num_attention_heads": 4', '"num_attention_heads": 8'))


def has_a_broken_config(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    (folder / "config.json").write_text("{")


BAD = {
    lacks_a_tensor: "lack model.norm.weight",
    has_one_more: "model.layers.9.extra",
    has_a_wrong_shape: r"model.norm.weight has shape \[65\]",
    has_a_wrong_type: "model.norm.weight is stored as torch.int8",
    has_another_config: "num_heads is 8, the model's 4",
    has_a_broken_config: "config.json",
}


@pytest.mark.slow
async def test_invalid_weight_folders_are_rejected_and_weights_stay(folders: tuple[Path, Path], tmp_path: Path) -> None:
    first, second = folders
    client = EngineClient(ProcessClient(config_of(first)))
    async with running(client) as weights:
        ids = (await ask(client, "first")).ids
        steps = client.engine_core.stats.steps
        for spoil, words in BAD.items():
            folder = tmp_path / spoil.__name__
            folder.mkdir()
            shutil.copy(second / "config.json", folder)
            tensors = load_file(second / FILE)
            spoil(tensors, folder)
            save_file(tensors, folder / FILE)
            with pytest.raises(ConfigError, match=words):
                await weights.update(str(folder))
        cut = tmp_path / "cut"
        cut.mkdir()
        (cut / FILE).write_bytes((second / FILE).read_bytes()[:-100])
        with pytest.raises(ConfigError, match="cut off"):
            await weights.update(str(cut))
        for path, error in ((str(tmp_path), ConfigError), ("/nowhere", InvalidRequest), ("", InvalidRequest)):
            with pytest.raises(error):
                await weights.update(path)
        with pytest.raises(InvalidRequest, match="mode must be one of"):
            await weights.update(str(second), "never")  # type: ignore[arg-type]
        assert client.engine_core.weights_version == "1"
        later_answer = await ask(client, "again")
        assert later_answer.ids == ids
        assert later_answer.cached_tokens > 0, "the engine is the one that it was"
        assert client.engine_core.stats.steps > steps
        (cut / FILE).write_bytes((second / FILE).read_bytes())  # weights alone: the config is the served model's
        assert await weights.update(str(cut)) == "2"
        assert max_logprob_error(second, await ask(client, "new")) < 1e-3


@pytest.mark.slow
async def test_weight_update_works_after_previous_folder_is_deleted(folders: tuple[Path, Path], tmp_path: Path) -> None:
    first, second = folders
    copy = shutil.copytree(second, tmp_path / "copy")
    client = EngineClient(InProcessClient(config_of(first)))
    async with running(client) as weights:
        await weights.update(str(copy))
        shutil.rmtree(copy)
        assert await weights.update(str(second)) == "3"
        assert max_logprob_error(second, await ask(client, "new")) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("kind", [InProcessClient, ProcessClient])
async def test_rejected_weight_update_ends_no_request(
    kind: type[InProcessClient | ProcessClient], folders: tuple[Path, Path], tmp_path: Path
) -> None:
    tensors = load_file(folders[1] / FILE)
    lacks_a_tensor(tensors, tmp_path)
    save_file(tensors, tmp_path / FILE)
    client = EngineClient(kind(config_of(folders[0])))
    async with running(client) as weights:
        tasks = await start_open_answers(client, 2, 400)
        for mode in ("abort", "wait"):
            with pytest.raises(ConfigError, match=r"lack model\.norm\.weight"):
                await weights.update(str(tmp_path), mode)
            with pytest.raises(InvalidRequest, match="no folder"):
                await weights.update("/nowhere", mode)
            assert not any(task.done() for task in tasks), "nobody waited for them"
        for answer in await asyncio.gather(*tasks):
            assert (answer.finish_reason, len(answer.ids)) == ("length", 400)
            assert answer.version == "1"


@pytest.mark.slow
@pytest.mark.parametrize("number", [float("nan"), *slow(float("inf"), float("-inf"))])
@pytest.mark.parametrize("dtype", ["bfloat16", *slow("float32")])
async def test_nonfinite_weights_are_rejected(
    number: float, dtype: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    first, second = folders
    tensors = load_file(second / FILE)
    tensors["model.layers.0.self_attn.k_proj.weight"][3, 5] = number
    save_file(tensors, tmp_path / FILE)
    client = EngineClient(InProcessClient(config_of(first, dtype=dtype)))
    async with running(client) as weights:
        ids = (await ask(client, "first")).ids
        with pytest.raises(ModelError, match=r"k_proj\.weight holds numbers that are infinite or NaN"):
            await weights.update(str(tmp_path))
        with pytest.raises(ModelError, match=r"k_proj\.weight holds numbers that are infinite or NaN"):
            await client.engine_core.load_tensors(tensors.items(), "2")
        assert client.engine_core.weights_version == "1"
        assert await same_tokens(client, ids)


@pytest.mark.slow
async def test_failed_weight_load_restores_old_weights(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = EngineClient(InProcessClient(config_of(folders[0])))
    async with running(client) as weights:
        ids = (await ask(client, "first")).ids
        monkeypatch.setattr(EngineCore, "check_replacement_weights", lambda self, config: None)
        tasks = await start_open_answers(client, 2, 300)
        with pytest.raises(ModelError, match=r"lacks model\.safetensors"):
            await weights.update(str(tmp_path))
        assert not client.engine_core.asleep
        assert client.engine_core.weights_version == "1"
        assert await same_tokens(client, ids)
        for answer in await asyncio.gather(*tasks):
            assert len(answer.ids) == 300
            assert max_logprob_error(folders[0], answer) < 1e-3


@pytest.mark.slow
def test_failed_engine_rebuild_restores_previous_config(folders: tuple[Path, Path], tmp_path: Path) -> None:
    before, worse = config_of(folders[0]), config_of(folders[0], weights=str(tmp_path))
    config, engine, failure = _rebuild_engine_or_previous(before, worse, NullHeartbeat())
    assert config == before
    assert failure is not None
    assert "lacks model.safetensors" in failure
    assert engine.info.num_blocks == before.num_kv_blocks
    better = config_of(folders[0], weights=str(folders[1]))
    assert _rebuild_engine_or_previous(before, better, NullHeartbeat())[::2] == (better, None)


def resident_bytes(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.slow
async def test_sixty_weight_updates_do_not_leak_memory(tmp_path: Path) -> None:
    shape = {"hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 6, "vocab_size": 8000}
    folder = save_tiny_model(tmp_path / "model", "llama", **shape)
    size = (folder / FILE).stat().st_size
    client = EngineClient(ProcessClient(config_of(folder, max_model_len=500)))
    async with running(client) as weights:
        sizes = []
        for number in range(60):
            await weights.update(str(folder))
            await ask(client, f"request-{number}", 20, number)
            assert client.engine_core.pid is not None
            sizes.append(resident_bytes(client.engine_core.pid))
        assert client.engine_core.deaths == 0
    # The least of some samples, because the weights before may still be in memory at one of them.
    assert min(sizes[-10:]) < max(sizes[:10]) + size / 2, "fifty times the weights would be far more"


@pytest.mark.slow
async def test_sleep_frees_weight_and_kv_memory(tmp_path: Path) -> None:
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "vocab_size": 16000}
    folder = save_tiny_model(tmp_path / "model", "llama", **shape)
    client = EngineClient(ProcessClient(config_of(folder, max_model_len=500)))
    info = await client.engine_core.start()
    weights = Weights(client)
    try:
        await asyncio.gather(*[ask(client, f"request-{number}", 200, number) for number in range(16)])
        assert client.engine_core.pid is not None
        used = client.engine_core.stats.cached_blocks * info.kv_bytes // info.num_blocks
        awake = resident_bytes(client.engine_core.pid)
        await weights.sleep()
        assert awake - resident_bytes(client.engine_core.pid) > 0.9 * (info.weight_bytes + used)
    finally:
        await client.engine_core.stop()


@pytest.mark.parametrize("level", [0, 3])
async def test_sleep_level_must_be_one_or_two(folders: tuple[Path, Path], level: int) -> None:
    with pytest.raises(InvalidRequest, match="level must be 1 or 2"):
        await Weights(EngineClient(InProcessClient(config_of(folders[0])))).sleep(level)


def save_perturbed_model(folder: Path, to: Path) -> Path:
    """A copy of the model with every tensor perturbed."""
    shutil.copytree(folder, to)
    torch.manual_seed(6)
    tensors = {name: each * (1 + 0.2 * torch.rand_like(each)) for name, each in load_file(folder / FILE).items()}
    save_file(tensors, to / FILE, metadata={"format": "pt"})
    return to


async def embed_vector(client: EngineClient) -> bytes:
    params = PoolingParams(task="embed")
    stream = client.submit([EngineCoreRequest(id=os.urandom(8).hex(), prompt_ids=[5, 6, 7], params=params, seed=0)])
    (output,) = [output async for outputs in stream for output in outputs]
    assert output.vector is not None, output.error
    return output.vector


@pytest.mark.slow
async def test_encoder_weights_can_be_updated(tmp_path: Path) -> None:
    first = save_tiny_encoder(tmp_path / "first", "bert")
    second = save_perturbed_model(first, tmp_path / "second")
    options = {"max_model_len": None, "num_kv_blocks": None}
    async with running(expected := EngineClient(InProcessClient(config_of(second, **options)))):
        expected_output = await embed_vector(expected)
    client = EngineClient(InProcessClient(config_of(first, **options)))
    async with running(client) as weights:
        before = await embed_vector(client)
        assert before != expected_output
        await weights.update(str(second))
        assert await embed_vector(client) == expected_output
        (second / FILE).write_bytes((first / FILE).read_bytes()[:2000])
        with pytest.raises(ConfigError):
            await weights.update(str(second))
        assert await embed_vector(client) == expected_output


@pytest.mark.slow
async def test_gguf_weights_can_be_updated(folders: tuple[Path, Path], tmp_path: Path) -> None:
    gguf_models = pytest.importorskip("tests.gguf_models", reason="the package gguf is not installed")
    first = save_tiny_model(tmp_path / "first", "llama")
    second = save_perturbed_model(first, tmp_path / "second")
    files = [gguf_models.write_gguf(each, tmp_path / f"{each.name}.gguf") for each in (first, second)]
    options = {"max_model_len": 400}
    async with running(expected := EngineClient(InProcessClient(config_of(files[1], **options)))):
        expected_output = (await ask(expected, "alone")).ids
    client = EngineClient(InProcessClient(config_of(files[0], **options)))
    async with running(client) as weights:
        before = (await ask(client, "first")).ids
        assert before != expected_output
        with pytest.raises(ModelError, match="served from GGUF, not safetensors"):
            await weights.update(str(second))
        other = save_tiny_model(tmp_path / "other", "llama", intermediate_size=96)
        with pytest.raises(ModelError, match="intermediate_size is 96, the model's 160"):
            await weights.update(str(gguf_models.write_gguf(other, tmp_path / "other.gguf")))
        assert (await ask(client, "again")).ids == before
        await weights.update(str(files[1]))
        assert (await ask(client, "new")).ids == expected_output


@pytest.mark.slow
async def test_quantized_weights_can_be_updated(tmp_path: Path) -> None:
    """From files and as tensors; a checkpoint of another quantization is rejected."""
    plain = save_tiny_model(tmp_path / "plain", "llama", hidden_size=128, intermediate_size=256)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    pack = gptq(4, 32, symmetric=True)
    other = save_perturbed_model(plain, tmp_path / "stretched")
    first = quantize_checkpoint(plain, tmp_path / "first", pack, config)
    second = quantize_checkpoint(other, tmp_path / "second", pack, config)
    options = {"max_model_len": 400}
    async with running(expected := EngineClient(InProcessClient(config_of(second, **options)))):
        expected_output = (await ask(expected, "alone")).ids
    client = EngineClient(InProcessClient(config_of(first, **options)))
    async with running(client) as weights:
        before = (await ask(client, "first")).ids
        assert before != expected_output
        with pytest.raises(ModelError, match="quantization_config is not the model's"):
            await weights.update(str(plain))
        assert (await ask(client, "again")).ids == before
        await weights.update(str(second))
        assert (await ask(client, "new")).ids == expected_output
        await weights.update(str(first))
        await client.engine_core.load_tensors(load_file(second / FILE).items(), "given")
        assert (await ask(client, "given")).ids == expected_output


@pytest.mark.slow
async def test_engine_killed_during_update_keeps_old_weights(folders: tuple[Path, Path]) -> None:
    client = EngineClient(ProcessClient(config_of(folders[0])))
    async with running(client) as weights:
        ids = (await ask(client, "first")).ids
        tasks = await start_open_answers(client, 2, 200)
        changing = asyncio.create_task(weights.update(str(folders[1])))
        while client.responsive:  # noqa: ASYNC110, there is no event to wait for
            await asyncio.sleep(0)
        assert client.engine_core.pid is not None
        os.kill(client.engine_core.pid, signal.SIGKILL)
        with pytest.raises(Overloaded, match="please try again"):
            await changing
        assert [len(answer.ids) for answer in await asyncio.gather(*tasks)] == [200, 200]
        assert await same_tokens(client, ids)
        assert client.engine_core.weights_version == "1"


@pytest.mark.slow
async def test_weight_update_completes_after_caller_timeout(folders: tuple[Path, Path]) -> None:
    client = EngineClient(ProcessClient(config_of(folders[0])))
    async with running(client) as weights:
        tasks = await start_open_answers(client, 2, 200)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(weights.update(str(folders[1])), 0.01)
        assert await weights.update(str(folders[1])) == "3"
        assert [len(answer.ids) for answer in await asyncio.gather(*tasks)] == [200, 200]
        assert client.alive
        assert client.engine_core.weights_version == "3"


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2])
async def test_sleeping_engine_rejects_weights_of_another_model(
    folders: tuple[Path, Path], tmp_path: Path, level: int
) -> None:
    other = tmp_path / "other"
    shutil.copytree(folders[1], other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.3}))
    client = EngineClient(ProcessClient(config_of(folders[0])))
    async with running(client) as weights:
        await weights.sleep(level)
        with pytest.raises(QuireError, match=r"eps is 0\.3"):
            await weights.update(str(other))
        assert client.engine_core.asleep
        assert await weights.update(str(folders[1])) == "2"
        assert max_logprob_error(folders[1], await ask(client, "new")) < 1e-3
