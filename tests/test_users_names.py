"""Names that are written to disk, sent to users or sent to another version of Quire belong to users and stay unchanged;
tests/users_names.toml lists them. This test writes, reads what it wrote, and compares.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import logging
import os
import pickle
import re
import subprocess
import sys
import tomllib
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import quire
from deploy.ray.call import Call, Head
from deploy.ray.link import JournalLink
from deploy.ray.members import LIFE, Question
from quire.engine.checkpoint.overrides import resolve_model_with_overrides
from quire.engine.client.request_history import TimelinePhase
from quire.engine.common.config import DEMO_MODEL, EngineConfig
from quire.engine.common.errors import InvalidRequest, QuireError
from quire.engine.common.types import Image, MediaSpan
from quire.engine.core.request import block_hash, root_hash
from quire.engine.core.scheduler import Scheduler
from quire.engine.core.stats import BlockTableView, TierStats
from quire.engine.processes.kv_events import KVEventBatch
from quire.engine.processes.socket_folder import SocketFolder
from quire.engine.receipts.receipt import Receipt
from quire.engine.receipts.receipt_replay import ReplayVerdict
from quire.engine.settings.settings_reader import load_settings
from quire.engine.tiers.disk_tier import DiskTier
from quire.engine.tiers.guarded_tier import GuardedTier
from quire.engine.tiers.kv_identity import WeightFiles
from quire.engine.tiers.tier import Tier
from quire.engine.worker.checkpoint_writer.quantized_formats import make_quantized_format
from quire.engine.worker.ranks.remote_ranks import (
    JOIN_QUEUE,
    JoinRequest,
    JoinVerdict,
    answer_queue_name,
    order_queue_name,
)
from quire.engine.worker.ranks.single_process import SingleProcess
from quire.kernels.reference import ReferenceBackend
from quire.server.access.tenants import KeyEntry
from quire.server.adapter_registry import open_adapter_registry
from quire.server.cli.bench import latency_stats, serve, vllm_result
from quire.server.cli.chat.chat_session import ChatSession
from quire.server.cli.plan.cpu_rates import read_or_measure_rates
from quire.server.cli.verify import CheckResult
from quire.server.config import ServerConfig
from quire.server.durability.answer_pins import ComputeIdentity, input_digest
from quire.server.durability.background import Background
from quire.server.durability.data_dir import ProcessStatus
from quire.server.durability.data_dir_rpc import DATA_DIR_TOPIC, RPC_METHODS
from quire.server.durability.journal import PinnedReplayFields
from quire.server.durability.persistence import STATUS_TOPIC
from quire.server.durability.progress import CallProgress, ChoiceFinish
from quire.server.durability.resumable_calls import ResumableCalls
from quire.server.durability.write_ahead_log import WriteAheadLog
from quire.server.error_responses import error_info
from quire.server.multi_model.added_models import AddedModels
from quire.server.observe.live_view import LiveViewStream
from quire.server.observe.log_setup import EXTRA_FIELDS, JsonFormatter
from quire.server.routes.engine_admin import build_server_facts
from quire.server.store.batches import Batch
from quire.server.store.garbage import GarbageKind as Garbage
from quire.server.workers import pool
from tests.server.api import Api
from tests.server.forked import ForkedChild
from tests.tree import ROOT
from tests.users_names import (
    CODE,
    differences,
    fields_of,
    files_with,
    importable,
    kinds_in,
    lines_of_model,
    lines_of_pickle,
    lines_of_type,
    lines_of_value,
    literals,
    members_of,
    names_in,
    objects_in,
    sources,
)
from tests.written_names import Written, written

TYPES: dict[str, Any] = {
    "journal: calls.pins": PinnedReplayFields,
    "journal: calls.progress": CallProgress,
    "batches.data": Batch,
    "garbage.kind": Garbage,
    "receipts": Receipt,
    "machines: who joins": JoinRequest,
    "machines: what it is answered": JoinVerdict,
    "Ray: what a replica says when it joins": ProcessStatus,
    "phases of a request": TimelinePhase,
    "KV events: a batch": KVEventBatch,
    "quire verify --json: a check": CheckResult,
    "quire replay --json": ReplayVerdict,
    "quire bench --json: figures": latency_stats.BenchSummary,
}
"""Types whose field names are stored or sent."""
MODELS: dict[str, Any] = {"settings": ServerConfig, "--api-key-file: a table": KeyEntry}
MODULES: dict[str, tuple[str, ...]] = {
    "--models: the file": ("server.multi_model.models_config",),
    "POST /v1/models/load and unload": ("server.multi_model.multi_model_app",),
    "batches: a line": ("server.batches.batch_lines",),
    "batches: read of answers": ("server.batches.output_files",),
    "quire bench: read of other servers": ("server.cli.bench.serve",),
    "quire quantize: a line of samples": ("server.cli.quantize.calibration",),
    "model's files": (
        *("engine.families.base.schema.config_schema", "engine.checkpoint.pooling", "engine.checkpoint.tensor_headers"),
        *(
            "engine.families.base.schema.config_objects",
            "engine.families.base.schema.quantization_schema",
            "engine.families.base.vision.vision_config_fields",
        ),
        *("engine.text.tokenizer_files", "engine.layers.schemes.floats"),
    ),
    "adapter's files": ("engine.lora.adapter_files",),
}
"""Modules with structs and typed dictionaries that others write and Quire reads."""
LIST = ROOT / "tests" / "users_names.toml"
FIELD_NAMES = (
    r"msgspec\.(?:json|msgpack)\.(?:en|de)code\(.*\w|msgspec\.(?:json|msgpack)\.(?:En|De)coder\(|msgspec\.convert\("
    r"|(?<!def )\b_?asdict\(|\.model_(?:dump|validate)|pickle\.(?:dump|load)|torch\.save\("
    r"|__struct_fields__|__qualname__"
)
"""Code that writes or reads names of attributes or classes."""
ADVICE = """
If it is our own name that changed, give the field its old name where it is written: msgspec.field(name=...), rename=
of the struct, alias of the pydantic model, or a literal. What is new belongs into tests/users_names.toml. What is
gone, or is written otherwise, is a change for users: the next version must still read what this one wrote, or say so
in CHANGELOG.md, with a new number of the format where there is one."""


def listed() -> dict[str, Any]:
    return tomllib.loads(LIST.read_text(encoding="utf-8"))


# Expected content of each section


def types() -> dict[str, list[str]]:
    found = {section: lines_of_type(kind) for section, kind in TYPES.items()}
    return found | {section: lines_of_model(kind) for section, kind in MODELS.items()}


def modules() -> dict[str, list[str]]:
    """Returns names only, because golden plans, specs and tokens cover their values."""
    found: dict[str, list[str]] = {}
    for section, names in MODULES.items():
        kinds = [kind for name in names for kind in kinds_in(importlib.import_module(f"quire.{name}"))]
        found[section] = sorted({name for kind in kinds for name in fields_of(kind)})
    return found


def tail(folder: Path) -> dict[str, list[str]]:
    """Records of a write-ahead log. They follow 52 bytes: the boot id, and how much has been written."""
    writer = WriteAheadLog(folder, "process")
    writer.log_call("owner", "id", 2)
    writer.log_tokens(1, 0, 7, [8, 9], ChoiceFinish("stop", "x", came_with_token=True))
    writer.log_step([1, 9, 10])
    (path,) = folder.iterdir()
    content, at, records = path.read_bytes(), 36 + 2 * 8, list[str]()
    while length := int.from_bytes(content[at : at + 4], "little"):
        record = content[at + 8 : at + 8 + length]
        text = json.dumps(msgspec.msgpack.decode(record), default=bytes.hex)
        records.append(f"{text} {content[at + 4 : at + 8].hex()}")
        at += 8 + length
    writer.close_and_delete()
    return {"journal: tail-PROCESS": [path.name, f"{len(content)} bytes", *records]}


def data_folder(folder: Path, caplog: pytest.LogCaptureFixture) -> dict[str, list[str]]:
    """Files about added models and adapters. No folder has adapters, so the log shows that adapters.json is read."""
    settings: Any = None
    AddedModels(settings, folder).add_model("small", {"model": "/small"})
    models = [f"{path.name}: {path.read_text()}" for path in folder.iterdir()]
    (folder / "adapters.json").write_text('{"mine": "0a"}')
    with open_adapter_registry(ServerConfig(enable_lora=True), {}, lambda: (), folder, device="cpu"):
        read = ["adapters.json" for record in caplog.records if record.args and "mine" in record.args]
    return {"--data-dir: what was added": sorted([*models, *read, *(f"{each.name}/" for each in folder.glob("*/"))])}


def kv_tier(folder: Path) -> dict[str, list[str]]:
    """Files of KV blocks, each block with a header; and the hashes by which blocks are found."""
    identity, root = b"i" * 16, root_hash("salt")
    outside = GuardedTier(DiskTier(str(folder / "kv"), 2**20, identity), identity)
    outside.put(b"d" * 16, b"page")
    outside.disable_and_stop_threads()
    (path,) = (folder / "kv").rglob("6464*")
    config = EngineConfig(model=DEMO_MODEL)
    (folder / "memory").mkdir()
    WeightFiles(config).content_hash(folder / "memory")
    (memory,) = (folder / "memory").iterdir()
    return {
        "--kv-offload-dir": [
            *(str(path.relative_to(folder)), path.read_bytes().hex(), memory.name),
            *lines_of_value(json.loads(memory.read_text()), {""}),
            *(f"root {root.hex()}", f"block {block_hash(root, [1, 2], b'image').hex()}"),
            f"image {Image.from_pixels(1, 1, b'rgb', (2, 3)).digest.hex()}",
        ]
    }


def caches(folder: Path, patch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    measured = b'{"bandwidth": 1e9, "flops": 1e10}'
    patch.setenv("XDG_CACHE_HOME", str(folder))
    patch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, stdout=measured))
    read_or_measure_rates()
    resolve_model_with_overrides(EngineConfig(model=DEMO_MODEL, hf_overrides={"rope_theta": 1}))
    files = [*folder.glob("quire/*"), *folder.rglob("config.json")]
    names = [re.sub("[0-9a-f]{16,}", "*", f"CACHE/{path.relative_to(folder)}") for path in files]
    rates_file = folder / "quire" / "rates.json"
    kept = json.loads(rates_file.read_bytes()) if rates_file.exists() else {}
    return {"caches": [*sorted(names), *lines_of_value(kept, {""})]}


def commands(folder: Path) -> dict[str, list[str]]:
    chat: Any = ChatSession(None, "model", {})  # type: ignore[arg-type]
    chat.save_conversation(folder / "chat.json")
    formats = [make_quantized_format(name, ReferenceBackend()) for name in ("int8", "fp8", "int4")]
    quantized = [
        [*lines_of_value(each.quantization_config(["lm_head"])), *(each.tensor_layout(64, 64) or {})]
        for each in formats
    ]
    bench, answer = (
        serve.build_serve_bench_parser().parse_args(["--save-detailed"]),
        latency_stats.BenchAnswer([0.1, 0.2], 3, 2),
    )
    sockets = SocketFolder()
    paths = [sockets.engine, sockets.http, sockets.hub, *sockets.engine.parent.iterdir()]
    sockets.close()
    return {
        "quire bench --save-result": sorted(
            vllm_result.build_result(bench, "model", [answer], latency_stats.summarize([answer], 1.0))
        ),
        "quire chat: /save": lines_of_value(json.loads((folder / "chat.json").read_text())),
        "quire quantize: quantization_config and tensors": sorted({line for each in quantized for line in each}),
        "quire bench --json: settings": sorted(vars(bench)),
        "folder of sockets": [f"{paths[0].parent.name[:6]}*", *sorted(path.name for path in paths)],
    }


def logs() -> dict[str, list[str]]:
    record = logging.makeLogRecord({"name": "quire", "msg": "m", **dict.fromkeys(EXTRA_FIELDS, "x")})
    try:
        raise ValueError
    except ValueError:
        record.exc_info = sys.exc_info()
    loggers = {found for text in sources().values() for found in re.findall(r"getLogger\(([^)\s]+)\)", text)}
    return {
        "--log-format json": lines_of_value(json.loads(JsonFormatter().format(record))),
        "loggers": sorted(loggers),
    }


def texts() -> dict[str, list[str]]:
    """Names that occur in the code only as string literals."""
    headers = (
        r"[Xx]-[A-Za-z]+(?:-[A-Za-z]+)*|[Ii]dempotency-[Kk]ey|[Ll]ast-[Ee]vent-[Ii]d|[Rr]etry-[Aa]fter|traceparent"
    )
    gateway = sources(("deploy",))["deploy/ray/gateway.py"]
    replica = re.findall(r'self\._replica\.(?:broadcast\("(\w+)"|(\w+)\.remote)', gateway)
    return {
        "headers": literals(headers, ("quire/server", "deploy"), ".py"),
        "attributes of OpenTelemetry": literals(
            r"gen_ai\.[a-z0-9_.]+|quire\.(?:request_id|sequence)|llm_request", ("quire/server/observe",)
        ),
        "browser's storage": literals(r"quire\.[a-z]+\.?", ("quire/server/web",), ".js"),
        "environment variables": literals("QUIRE_[A-Z_]*"),
        "Ray: methods of Replica": sorted({name for names in replica for name in names if name}),
    }


def variables(patch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Environment variables of settings, in addition to the section `environment variables`."""
    for name in [name for name in os.environ if name.startswith("QUIRE_")]:
        patch.delenv(name)
    patch.setenv("QUIRE_MAX_MODEL_LEN", "77")
    found = load_settings(ServerConfig, {}).model_dump()
    return {"environment variables: settings": [name for name, value in found.items() if value == 77]}


