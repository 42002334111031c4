"""POST /tokenize and /detokenize, as in vLLM and llama.cpp."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, StrictInt, model_validator

from quire.engine.common.errors import InvalidRequest
from quire.server.protocol.chat import Messages, check_final_message_continuation
from quire.server.protocol.field_limits import MAX_DETOKENIZE_TOKENS, MaxEntries
from quire.server.protocol.request_bodies import ModelBody
from quire.server.protocol.tools import ToolList


class TokenizeRequest(ModelBody):
    """Has a prompt, or a chat's messages."""

    prompt: str | None = None
    content: str | None = None
    """llama.cpp's prompt; no special tokens unless add_special."""
    add_special: bool = False
    with_pieces: bool = False
    """Return each id with its text, or with its bytes if they are not text."""
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    """Default: true for a prompt, false for messages."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    tools: ToolList = Field(default_factory=list)

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
