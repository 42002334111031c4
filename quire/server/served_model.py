from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

from starlette.requests import Request

from quire.engine import VERSION
from quire.engine.checkpoint.pooling import PoolingConfig
from quire.engine.common import clock
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import InvalidRequest, ModelNotFound
from quire.engine.common.request_params import MODEL_DEFAULT_FIELDS, Task
from quire.engine.common.types import NO_IMAGES_REASON, EngineInfo
from quire.engine.images.multimodal_prompt import MultimodalPromptBuilder
from quire.engine.text.grammar_compiler import GrammarCompiler, make_grammar_vocabulary
from quire.engine.text.tokenizer import Tokenizer
from quire.engine.unsupported_options import suggest_nearest
from quire.server.config import ServerConfig
from quire.server.formats.chat_formats import ChatFormats

TASK_OUTPUTS: dict[Task, str] = {"generate": "text", "embed": "embeddings", "classify": "scores"}


NEUTRAL_SAMPLING: Mapping[str, float] = {each.name: each.default for each in MODEL_DEFAULT_FIELDS}
"""These values apply if neither the request nor generation_config.json sets the field."""
_MAX_LISTED_NAMES, _MAX_COMPARED_NAMES = 20, 200


@dataclass(frozen=True)
class ServedModelSpec:
    """The spec can be sent to other processes."""

    config: ServerConfig
    tokenizer: Tokenizer
    vocab_size: int
    """Token ids run from 0 to vocab_size - 1."""
    sampling_defaults: Mapping[str, float]
    """Values of generation_config.json, or of settings that replace it. `max_tokens` bounds the output."""
    context_length: int = 0
    """Maximum tokens of a prompt together with its answer. Like `tasks`, the value is known only once the engine runs.
    """
    tasks: tuple[Task, ...] = ("generate",)
    pooling: PoolingConfig | None = None
    multimodal_prompt_builder: MultimodalPromptBuilder | None = None
    """None: requests may not have images."""
    no_images_reason: str = NO_IMAGES_REASON
    model_type: str = ""
    """As in config.json: the architecture."""
    weights_format: str = ""
    """gguf or safetensors."""

    def with_engine_info_from(self, model: ServedModel) -> ServedModelSpec:
        return replace(
            self,
            context_length=model.context_length,
            tasks=model.tasks,
            multimodal_prompt_builder=model.multimodal_prompt_builder,
            no_images_reason=model.no_images_reason,
        )

    def build_served_model(self, *, expendable: bool = False, adapters: Collection[str] = ()) -> ServedModel:
        """Raises ModelError for invalid Jinja in the chat template."""
        return ServedModel(
            **{each.name: getattr(self, each.name) for each in fields(ServedModelSpec)},
            names=self.config.model_names,
            chat_formats=ChatFormats.from_config(self.config, self.tokenizer),
            media_domains=tuple(self.config.allowed_media_domains),
            adapters=adapters,
            expendable=expendable,
        )