def errors() -> dict[str, list[str]]:
    """Status, type and code of each error class, and the bodies of the APIs."""
    kinds, found = [QuireError], set[str]()
    for kind in kinds:
        kinds += [each for each in kind.__subclasses__() if each.__module__.startswith("quire.")]
        headers = {"headers": {}} if "headers" in inspect.signature(kind).parameters else {}
        told = error_info(kind("message", **headers))
        found.add(f"{told.status} {told.error_type} {told.code}")
    bodies = {
        f"{path} {told.status}: {line}"
        for path in ("/v1/completions", "/v1/messages", "/api/chat", "/v1/systemone")
        for told in (
            error_info(QuireError("message")),
            error_info(InvalidRequest("message", param="field")).with_api_status(path),
        )
        for line in lines_of_value(json.loads(told.encode_body(path)))
    }
    more = literals(
        "[a-z_]+_(?:error|large|supported|url)",
        ("quire/server/routes/error_handlers.py", "quire/server/error_responses.py"),
    )
    return {"errors": [*sorted(found), *sorted(bodies)], "errors: types and codes of no class": more}


def others() -> dict[str, list[str]]:
    spans = [MediaSpan(3, 2, b"digest", is_bidirectional=True, offset=1)]
    spec: Any = SimpleNamespace(prompts=[SimpleNamespace(ids=[1, 2, 3], spans=spans)])
    return {
        "journal: pins.given": [input_digest(spec, ComputeIdentity("fingerprint", True, "weights"))],
        "machines: queues of the store": [JOIN_QUEUE, order_queue_name(3), answer_queue_name(3)],
        "GET /v1/engine/events: a tier": fields_of(TierStats),
        "GET /v1/engine/requests/ID/blocks": fields_of(BlockTableView),
    }


