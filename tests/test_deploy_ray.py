"""The parts of deploy/ray that need no Ray; tests/e2e/test_ray_serve.py runs the rest."""

from __future__ import annotations

import ast
import json
import random
from typing import Any

import msgspec
import pytest
import yaml
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from deploy.ray.call import BLOCK, MAX_BLOCKS, Call, make_call, with_seed
from deploy.ray.prefixes import SentPrefixes
from deploy.ray.resources import replica_resources
from deploy.ray.resume import ResumableStream
from quire.engine.common.errors import EngineError
from quire.server.config import ServerConfig
from tests.server.api import open_api
from tests.server.fake import FakeEngine, Script, hashed, scripted
from tests.tree import ROOT

RAY = ROOT / "deploy/ray"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
END_OF_ANSWER = 258
CALLS = "".join(
    f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>\n'
    for city in ("Rome", "Oslo")
)


def script_of(text: str) -> Script:
    return scripted(list(text.encode()), END_OF_ANSWER)


LETTERS = hashed(b"abc \xc3\xa4")
CASES: dict[str, tuple[str, Script, dict[str, Any]]] = {
    "chat": (CHAT, LETTERS, {"max_tokens": 12, "stream_options": {"include_usage": True}}),
    "choices": (CHAT, LETTERS, {"max_tokens": 6, "n": 2, "logprobs": True, "top_logprobs": 1}),
    "usage": (
        CHAT,
        LETTERS,
        {"max_tokens": 6, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "ids": (CHAT, LETTERS, {"max_tokens": 6, "return_token_ids": True}),
    "reasoning": (CHAT, script_of("<think>It rains.</think>Take a coat"), {}),
    "calls": (CHAT, script_of(f"I look.\n{CALLS}"), {"tools": [WEATHER]}),
    "text": (TEXT, LETTERS, {"prompt": "Hello", "max_tokens": 8, "logprobs": 1, "n": 2}),
}


async def stream(name: str, burst: int) -> list[bytes]:
    """Events of one of the CASES from a replica that sends `burst` tokens at a time."""
    path, script, body = CASES[name]
    engine = FakeEngine(script, eos=[END_OF_ANSWER], burst=burst)
    async with open_api(engine, tool_call_parser="hermes", reasoning_parser="think") as api:
        request_body = {"messages": HELLO, "seed": 7, "stream": True} | body
        if "prompt" in body:
            del request_body["messages"]
        response = await api.http.post(path, json=request_body)
        assert response.status_code == 200, response.text
        return [event + b"\n\n" for event in response.content.split(b"\n\n") if event]


def chunks(events: list[bytes]) -> list[dict[str, Any]]:
    assert events[-1] == b"data: [DONE]\n\n"
    return [json.loads(event.removeprefix(b"data: ")) for event in events[:-1] if not event.startswith(b":")]


def fold_stream(name: str, events: list[bytes]) -> Any:
    """A stream as a client joins it, for chats with OpenAI's own code, without fields that differ each time."""
    chunk_list = chunks(events)
    assert {(chunk["id"], chunk["created"]) for chunk in chunk_list} == {
        (chunk_list[0]["id"], chunk_list[0]["created"])
    }
    if CASES[name][0] == CHAT:
        state = ChatCompletionStreamState()
        for chunk in chunk_list:
            state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
        whole = state.current_completion_snapshot.model_dump(exclude={"id", "created"})
        for choice in whole["choices"]:
            choice.pop("token_ids", None)  # from the last chunk only
            for call in choice["message"]["tool_calls"] or []:
                assert call.pop("id")
    else:
        whole = {"usage": None}
    joined: dict[int, list[Any]] = {}
    for choice in (choice for chunk in chunk_list for choice in chunk["choices"]):
        texts = joined.setdefault(choice["index"], ["", [], [], []])
        logprobs = choice["logprobs"] or {}
        texts[0] += choice.get("text", "") + choice.get("delta", {}).get("reasoning", "")
        texts[1] += choice["token_ids"] or []
        texts[2] += logprobs.get("tokens", []) + logprobs.get("content", [])
        texts[3] += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert all(len(each[3]) == 1 for each in joined.values())
    return whole, joined


@pytest.mark.parametrize("name", CASES)
async def test_resumable_stream_continues_from_any_cut(name: str) -> None:
    first, second = await stream(name, burst=1), await stream(name, burst=3)
    assert len(second) < len(first), "the runs should be cut into events in different ways"
    expected = fold_stream(name, first)
    for one, other in ((first, second), (second, first)):
        for cut in range(len(one)):
            continued = ResumableStream()
            actual = [continued.next(event) for event in one[:cut]]
            assert actual == one[:cut]
            assert not continued.ended
            continued.restart()
            actual += events_of(continued.next(b"".join(part)) for part in parts(other, cut))
            assert continued.ended
            assert fold_stream(name, actual) == expected


async def test_resumable_stream_continues_twice() -> None:
    first, second = await stream("calls", burst=1), await stream("calls", burst=3)
    middle = len(second) // 2
    continued = ResumableStream()
    actual = [continued.next(event) for event in first[:3]]
    continued.restart()
    actual += events_of(continued.next(event) for event in second[:middle])
    continued.restart()
    actual += events_of(continued.next(event) for event in first)
    assert fold_stream("calls", actual) == fold_stream("calls", first)


async def test_resumable_stream_raises_when_continuation_differs() -> None:
    continued = ResumableStream()
    continued.next(b"".join((await stream("chat", burst=1))[:6]))
    continued.restart()
    with pytest.raises(EngineError, match="other tokens"):
        continued.next(b"".join(await stream("reasoning", burst=1)).replace(b"reasoning", b"content"))


def events_of(pieces: Any) -> list[bytes]:
    return [event + b"\n\n" for piece in pieces for event in piece.split(b"\n\n") if event]


def parts(events: list[bytes], seed: int) -> list[list[bytes]]:
    """The events in groups of random size, with a comment first."""
    chance, groups = random.Random(seed), [[b": ping\n\n"]]
    for event in events:
        if chance.random() < 0.4:
            groups.append([])
        groups[-1].append(event)
    return groups


def call(body: Any, path: str = CHAT, headers: list[tuple[bytes, bytes]] | None = None) -> Call:
    scope = {"method": "POST", "path": path, "query_string": b"", "client": ("127.0.0.1", 5)}
    return make_call(scope, headers or [], body if isinstance(body, bytes) else msgspec.json.encode(body))


def test_make_call_adds_seed_to_resumable_streams_only() -> None:
    request_body = {"messages": HELLO, "stream": True}
    resumable_call = call(
        request_body, headers=[(b"content-length", b"3"), (b"transfer-encoding", b"chunked"), (b"x-one", b"1")]
    )
    sent = json.loads(resumable_call.body)
    assert resumable_call.resumable
    assert {name: value for name, value in sent.items() if name != "seed"} == request_body
    assert sent["seed"] >= 0
    assert resumable_call.headers == [(b"x-one", b"1"), (b"content-length", b"%d" % len(resumable_call.body))]
    assert call(request_body).body != call(request_body).body, "else all streams would be alike"
    for body in (request_body | {"seed": 5}, {"messages": HELLO}, b"no JSON", b'{"stream": "yes"}', b"[]", b""):
        resumable_call = call(body)
        assert resumable_call.body == (body if isinstance(body, bytes) else msgspec.json.encode(body))
        assert resumable_call.resumable == (isinstance(body, dict) and "seed" in body)
    assert not call(request_body, path="/v1/messages").resumable


async def test_server_reads_added_seed() -> None:
    engine = FakeEngine(hashed(b"abc"))
    async with open_api(engine) as api:
        for body in (b'{"prompt": "Hello", "max_tokens": 1}', b'{"prompt": "Hello", "seed": null, "max_tokens": 1} \n'):
            response = await api.http.post(
                TEXT, content=with_seed(body, 2**53 - 1), headers={"content-type": "application/json"}
            )
            assert response.status_code == 200, response.text
        await api.post(TEXT, {"prompt": "Hello", "seed": 2**53 - 1, "max_tokens": 1})
    assert len({each.seed for each in engine.seen}) == 1


def test_call_prefix_shares_hashes_of_common_prompt_blocks() -> None:
    system = {"role": "system", "content": "You are a storyteller. " * 40}
    one, other = (call({"messages": [system, {"role": "user", "content": name * 300}]}).prefix for name in "ab")
    common = sum(x == y for x, y in zip(one, other, strict=True))
    assert len(json.dumps(system)) // BLOCK - 1 <= common < len(one)
    assert one[common:] != other[common:]
    assert not set(one[common:]) & set(other)
    keyed = call({"messages": [system]}, headers=[(b"authorization", b"Bearer other")]).prefix
    assert not set(keyed) & set(one), "keys share no cached pages"
    assert len(call({"prompt": "x" * 100_000}, path=TEXT).prefix) == MAX_BLOCKS
    assert call({"prompt": "x"}, path=TEXT).prefix == ()


def test_longest_prefix_replica_is_preferred_unless_overloaded() -> None:
    sent: SentPrefixes[str] = SentPrefixes(max_imbalance=4, capacity=6)
    assert sent.preferred((1, 2, 3), {"a": 0, "b": 0}) == set()
    sent.note((1, 2), "a")
    sent.note((1, 2, 3), "b")
    assert sent.preferred((1, 2, 9), {"a": 0, "b": 0}) == {"a", "b"}
    assert sent.preferred((1, 2, 3), {"a": 0, "b": 4}) == {"b"}
    assert sent.preferred((1, 2, 3), {"a": 0, "b": 5}) == {"a"}, "the second longest, of one that has room"
    assert sent.preferred((1, 2, 3), {"a": 9, "b": 9, "c": 0}) == set()
    assert sent.preferred((1, 2, 3), {"c": 0}) == set(), "those that ended are no choice"
    sent.note((1, 4, 5, 6, 7), "c")
    assert sent.preferred((1, 2), {"a": 0, "b": 0, "c": 0}) == {"a", "b", "c"}, "2 is forgotten, 1 is not"


@pytest.mark.parametrize(
    ("settings", "cluster_gpus", "actor", "bundles"),
    [
        ({}, 0, {"num_cpus": 1}, None),
        ({"threads": 8}, 0, {"num_cpus": 8}, None),
        ({}, 8, {"num_cpus": 1, "num_gpus": 1}, None),
        ({"device": "cpu"}, 8, {"num_cpus": 1}, None),
        ({"device": "cuda"}, 0, {"num_cpus": 1, "num_gpus": 1}, None),  # the autoscaler has yet to add the machine
        ({"tensor_parallel_size": 2, "threads": 8}, 0, {"num_cpus": 4}, [{"CPU": 4}, {"CPU": 4}]),
        (
            {"tensor_parallel_size": 2, "data_parallel_size": 2},
            8,
            {"num_cpus": 1, "num_gpus": 4},
            [{"CPU": 1, "GPU": 4}, {"CPU": 1}, {"CPU": 1}, {"CPU": 1}],
        ),
    ],
)
def test_replica_reserves_one_gpu_per_rank(
    settings: dict[str, Any], cluster_gpus: int, actor: dict[str, int], bundles: list[dict[str, int]] | None
) -> None:
    resources = replica_resources(ServerConfig(**settings), cluster_gpus)
    assert resources["ray_actor_options"] == actor
    assert resources.get("placement_group_bundles") == bundles
    if bundles is not None:
        assert resources["placement_group_strategy"] == "STRICT_PACK", "one machine"
        assert all(bundles[0][name] >= need for name, need in zip(("CPU", "GPU"), actor.values(), strict=False))


def test_serve_yaml_names_existing_deployments_and_settings() -> None:
    config = yaml.safe_load((RAY / "serve.yaml").read_text(encoding="utf-8"))
    (application,) = config["applications"]
    module, _, function = application["import_path"].partition(":")
    tree = ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8"))
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    deployment_names = {
        node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg == "name" and isinstance(node.value, ast.Constant)
    }
    assert {each["name"] for each in application["deployments"]} | {"Journal"} == deployment_names, (
        "that one is of data_dir alone"
    )
    assert application["args"].keys() <= ServerConfig.model_fields.keys()
    assert config["http_options"]["host"] == "127.0.0.1", "open to this machine alone"
    assert "ray[serve]" in (RAY / "requirements.txt").read_text(encoding="utf-8")
