"""What a served model is: its names, and all that turns text into its tokens and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from starlette.requests import Request

from quire.engine.errors import ModelNotFound
from quire.engine.text.chat_template import ChatRenderer
from quire.engine.text.tokenizer import Tokenizer
from quire.server.formats.grammars import GrammarChecker
from quire.server.formats.message import ChatFormats


@dataclass(frozen=True, slots=True)
class ServedModel:
    names: tuple[str, ...]
    """Names that requests may use, at least one; the first is the model's own."""
    created: int
    """Seconds of the Unix clock."""
    fingerprint: str
    """Answers with the same fingerprint and seed have the same tokens."""
    context_length: int
    """Most tokens of a prompt and its answer together."""
    vocab_size: int
    """Token ids run from 0 to vocab_size - 1."""
    sampling_defaults: Mapping[str, float]
    """Sampling parameters of the model's generation_config.json."""
    tokenizer: Tokenizer
    renderer: ChatRenderer
    formats: ChatFormats
    grammars: GrammarChecker

    def answer_name(self, asked: str | None) -> str:
        """The name that an answer gives: the one asked for, by default the first. Raises ModelNotFound."""
        if asked is None:
            return self.names[0]
        if asked not in self.names:
            message = f"The model `{asked}` does not exist; served here: {', '.join(self.names)}"
            raise ModelNotFound(message, param="model")
        return asked


def model_of(request: Request) -> ServedModel:
    model = request.app.state.model
    assert isinstance(model, ServedModel)
    return model