async def ray(folder: Path) -> dict[str, list[str]]:
    """Messages between gateway, replicas and journal, which an update replaces one by one."""
    (folder / LIFE).write_text("life")
    num_arguments, has_asked = dict[str, int](), asyncio.Event()

    async def call(method: str, *values: object) -> object:
        is_new = method not in num_arguments
        num_arguments[method] = len(values)
        if method == "say":
            has_asked.set()
        if method == "questions" and not is_new:
            await asyncio.Event().wait()
        return {"join": "life", "questions": [Question(1, "topic", b"")], "ask": [b"answer"]}.get(method)

    link = JournalLink("replica", call)
    await link.begin(folder)
    await link.ask("data", b"")
    async with asyncio.timeout(10):
        await has_asked.wait()
    await link.close()
    topics: list[str] = [DATA_DIR_TOPIC, STATUS_TOPIC]
    peers: Any = SimpleNamespace(register_handler=lambda topic, answer: topics.append(topic))
    Background(peers)
    await ResumableCalls(peers, 0.0, peers, None).close()
    pickled = [Call("GET", "/", b"", [], None, b""), Head(200, []), Question(1, "topic", b"")]
    kinds = [f"{lines_of_pickle(pickle.dumps(each))[-1]} {len(fields_of(type(each)))}" for each in pickled]
    return {
        "Ray: pickles, with the number of their values": kinds,
        "Ray: methods of Members, with the number of their arguments": [
            f"{name} {n}" for name, n in num_arguments.items()
        ],
        "Ray: the journal's file": [LIFE],
        "Ray: topics of questions": topics,
        "Ray: methods of the journal, with the number of their arguments": [
            f"{name} {len(inspect.signature(each).parameters) - 1}" for name, each in RPC_METHODS.items()
        ],
        "Ray: objects in these": sorted({each for method in RPC_METHODS.values() for each in objects_in(method)}),
    }


