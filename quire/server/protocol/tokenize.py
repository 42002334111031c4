"""POST /tokenize and /detokenize, in the shapes of vLLM and of llama.cpp."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, StrictInt, model_validator

from quire.engine.common.errors import InvalidRequest
from quire.server.protocol.chat import Messages, check_final_message_continuation
from quire.server.protocol.field_limits import MAX_DETOKENIZE_TOKENS, MaxEntries
from quire.server.protocol.request_bodies import ModelBody
from quire.server.protocol.tools import ToolList


class TokenizeRequest(ModelBody):
    """A prompt, or the messages of a chat."""

    prompt: str | None = None
    content: str | None = None
    """llama.cpp's name of a prompt, for which special tokens are not added unless add_special says so."""
    add_special: bool = False
    with_pieces: bool = False
    """Tokens are objects with an id and the piece of text that it is, or its bytes where they are none."""
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    """Default: true for a prompt, false for messages."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False
    chat_template: str | None = None
    """Used instead of the model's, where the operator allows it."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    tools: ToolList = Field(default_factory=list)
    """Tools of a chat, which the template shows the model."""

    @model_validator(mode="after")
    def check_one_input(self) -> TokenizeRequest:
        if sum(each is not None for each in (self.prompt, self.content, self.messages)) != 1:
            raise InvalidRequest(f"give either prompt, content or messages{self.misspelling_hint()}", param="prompt")
        if self.continue_final_message:
            has_explicit_generation_prompt = (
                self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set
            )
            check_final_message_continuation(self.messages or (), has_explicit_generation_prompt)
        return self


class DetokenizeRequest(ModelBody):
    tokens: Annotated[list[StrictInt], MaxEntries(MAX_DETOKENIZE_TOKENS)]
