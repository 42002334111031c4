"""POST /api/chat, /api/generate, /api/embed, /api/embeddings and /api/show: Ollama's API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from quire.engine.errors import InvalidRequest
from quire.server.protocol.bounds import MAX_TOOLS, AtMost
from quire.server.protocol.common import MAX_STOP_STRINGS, Given, ModelBody, RequestBody
from quire.server.protocol.pooling import Texts
from quire.server.protocol.tools import FunctionTools


class OllamaFunction(Given):
    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class OllamaCall(Given):
    id: str | None = None
    function: OllamaFunction


_UNREAD = ("audio", "audios", "video", "videos")


class OllamaMessage(Given):
    role: str
    content: str = ""
    thinking: str = ""
    images: list[str] = Field(default_factory=list)
    """Files in base64."""
    tool_calls: Annotated[list[OllamaCall], AtMost(MAX_TOOLS)] = Field(default_factory=list)
    tool_name: str | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def images_alone(cls, message: Any) -> Any:
        if isinstance(message, dict) and (name := next((each for each in _UNREAD if message.get(each)), None)):
            raise InvalidRequest(f"messages: only text and images are read, got {name}", param="messages")
        return message


class Options(RequestBody):
    """Ollama's names for fields that a chat has under other names. Options that are not listed here have no effect."""

    num_predict: int | None = None
    """Most tokens of the answer; negative: as many as the context holds."""
    temperature: float | None = None
    top_k: int | None = Field(None, lt=2**31)
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], AtMost(MAX_STOP_STRINGS)] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


class OllamaBody(ModelBody):
    """What the two endpoints that generate share."""

    stream: bool = True
    format: Literal["", "json"] | dict[str, Any] | None = None
    """json: any JSON; else a schema."""
    options: Options = Options()
    think: bool | Literal["low", "medium", "high"] | None = None
    keep_alive: str | float | None = None
    """Without effect: a model stays as long as its server."""

    def ignored_params(self) -> list[str]:
        options = [f"options.{name}" for name in self.options.model_extra or {}]
        return [*super().ignored_params(), *options]


class OllamaChatRequest(OllamaBody):
    messages: list[OllamaMessage] = Field(default_factory=list)
    tools: FunctionTools = Field(default_factory=list)


class OllamaGenerateRequest(OllamaBody):
    prompt: str = ""
    system: str | None = None
    suffix: str | None = None
    raw: bool = False
    """The prompt is what the model reads, without its template."""
    images: list[str] = Field(default_factory=list)
    """Files in base64."""

    def ignored_params(self) -> list[str]:
        if (self.model_extra or {}).get("template"):
            raise InvalidRequest("template is not supported: the model has its own; raw uses none", param="template")
        return super().ignored_params()


class OllamaEmbedRequest(ModelBody):
    input: str | Texts = ""
    truncate: bool = True
    dimensions: int | None = Field(None, ge=1)
    keep_alive: str | float | None = None
    options: dict[str, Any] = Field(default_factory=dict)


class OllamaEmbeddingsRequest(ModelBody):
    """The older form."""

    prompt: str = ""
    keep_alive: str | float | None = None
    options: dict[str, Any] = Field(default_factory=dict)


class OllamaShowRequest(ModelBody):
    name: str | None = None
    """The older name of model."""
    verbose: bool = False


class OllamaPullRequest(ModelBody):
    name: str | None = None
    """The older name of model."""
    stream: bool = True
