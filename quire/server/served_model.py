"""A served model: its names, and everything that turns text into its tokens and back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

from starlette.requests import Request

from quire.engine import VERSION
from quire.engine.advice import nearest
from quire.engine.checkpoint.pooling import Pooling
from quire.engine.config import EngineConfig
from quire.engine.errors import InvalidRequest, ModelNotFound
from quire.engine.images.reader import ImageReader
from quire.engine.text.chat_template import ChatRenderer
from quire.engine.text.grammar import GrammarCompiler, vocabulary_of
from quire.engine.text.tokenizer import Tokenizer
from quire.engine.types import TEXT_ALONE, EngineInfo, Task
from quire.server.config import ServerConfig
from quire.server.formats.chat_formats import ChatFormats

MADE: dict[Task, str] = {"generate": "text", "embed": "embeddings", "classify": "scores"}
"""What each task makes, for messages."""


PLAIN: Mapping[str, float] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""What a request samples with where neither it nor the model's generation_config.json says."""
_SHOWN, _COMPARED = 20, 200
"""Names that an error lists, and that it compares with the one asked for."""


@dataclass(frozen=True)
class ModelSource:
    """The part of a ServedModel that is sent to another process, which makes the rest of it."""

    config: ServerConfig
    tokenizer: Tokenizer
    vocab_size: int
    """Token ids run from 0 to vocab_size - 1."""
    sampling_defaults: Mapping[str, float]
    """Sampling parameters of the model's generation_config.json, or of the settings that are in its place, and as
    `max_tokens` the most that a request may generate."""
    context_length: int = 0
    """Most tokens of a prompt and its answer together. Known when the engine has started, as `tasks` are."""
    tasks: tuple[Task, ...] = ("generate",)
    """The kinds of requests that it can answer."""
    pooling: Pooling | None = None
    """How it makes vectors."""
    images: ImageReader | None = None
    """How it reads images; None where requests may not bring any."""
    no_images: str = TEXT_ALONE
    """Why they may not."""

    def started(self, model: ServedModel) -> ModelSource:
        """With what the engine says of the model."""
        return replace(
            self,
            context_length=model.context_length,
            tasks=model.tasks,
            images=model.images,
            no_images=model.no_images,
        )

    def model(self, *, expendable: bool = False, adapters: Collection[str] = ()) -> ServedModel:
        """Raises ModelError for a chat template that is not valid Jinja."""
        return ServedModel(
            **{each.name: getattr(self, each.name) for each in fields(ModelSource)},
            names=self.config.model_names,
            formats=ChatFormats.chosen(self.config, self.tokenizer),
            media_domains=tuple(self.config.allowed_media_domains),
            adapters=adapters,
            expendable=expendable,
        )


@dataclass(frozen=True, kw_only=True)
class ServedModel(ModelSource):
    names: tuple[str, ...]
    """Names that requests may use, at least one; the first is the model's own."""
    formats: ChatFormats
    media_domains: tuple[str, ...] = ()
    """Hosts from which images are fetched."""
    fetched: Mapping[str, bytes] = field(default_factory=dict)
    """The images of the request that is being resolved, by address."""
    adapters: Collection[str] = ()
    """Names of the adapters beside it, which requests may use too; they come and go."""
    created: int = 0
    """Seconds of the Unix clock."""
    fingerprint: str = ""
    """Answers with the same fingerprint and seed have the same tokens."""
    expendable: bool = False
    """Whether this process may be killed, as workers may: then it takes work that may never end."""

    @cached_property
    def grammar_compiler(self) -> GrammarCompiler:
        return GrammarCompiler(vocabulary_of(self.tokenizer, self.vocab_size, self.tokenizer.eos_token_ids))

    @property
    def defaults(self) -> Mapping[str, float]:
        """What a request samples with where it does not say."""
        return {name: self.sampling_defaults.get(name, plain) for name, plain in PLAIN.items()}

    @property
    def most_tokens(self) -> int | None:
        """The most that a request may generate; None: what its context holds."""
        most = self.sampling_defaults.get("max_tokens")
        return None if most is None else int(most)

    @property
    def pairs(self) -> bool:
        """Whether an image has a vector of its own, and is in no prompt with text."""
        return self.images is not None and self.images.vision.apart

    @property
    def renderer(self) -> ChatRenderer:
        return self.formats.renderer

    def answer_name(self, asked: str | None) -> str:
        """The name that an answer gives: the one asked for, by default the first. Raises ModelNotFound."""
        if asked is None:
            return self.names[0]
        if asked not in self.names and asked not in self.adapters:
            raise not_served(asked, [*self.names, *sorted(self.adapters)])
        return asked

    def check_task(self, task: Task) -> None:
        """Raises InvalidRequest where the model is not made for it."""
        if task not in self.tasks:
            made = " and ".join(MADE[each] for each in self.tasks)
            way = ": serve it with --pooling-type last" if (self.tasks, task) == (("generate",), "embed") else ""
            raise InvalidRequest(f"The model `{self.names[0]}` makes {made}, not {MADE[task]}{way}", param="model")


def fingerprint(info: EngineInfo, weights_version: str, config: EngineConfig) -> str:
    """A name of all that decides a seed's tokens: Quire's version and code, the model and its weights, wherever they
    lie, its type, the device, the backend, the bits of what is computed with, and the ranks, whose sums round
    differently. The end says whether the batch decides them too (see `quire verify`)."""
    model = info.content or info.model
    parts = (VERSION, info.code, model, info.dtype, info.device, info.backend, weights_version)
    asked = (
        config.at_load,
        config.quantize_embedding,
        info.kv_cache_dtype,
        config.activation_bits,
        config.tensor_parallel_size,
    )
    context = "" if info.rope_context is None else f"\n{info.rope_context}"
    if config.hf_overrides:
        context += f"\n{json.dumps(config.hf_overrides, sort_keys=True)}"
    digest = hashlib.blake2b(("\n".join((*parts, repr(asked))) + context).encode(), digest_size=6).hexdigest()
    return f"fp_{digest}_{'deterministic' if info.deterministic else 'batch-dependent'}"


def not_served(asked: str, served: Sequence[str]) -> ModelNotFound:
    """The error for a name that is none of those `served`."""
    shown = asked if len(asked) <= 100 else f"{asked[:100]}…"
    more = f" and {len(served) - _SHOWN} more" if len(served) > _SHOWN else ""
    meant = nearest(asked[:100], served[:_COMPARED])
    message = f"The model `{shown}` does not exist; served here: {', '.join(served[:_SHOWN])}{more}"
    return ModelNotFound(f"{message}; {meant}" if meant else message, param="model")


def model_of(request: Request) -> ServedModel:
    model = request.scope["runtime"].model
    assert isinstance(model, ServedModel)
    return model