@dataclass(frozen=True, kw_only=True)
class ServedModel(ServedModelSpec):
    names: tuple[str, ...]
    chat_formats: ChatFormats
    media_domains: tuple[str, ...] = ()
    fetched_images: Mapping[str, bytes] = field(default_factory=dict)
    adapters: Collection[str] = ()
    """A live view of LoRA adapters' names."""
    created: int = 0
    """Unix seconds."""
    fingerprint: str = ""
    """OpenAI's system_fingerprint. If it is the same and ends in `deterministic`, equal requests with equal seeds get
    equal tokens.
    """
    expendable: bool = False
    """True if this process may be killed at any time, so that it can also do work that may never end."""

    def with_engine_info(self, info: EngineInfo, weights_version: str, adapters: Collection[str]) -> ServedModel:
        no_images_reason = info.no_images
        if not no_images_reason and self.multimodal_prompt_builder is None:
            no_images_reason = NO_IMAGES_REASON
        return replace(
            self,
            created=int(clock.time()),
            fingerprint=system_fingerprint(info, weights_version, self.config),
            context_length=info.max_model_len,
            tasks=info.tasks,
            multimodal_prompt_builder=None if info.no_images else self.multimodal_prompt_builder,
            no_images_reason=no_images_reason,
            adapters=adapters,
        )

    @cached_property
    def grammar_compiler(self) -> GrammarCompiler:
        return GrammarCompiler(make_grammar_vocabulary(self.tokenizer, self.vocab_size, self.tokenizer.eos_token_ids))

    @cached_property
    def default_sampling(self) -> Mapping[str, float]:
        return {name: self.sampling_defaults.get(name, plain) for name, plain in NEUTRAL_SAMPLING.items()}

    @cached_property
    def max_output_tokens(self) -> int | None:
        """None if only the context length limits the output."""
        most = self.sampling_defaults.get("max_tokens")
        return None if most is None else int(most)

    @property
    def is_dual_encoder(self) -> bool:
        return self.multimodal_prompt_builder is not None and self.multimodal_prompt_builder.vision.is_dual_encoder

    def resolve_model_name(self, requested_name: str | None) -> str:
        """None and llama.vim's "" mean the first name. Raises ModelNotFound."""
        if not requested_name:
            return self.names[0]
        if requested_name not in self.names and requested_name not in self.adapters:
            raise model_not_found_error(requested_name, [*self.names, *sorted(self.adapters)])
        return requested_name

    def check_task(self, task: Task) -> None:
        """Raises InvalidRequest."""
        if task not in self.tasks:
            task_outputs = " and ".join(TASK_OUTPUTS[each] for each in self.tasks)
            hint = ": serve it with --pooling-type last" if (self.tasks, task) == (("generate",), "embed") else ""
            raise InvalidRequest(
                f"The model `{self.names[0]}` makes {task_outputs}, not {TASK_OUTPUTS[task]}{hint}", param="model"
            )


def system_fingerprint(info: EngineInfo, weights_version: str, config: EngineConfig) -> str:
    """Identifies everything that determines the tokens for a seed: Quire's version and code, the model and its weights
    (wherever stored), dtype, device, backend, bit widths, and the ranks, because sums over ranks round differently. The
    suffix tells whether the batch matters too (see `quire verify`).
    """
    model = info.content or info.model
    identity_parts = (VERSION, info.code, model, info.dtype, info.device, info.backend, weights_version)
    setting_values = (
        config.online_quantization,
        config.quantize_embedding,
        info.kv_cache_dtype,
        config.activation_bits,
        config.tensor_parallel_size,
    )
    context = "" if info.rope_context is None else f"\n{info.rope_context}"
    if config.hf_overrides:
        context += f"\n{json.dumps(config.hf_overrides, sort_keys=True)}"
    digest = hashlib.blake2b(
        ("\n".join((*identity_parts, repr(setting_values))) + context).encode(), digest_size=6
    ).hexdigest()
    return f"fp_{digest}_{'deterministic' if info.deterministic else 'batch-dependent'}"


def model_not_found_error(requested_name: str, served_names: Sequence[str]) -> ModelNotFound:
    shown = requested_name if len(requested_name) <= 100 else f"{requested_name[:100]}…"
    more = f" and {len(served_names) - _MAX_LISTED_NAMES} more" if len(served_names) > _MAX_LISTED_NAMES else ""
    suggestion = suggest_nearest(requested_name[:100], served_names[:_MAX_COMPARED_NAMES])
    message = f"The model `{shown}` does not exist; served here: {', '.join(served_names[:_MAX_LISTED_NAMES])}{more}"
    return ModelNotFound(f"{message}; {suggestion}" if suggestion else message, param="model")


def get_model(request: Request) -> ServedModel:
    model = request.scope["runtime"].model
    assert isinstance(model, ServedModel)
    return model
