"""All engine core clients give the same tokens, and ProcessClient replaces engine processes that exit."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from quire.engine.client.engine_client import EngineClient
from quire.engine.client.engine_core_client import ExclusiveClient
from quire.engine.client.messages import Submit, decode_to_engine
from quire.engine.client.output_stream import merge
from quire.engine.client.process_client import ProcessClient
from quire.engine.client.request_history import StepEntry
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError, EngineError
from quire.engine.common.request_params import SamplingParams
from quire.engine.common.types import EngineCoreOutput, EngineCoreRequest
from quire.engine.offline.in_process_client import InProcessClient
from quire.engine.processes.utility_calls import encode
from tests.engine.harness import request
from tests.tiers import slow
from tests.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "llama")


def config(model: Path) -> EngineConfig:
    return EngineConfig(model=str(model), num_kv_blocks=64, threads=1)


async def answers(client: EngineClient, names: str) -> dict[str, list[int]]:
    """Token ids of one sampled request per letter of `names`."""
    stream = client.submit([request(name, range(3, 8 + ord(name) % 30), seed=1, temperature=1.0) for name in names])
    tokens: dict[str, list[int]] = {name: [] for name in names}
    async for outputs in stream:
        for output in outputs:
            tokens[output.id] += output.new_ids
    return tokens


@pytest.mark.slow
async def test_in_process_and_process_clients_return_equal_tokens(model: Path) -> None:
    in_process, in_child = EngineClient(InProcessClient(config(model))), EngineClient(ProcessClient(config(model)))
    in_process_info, in_child_info = await asyncio.gather(in_process.engine_core.start(), in_child.engine_core.start())
    assert in_process_info.arithmetic == in_child_info.arithmetic
    expected = await answers(in_process, "abcd")
    assert all(len(ids) == 32 for ids in expected.values())
    assert await answers(in_child, "abcd") == expected
    one_by_one = [await answers(in_child, name) for name in "abcd"]
    assert {name: ids for tokens in one_by_one for name, ids in tokens.items()} == expected
    await in_process.engine_core.stop()
    await in_child.engine_core.stop()


@pytest.mark.parametrize("make_core", [InProcessClient, *slow(ProcessClient)])
async def test_closing_stream_frees_kv_blocks(make_core: type[ExclusiveClient], model: Path) -> None:
    client = EngineClient(make_core(config(model)))
    await client.engine_core.start()
    stream = client.submit([request("long", range(3, 100), max_tokens=300), request("other", range(3, 9))])
    outputs = await anext(stream)
    assert outputs
    stream.close()
    assert client.num_open == 0
    await answers(client, "z")
    assert client.engine_core.stats.used_blocks == 0
    await client.engine_core.stop()


@pytest.mark.slow
async def test_start_error_names_config_key(tmp_path: Path) -> None:
    client = EngineClient(ProcessClient(EngineConfig(model=str(tmp_path))))
    with pytest.raises(ConfigError, match="config") as error:
        await client.engine_core.start()
    assert error.value.param == "model"


class SignallingLink(ProcessClient):
    """Sends its engine process the signal `signal_number` once, when the next tokens arrive."""

    signal_number = 0

    def arrived(self, step: StepEntry) -> None:
        if self.signal_number and self.pid is not None:
            os.kill(self.pid, self.signal_number)
            self.signal_number = 0


@pytest.mark.parametrize("number", [signal.SIGKILL, *slow(signal.SIGSEGV, signal.SIGSTOP, signal.SIGTERM)])
async def test_stream_survives_signal_to_engine_process(model: Path, number: int) -> None:
    settings = EngineConfig(model=str(model), num_kv_blocks=128, threads=1, engine_heartbeat_timeout=3)
    link = SignallingLink(settings)
    client = EngineClient(link)
    client.history.listeners.append(link.arrived)
    await client.engine_core.start()

    async def ask(name: str) -> dict[str, list[int]]:
        requests = [
            request(f"{name}-{i}", range(3, 60 + i), max_tokens=400, temperature=i / 2, seed=i) for i in range(3)
        ]
        tokens: dict[str, list[int]] = {}
        async for outputs in client.submit(requests):
            for output in outputs:
                tokens.setdefault(output.id[-1], []).extend(output.new_ids)
        return tokens

    expected = await ask("undisturbed")
    generated = client.engine_core.stats.generation_tokens
    link.signal_number = number
    assert await ask("disturbed") == expected
    assert (client.engine_core.deaths, client.engine_core.replays, client.engine_core.quarantined) == (1, 3, 0)
    assert client.engine_core.stats.generation_tokens >= generated, "counters never go back"
    assert client.alive
    await client.engine_core.stop()


@pytest.mark.slow
async def test_streams_raise_and_stderr_is_logged_when_restart_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save_tiny_model(tmp_path, "llama")
    client = EngineClient(
        ProcessClient(EngineConfig(model=str(path), num_kv_blocks=64, threads=1, max_engine_starts=1))
    )
    await client.engine_core.start()
    stream = client.submit([request("long", range(3, 100), max_tokens=300)])
    await anext(stream)
    (path / "config.json").unlink()
    assert client.engine_core.pid is not None
    os.kill(client.engine_core.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=r"could not be restarted$"):  # clients must not see paths in the message
        async for _ in stream:
            pass
    assert "no config.json" in caplog.text
    assert not client.alive
    with pytest.raises(EngineError):
        client.submit([request("late", [3])])
    await client.engine_core.stop()


def test_merge_keeps_all_output_fields() -> None:
    first = EngineCoreOutput("a", [1], cached_tokens=16, prompt_logprobs=[None])
    second = EngineCoreOutput("a", [2, 3], finish_reason="stop", stop_reason=3, cached_tokens=16)
    both = merge(first, second)
    assert both == EngineCoreOutput(
        "a", [1, 2, 3], prompt_logprobs=[None], finish_reason="stop", stop_reason=3, cached_tokens=16
    )


def test_submit_message_round_trips() -> None:
    params = SamplingParams(logit_bias={5: 1.5}, stop=("a",), stop_token_ids=(3,), seed=-5, min_p=0.1, max_tokens=None)
    message = Submit([request("a", [1, 2]), request("b", [3], salt="x")])
    assert decode_to_engine(encode(message)) == message
    single_message = Submit([EngineCoreRequest(id="c", prompt_ids=[1], params=params, seed=2**63 - 1)])
    assert decode_to_engine(encode(single_message)) == single_message
