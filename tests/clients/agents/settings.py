"""Settings with which agents reach a server. docs/guides/chat-and-agents.md explains them to users."""

from __future__ import annotations

import json

from tests.clients.scripted import MODEL


def claude_code_environment(port: int) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": f"http://127.0.0.1:{port}",
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
        "DISABLE_TELEMETRY": "1",
    }


def codex_settings(port: int, model: str, *, websocket: bool = False) -> dict[str, str]:
    provider = f'name = "Quire"\nbase_url = "http://127.0.0.1:{port}/v1"\nwire_api = "responses"\n'
    if websocket:
        provider += "supports_websockets = true\n"
    return {".codex/config.toml": f'model = "{model}"\nmodel_provider = "quire"\n[model_providers.quire]\n{provider}'}


def opencode_settings(port: int) -> dict[str, str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Quire",
        "options": {"baseURL": f"http://127.0.0.1:{port}/v1"},
        "models": {MODEL: {"name": "m"}},
    }
    name = f"quire/{MODEL}"
    settings = {"provider": {"quire": provider}, "model": name, "small_model": name, "autoupdate": False}
    return {".config/opencode/opencode.json": json.dumps({**settings, "share": "disabled"})}
