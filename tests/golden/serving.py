"""Section with servers: HTTP answers and logs."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from transformers.utils import logging

from tests.e2e.server import Server
from tests.golden.masks import mask, mask_log_line
from tests.golden.models import Captured
from tests.golden.requests import MODEL, Request, agents_requests, bad_requests, chats
from tests.golden.tree import Tree
from tests.tiny_models import save_tiny_model
from tests.tree import ROOT

BAD_REQUESTS = 1400
"""Of which over a thousand are refused."""
PAGES = ("/v1/models", "/version", "/health", "/api/tags", "/api/version", "/server_info", "/nothing", "/v1/nothing")
_HEADERS_OF_THE_MOMENT = frozenset({"date", "content-length", "x-request-id", "server", "openai-processing-ms"})
_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? \S+$")
_EVENT_ID = re.compile(r"^id: .*\n", re.MULTILINE)
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="')


def write_agents_model(folder: Path) -> Path:
    """A tiny random model with the demonstration model's tokenizer and template and room for agents' long prompts."""
    demo = ROOT / "quire" / "configs" / "demo"
    size = json.loads((demo / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    logging.disable_progress_bar()
    save_tiny_model(folder, "llama", vocab_size=size, max_position_embeddings=65536)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        if (demo / name).exists():
            shutil.copy(demo / name, folder)
    return folder


@contextmanager
def served(tree: Tree, log: Path, *arguments: str) -> Iterator[Server]:
    server = Server(
        log, *arguments, "--served-model-name", MODEL, "--threads", "1", "--disable-log-stats", env=tree.environment
    )
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()


def capture_http(tree: Tree, work: Path) -> Captured:
    texts: Captured = {}
    log = work / "server.log"
    with served(tree, log, "--data-dir", str(work / "data"), "--max-model-len", "1024") as server:
        replacements = {str(work): "WORK", str(tree.root): "TREE", str(server.port): "PORT"}
        with httpx.Client(base_url=server.url, timeout=300) as client:
            texts["openapi"] = json.dumps(client.get("/openapi.json").json(), indent=1, sort_keys=True)
            for page in PAGES:
                texts[f"GET {page}"] = _answer(client.get(page), replacements)
            for name, request in chats():
                texts[name] = _answer(_post(client, request), replacements)
            for name, request in bad_requests(BAD_REQUESTS):
                response = _post(client, request)
                refused = response.status_code >= 400
                texts[f"bad {name}"] = f"{json.dumps(request[1])}\n{_answer(response, replacements, refused)}"
            texts["metrics"] = metric_names(client.get("/metrics").text)
    texts["log"] = _log_lines(log, replacements)
    return texts


def capture_agents(tree: Tree, work: Path, model: Path) -> Captured:
    texts: Captured = {}
    log = work / "agents.log"
    with served(tree, log, str(model), "--data-dir", str(work / "agents"), "--max-model-len", "32768") as server:
        replacements = {str(work): "WORK", str(server.port): "PORT", str(model): "MODEL"}
        with httpx.Client(base_url=server.url, timeout=300) as client:
            for name, headers, (path, body) in agents_requests():
                sent = {**headers, "content-type": "application/json"}
                texts[name] = _answer(client.post(path, json=body, headers=sent), replacements)
    return texts


def metric_names(text: str) -> str:
    """Every metric with its help, type and labels, without values."""
    lines = {line for line in text.splitlines() if line.startswith("#")}
    for line in text.splitlines():
        if sample := _SAMPLE.match(line):
            lines.add(f"{sample[1]}{{{', '.join(_LABEL.findall(sample[2] or ''))}}}")
    return "\n".join(sorted(lines))


def _post(client: httpx.Client, request: Request) -> httpx.Response:
    path, body = request
    return client.post(path, content=json.dumps(body).encode(), headers={"content-type": "application/json"})


def _answer(response: httpx.Response, replacements: dict[str, str], whole: bool = True) -> str:
    """Status, headers and body; of one that is not told `whole`, the status alone."""
    if not whole:
        return str(response.status_code)
    headers = sorted(
        f"{name}: {value}" for name, value in response.headers.items() if name not in _HEADERS_OF_THE_MOMENT
    )
    body = response.text
    if response.headers.get("content-type", "").startswith("application/x-ndjson"):
        body = merge_ndjson(body)
    elif response.headers.get("content-type", "").startswith("text/event-stream"):
        body = sort_choices(body)
    return mask("\n".join([str(response.status_code), *headers, "", body]), replacements)


def sort_choices(text: str) -> str:
    """A stream of several choices with each choice's events together: in which order those of different choices come
    depends on the moment. Ids count the events of all choices, so they go."""
    events = [event for event in text.split("\n\n") if event.strip()]
    choices = [_choice(event) for event in events]
    if len({choice for choice in choices if choice is not None}) < 2:
        return text
    first = choices.index(next(choice for choice in choices if choice is not None))
    last = len(choices) - choices[::-1].index(next(choice for choice in reversed(choices) if choice is not None))
    middle = sorted(range(first, last), key=lambda place: (choices[place] is None, choices[place] or 0))
    ordered = [*events[:first], *(events[place] for place in middle), *events[last:]]
    return "\n\n".join(_EVENT_ID.sub("", event.strip()) for event in ordered)


def _choice(event: str) -> int | None:
    """The index of the one choice that an event is about, if it is about one."""
    data = event.partition("data: ")[2]
    if not data.startswith("{"):
        return None
    choices = json.loads(data).get("choices")
    return int(choices[0]["index"]) if choices else None


def merge_ndjson(text: str) -> str:
    """Ollama's lines, with neighbors that differ in their text alone made one: tokens that come together share one."""
    merged: list[dict[str, Any]] = []
    for line in text.splitlines():
        event = json.loads(line)
        event.pop("created_at", None)
        if merged and _without_text(merged[-1]) == _without_text(event) and not event.get("done"):
            _append_text(merged[-1], event)
        else:
            merged.append(event)
    return "\n".join(json.dumps(event, ensure_ascii=False) for event in merged)


def _without_text(event: dict[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in event.items() if name != "response"}
    if isinstance(message := event.get("message"), dict):
        rest["message"] = {name: value for name, value in message.items() if name != "content"}
    return rest


def _append_text(event: dict[str, Any], more: dict[str, Any]) -> None:
    if "response" in event:
        event["response"] += more["response"]
    if isinstance(message := event.get("message"), dict) and "content" in message:
        message["content"] += more["message"]["content"]


def _log_lines(log: Path, replacements: dict[str, str]) -> str:
    """Each distinct line once, in alphabetical order: several threads and processes write them."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(sorted({mask_log_line(line, replacements) for line in lines}))