def python() -> dict[str, list[str]]:
    """Names that programs import, and attributes that user classes may use."""
    classes = [*members_of("scheduler", Scheduler), *members_of("executor", SingleProcess)]
    promised = re.compile(r"(?:scheduler\.place|executor\.runner)\b")
    return {
        "Python: quire": [line for name in quire.__all__ for line in members_of(name, getattr(quire, name))],
        "Python: a tier of --kv-offload-tier": list(members_of("tier", Tier)),
        "Python: classes of --scheduler-cls and --executor-cls": list(filter(promised.match, classes)),
    }


@pytest.fixture(scope="module")
async def run(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Written]:
    """A server that has answered, with its data folder."""

    def watched(api: Api) -> AsyncGenerator[bytes]:
        return LiveViewStream(api.runtime.live_view).events(build_server_facts(api.runtime, api.runtime.model))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "Child", ForkedChild)
        yield await written(tmp_path_factory.mktemp("run"), watched)


async def test_written_names_equal_users_names_list(
    run: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def folder(name: str) -> Path:
        (tmp_path / name).mkdir()
        return tmp_path / name

    written_names = types() | modules() | logs() | texts() | errors() | others() | python() | run.names
    written_names |= (
        tail(folder("tail")) | data_folder(folder("data"), caplog) | kv_tier(folder("kv")) | commands(tmp_path)
    )
    written_names |= caches(folder("cache"), monkeypatch) | variables(monkeypatch) | await ray(folder("ray"))
    known = {section: each["names"] for section, each in listed()["section"].items()}
    written_names |= {
        section: importable(names) for section, names in known.items() if section == "Python: paths in documents"
    }
    assert not (wrong := list(differences(known, written_names))), "\n".join([*wrong, ADVICE])


def test_struct_keys_on_disk_equal_users_names_list(run: Written) -> None:
    for section, keys in run.keys.items():
        outer = dict.fromkeys(re.split(r"[.\[]", name)[0] for name in names_in(listed()["section"][section]["names"]))
        assert list(outer) == keys, f"{section}: what was read from the disk has other keys than the list{ADVICE}"


def test_files_that_encode_field_names_are_listed() -> None:
    """Attribute names become written names wherever a struct is encoded as it is."""
    known, sections, title = listed()["files"], listed()["section"], "Files with names of fields or classes"
    found = files_with(FIELD_NAMES, (*CODE, "deploy"))
    wrong = list(differences({title: [*known["listed"], *known["internal"]]}, {title: found}))
    assert not wrong, "\n".join(
        [*wrong, f"Who reads what such a file writes? A row of [files] in {LIST.name} says it."]
    )
    assert {section for of in known["listed"].values() for section in of} <= sections.keys()
