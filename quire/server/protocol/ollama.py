"""Ollama's API: POST /api/chat, /api/generate, /api/embed, /api/embeddings and /api/show."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from quire.engine.common.errors import InvalidRequest
from quire.server.protocol.field_limits import MAX_TOOLS, MaxEntries
from quire.server.protocol.pooling import TextList
from quire.server.protocol.request_bodies import MAX_STOP_STRINGS, BodyModel, ModelBody, RequestBody
from quire.server.protocol.tools import FunctionToolList


class OllamaFunction(BodyModel):
    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class OllamaCall(BodyModel):
    id: str | None = None
    function: OllamaFunction


_UNSUPPORTED_MEDIA = ("audio", "audios", "video", "videos")


class OllamaMessage(BodyModel):
    role: str
    content: str = ""
    thinking: str = ""
    images: list[str] = Field(default_factory=list)
    tool_calls: Annotated[list[OllamaCall], MaxEntries(MAX_TOOLS)] = Field(default_factory=list)
    tool_name: str | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def reject_other_media(cls, message: Any) -> Any:
        if isinstance(message, dict) and (
            name := next((each for each in _UNSUPPORTED_MEDIA if message.get(each)), None)
        ):
            raise InvalidRequest(f"messages: only text and images are read, got {name}", param="messages")
        return message


class Options(RequestBody):
    """Ollama's names of a chat's fields. Other options have no effect."""

    num_predict: int | None = None
    """Negative values mean as many as the context holds."""
    temperature: float | None = None
    top_k: int | None = Field(None, lt=2**31)
    top_p: float | None = None
    min_p: float | None = None
    top_n_sigma: float | None = None
    """Presets may set this field and those of XTC and DRY, which Ollama lacks."""
    typical_p: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], MaxEntries(MAX_STOP_STRINGS)] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = Field(None, lt=2**31)
    dry_penalty_last_n: int | None = Field(None, lt=2**31)


class OllamaGenerationBody(ModelBody):
    stream: bool = True
    format: Literal["", "json"] | dict[str, Any] | None = None
    """ "json" means any JSON. A dict is a schema."""
    options: Options = Options()
    think: bool | Literal["low", "medium", "high"] | None = None
    keep_alive: str | float | None = None
    """Has no effect: models stay loaded."""

    def check_params_and_list_ignored(self) -> list[str]:
        options = [f"options.{name}" for name in self.options.model_extra or {}]
        return [*super().check_params_and_list_ignored(), *options]


class OllamaChatRequest(OllamaGenerationBody):
    messages: list[OllamaMessage] = Field(default_factory=list)
    tools: FunctionToolList = Field(default_factory=list)


class OllamaGenerateRequest(OllamaGenerationBody):
    prompt: str = ""
    system: str | None = None
    suffix: str | None = None
    raw: bool = False
    """If true, the template does not render the prompt."""
    images: list[str] = Field(default_factory=list)

    def check_params_and_list_ignored(self) -> list[str]:
        if (self.model_extra or {}).get("template"):
            raise InvalidRequest("template is not supported: the model has its own; raw uses none", param="template")
        return super().check_params_and_list_ignored()


class OllamaEmbedRequest(ModelBody):
    input: str | TextList = ""
    truncate: bool = True
    dimensions: int | None = Field(None, ge=1)
    keep_alive: str | float | None = None
    options: dict[str, Any] = Field(default_factory=dict)


class OllamaEmbeddingsRequest(ModelBody):
    """Ollama's older form of embeddings."""

    prompt: str = ""
    keep_alive: str | float | None = None
    options: dict[str, Any] = Field(default_factory=dict)


class OllamaShowRequest(ModelBody):
    name: str | None = None
    verbose: bool = False


class OllamaPullRequest(ModelBody):
    name: str | None = None
    stream: bool = True
