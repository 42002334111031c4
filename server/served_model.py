"""What request handlers work with: one frozen object, made when the app is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.requests import Request

from quire.engine.client.client import EngineClient
from quire.engine.errors import ModelNotFound
from quire.engine.text.chat_template import ChatRenderer
from quire.engine.text.tokenizer import Tokenizer
from quire.engine.types import EngineInfo
from quire.server.access.tenants import Tenants
from quire.server.config import ServerConfig
from quire.server.generation.message import ChatFormats
from quire.server.generation.structured import GrammarChecker
from quire.server.observe.live_view import LiveView
from quire.server.observe.metrics import Metrics
from quire.server.observe.request_log import RequestLog


@dataclass(frozen=True, slots=True)
class Serving:
    config: ServerConfig
    client: EngineClient
    info: EngineInfo
    tokenizer: Tokenizer
    renderer: ChatRenderer
    formats: ChatFormats
    grammars: GrammarChecker
    defaults: Mapping[str, float]
    """Sampling parameters of the model's generation_config.json."""
    vocab_size: int
    """The model's: token ids run from 0 to vocab_size - 1."""
    metrics: Metrics
    live_view: LiveView
    request_log: RequestLog
    fingerprint: str
    tenants: Tenants
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the server is about to end: it takes no new generations."""
    created: int = field(default_factory=lambda: int(time.time()))

    def model_name(self, asked: str | None) -> str:
        """The name for the answer. Raises ModelNotFound."""
        names = self.config.model_names
        if asked is None:
            return names[0]
        if asked not in names:
            raise ModelNotFound(f"The model `{asked}` does not exist; served here: {', '.join(names)}", param="model")
        return asked


def serving_of(request: Request) -> Serving:
    serving = request.app.state.serving
    assert isinstance(serving, Serving)
    return serving
