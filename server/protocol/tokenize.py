"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, StrictInt, model_validator

from quire.engine.errors import InvalidRequest
from quire.server.protocol.bounds import MAX_DETOKENIZED, AtMost
from quire.server.protocol.chat import Messages, check_continuation
from quire.server.protocol.common import RequestBody
from quire.server.protocol.tools import Tools


class TokenizeRequest(RequestBody):
    """A prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    """Default: true for a prompt, false for messages."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False
    chat_template: str | None = None
    """Used instead of the model's, where the operator allows it."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    tools: Tools = Field(default_factory=list)
    """Tools of a chat, which the template shows the model."""

    @model_validator(mode="after")
    def one_of_two(self) -> TokenizeRequest:
        if (self.prompt is None) is (self.messages is None):
            raise InvalidRequest(f"give either prompt or messages{self.misspelt()}", param="prompt")
        if self.continue_final_message:
            both = self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set
            check_continuation(self.messages or (), both)
        return self


class DetokenizeRequest(RequestBody):
    model: str | None = None
    tokens: Annotated[list[StrictInt], AtMost(MAX_DETOKENIZED)]
