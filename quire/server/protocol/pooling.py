"""POST /v1/embeddings, /pooling, /classify, /v1/score, /v1/rerank, as in OpenAI, vLLM, Jina and Cohere."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, WrapValidator, model_validator

from quire.engine.common.errors import InvalidRequest
from quire.engine.common.request_params import PoolingTask
from quire.server.protocol.chat import Messages
from quire.server.protocol.field_limits import MAX_PROMPTS, MaxEntries, TextsOrTokenIds, validate_with_one_error
from quire.server.protocol.request_bodies import EngineRequestBody, RequestBody

MAX_PROMPT_NAME_LENGTH = 256
MAX_INSTRUCTION_LENGTH = 4096


IMAGES_IN_MESSAGES_HINT = (
    "an input is text or token ids; for a model that accepts images, send them in `messages` of /v1/embeddings"
)
_IMAGE_KEYS = ("image", "image_url", "content")
"""Keys of image inputs of Jina, vLLM and Cohere."""


def _explain_image_input(value: Any) -> str:
    parts = (each for each in (value if isinstance(value, list) else [value]) if isinstance(each, dict))
    return f"input: {IMAGES_IN_MESSAGES_HINT}" if any(key in each for each in parts for key in _IMAGE_KEYS) else ""


TextList = Annotated[list[str], MaxEntries(MAX_PROMPTS)]


class PoolingBody(EngineRequestBody):
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    """Number of tokens to keep, including special ones. -1 means the model's maximum."""
    truncation_side: Literal["left", "right"] = "right"
    """ "right" keeps the first tokens."""
    use_activation: bool | None = None
    """Scale embeddings to length 1, or turn scores into probabilities. Default: the model's."""
    normalize: bool | None = None
    """Alias of use_activation."""
    user: str | None = None

    @property
    def wants_activation(self) -> bool | None:
        return self.normalize if self.use_activation is None else self.use_activation


class InputBody(PoolingBody):
    input: Annotated[
        TextsOrTokenIds, WrapValidator(partial(validate_with_one_error, "input", explain_error=_explain_image_input))
    ]
    add_special_tokens: bool = True
    prompt_name: str | None = Field(None, max_length=MAX_PROMPT_NAME_LENGTH)

    @model_validator(mode="before")
    @classmethod
    def reject_messages(cls, body: Any) -> Any:
        if isinstance(body, dict) and body.get("messages") and "input" not in body:
            raise InvalidRequest(
                f"messages: not accepted here, send `input`: {IMAGES_IN_MESSAGES_HINT}", param="messages"
            )
        return body


class EmbeddingRequest(InputBody):
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)
    """How many numbers of each vector to keep, from the first."""


class ConversationEmbeddingRequest(PoolingBody):
    """vLLM's form: one vector for a conversation, which may have images."""

    messages: Messages
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class CohereEmbedRequest(PoolingBody):
    """Cohere's v2 API, for texts."""

    texts: TextList
    input_type: str | None = Field(None, max_length=MAX_PROMPT_NAME_LENGTH)
    """search_query, search_document and so on. Prepends the model's prompt of that name, or of the name's last word."""
    embedding_types: Annotated[list[Literal["float", "base64", "binary", "ubinary"]], MaxEntries(4)] = Field(["float"])
    """binary and ubinary have one bit per number, set if the number is above 0. Eight bits make an int8 or uint8."""
    output_dimension: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    truncate: Literal["NONE", "START", "END"] = "END"
    """The end at which texts beyond the model's limit or max_tokens are cut."""

    @model_validator(mode="after")
    def reject_non_text_inputs(self) -> CohereEmbedRequest:
        if unsupported := next((name for name in ("images", "inputs") if (self.model_extra or {}).get(name)), None):
            raise InvalidRequest(f"{unsupported}: embeddings are computed only from text", param=unsupported)
        return self


class PoolingRequest(EmbeddingRequest):
    task: PoolingTask | None = None


class ClassificationRequest(InputBody):
    pass


class TextPairBody(PoolingBody):
    instruction: str | None = Field(None, max_length=MAX_INSTRUCTION_LENGTH)


class ScoreRequest(TextPairBody):
    """Scores one text against several, or pairs of texts."""

    text_1: str | TextList | None = None
    text_2: str | TextList | None = None
    queries: str | TextList | None = None
    """vLLM's newer names of text_1 and text_2."""
    documents: str | TextList | None = None

    @model_validator(mode="after")
    def check_both_texts(self) -> ScoreRequest:
        for old, new in (("text_1", "queries"), ("text_2", "documents")):
            if (getattr(self, old) is None) is (getattr(self, new) is None):
                raise InvalidRequest(f"give either {old} or {new}{self.misspelling_hint()}", param=old)
        return self

    @property
    def first_texts(self) -> list[str]:
        return _as_list(self.text_1 if self.queries is None else self.queries)

    @property
    def second_texts(self) -> list[str]:
        return _as_list(self.text_2 if self.documents is None else self.documents)


class Document(RequestBody):
    text: str


class RerankRequest(TextPairBody):
    query: str
    documents: Annotated[list[str | Document], MaxEntries(MAX_PROMPTS)]
    top_n: int | None = Field(None, ge=0)
    """0 and None return all."""
    return_documents: bool | None = None
    """None means true, but false at /v2/rerank."""
    max_tokens_per_doc: int | None = Field(None, ge=1)

    @property
    def document_texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]


def _as_list(texts: str | Sequence[str] | None) -> list[str]:
    return [texts] if isinstance(texts, str) else list(texts or ())
