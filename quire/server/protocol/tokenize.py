"""POST /tokenize and /detokenize, in the shapes of vLLM and of llama.cpp."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, StrictInt, model_validator

from quire.engine.errors import InvalidRequest
from quire.server.protocol.bounds import MAX_DETOKENIZED, AtMost
from quire.server.protocol.chat import Messages, check_continuation
from quire.server.protocol.common import ModelBody
from quire.server.protocol.tools import Tools


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
    tools: Tools = Field(default_factory=list)
    """Tools of a chat, which the template shows the model."""

    @model_validator(mode="after")
    def one_of_two(self) -> TokenizeRequest:
        if sum(each is not None for each in (self.prompt, self.content, self.messages)) != 1:
            raise InvalidRequest(f"give either prompt, content or messages{self.misspelt()}", param="prompt")
        if self.continue_final_message:
            both = self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set
            check_continuation(self.messages or (), both)
        return self


class DetokenizeRequest(ModelBody):
    tokens: Annotated[list[StrictInt], AtMost(MAX_DETOKENIZED)]
