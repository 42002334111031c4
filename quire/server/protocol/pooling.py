"""POST /v1/embeddings, /pooling, /classify, /v1/score, /v1/rerank: in the shapes of OpenAI, vLLM, Jina and Cohere."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, WrapValidator, model_validator

from quire.engine.errors import InvalidRequest
from quire.engine.types import PoolingTask
from quire.server.protocol.bounds import MAX_PROMPTS, AtMost, TextsOrIds, one_complaint
from quire.server.protocol.chat import Messages
from quire.server.protocol.common import CallBody, RequestBody

MAX_NAME = 256
MAX_INSTRUCTION = 4096


NO_IMAGES = "an input is text, or token ids; where the model reads images, they come in `messages` of /v1/embeddings"
_IMAGE_KEYS = ("image", "image_url", "content")
"""What an input that is an object has in the APIs of Jina, vLLM and Cohere where it is an image, or may be."""


def _why(given: Any) -> str:
    """What is said of an input that shows an image."""
    parts = (each for each in (given if isinstance(given, list) else [given]) if isinstance(each, dict))
    return f"input: {NO_IMAGES}" if any(key in each for each in parts for key in _IMAGE_KEYS) else ""


Texts = Annotated[list[str], AtMost(MAX_PROMPTS)]


class PoolingBody(CallBody):
    """The fields that all of them have in common."""

    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    """Keep only so many tokens of an input, special ones included; -1: as many as the model reads."""
    truncation_side: Literal["left", "right"] = "right"
    """Which tokens are cut off: right keeps the first ones."""
    use_activation: bool | None = None
    """Whether embeddings are scaled to length 1, or scores become probabilities; default: as the model is meant."""
    normalize: bool | None = None
    """Another name of use_activation, for embeddings."""
    user: str | None = None
    """An end user's name, which changes nothing."""

    @property
    def activation(self) -> bool | None:
        return self.normalize if self.use_activation is None else self.use_activation


class InputBody(PoolingBody):
    input: Annotated[TextsOrIds, WrapValidator(partial(one_complaint, "input", why=_why))]
    add_special_tokens: bool = True
    prompt_name: str | None = Field(None, max_length=MAX_NAME)
    """The name of a text of the model's own to put before each input, such as "query"."""

    @model_validator(mode="before")
    @classmethod
    def no_conversation(cls, body: Any) -> Any:
        if isinstance(body, dict) and body.get("messages") and "input" not in body:
            raise InvalidRequest(f"messages: not read here, send `input`: {NO_IMAGES}", param="messages")
        return body


class EmbeddingRequest(InputBody):
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)
    """Keep only so many of the first numbers."""


class ConversationEmbeddingRequest(PoolingBody):
    """vLLM's form of it: a conversation, as the model's template writes it, has one vector. It may show images."""

    messages: Messages
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class CohereEmbedRequest(PoolingBody):
    """Cohere's second version of it, for texts."""

    texts: Texts
    input_type: str | None = Field(None, max_length=MAX_NAME)
    """search_query, search_document and so on: the model's own text of that name, or of its last word, is put before
    each, where it has one."""
    embedding_types: Annotated[list[Literal["float", "base64", "binary", "ubinary"]], AtMost(4)] = Field(["float"])
    """binary and ubinary: a bit for each number, which says whether it is above 0, eight in an int8 or uint8."""
    output_dimension: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    truncate: Literal["NONE", "START", "END"] = "END"
    """Which end of a text is cut off that is too long for the model, or for max_tokens."""

    @model_validator(mode="after")
    def texts_alone(self) -> CohereEmbedRequest:
        if asked := next((name for name in ("images", "inputs") if (self.model_extra or {}).get(name)), None):
            raise InvalidRequest(f"{asked}: vectors are made of texts alone", param=asked)
        return self


class PoolingRequest(EmbeddingRequest):
    task: PoolingTask | None = None


class ClassificationRequest(InputBody):
    pass


class PairBody(PoolingBody):
    instruction: str | None = Field(None, max_length=MAX_INSTRUCTION)
    """What the second text is to be for the first; for models that read an instruction."""


class ScoreRequest(PairBody):
    """Scores one text against each of several, or texts pair by pair."""

    text_1: str | Texts | None = None
    text_2: str | Texts | None = None
    queries: str | Texts | None = None
    """vLLM's newer names of the two."""
    documents: str | Texts | None = None

    @model_validator(mode="after")
    def both(self) -> ScoreRequest:
        for old, new in (("text_1", "queries"), ("text_2", "documents")):
            if (getattr(self, old) is None) is (getattr(self, new) is None):
                raise InvalidRequest(f"give either {old} or {new}{self.misspelt()}", param=old)
        return self

    @property
    def firsts(self) -> list[str]:
        return _listed(self.text_1 if self.queries is None else self.queries)

    @property
    def seconds(self) -> list[str]:
        return _listed(self.text_2 if self.documents is None else self.documents)


class Document(RequestBody):
    text: str


class RerankRequest(PairBody):
    query: str
    documents: Annotated[list[str | Document], AtMost(MAX_PROMPTS)]
    top_n: int | None = Field(None, ge=0)
    """Answer with the best so many; 0 and None: with all."""
    return_documents: bool | None = None
    """Default: true, but false at /v2/rerank."""
    max_tokens_per_doc: int | None = Field(None, ge=1)
    """Most tokens of a document that are read."""

    @property
    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]


def _listed(given: str | Sequence[str] | None) -> list[str]:
    return [given] if isinstance(given, str) else list(given or ())
