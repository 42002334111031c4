"""llama.cpp's API: POST /completion and /infill. llama.vim and llama.vscode send the latter."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

from pydantic import Field, StrictInt, WrapValidator

from quire.engine.common.errors import InvalidRequest
from quire.engine.common.request_params import MAX_SEQUENCE_BREAKERS
from quire.server.protocol.field_limits import MAX_LISTED_TOKEN_IDS, MaxEntries, TokenIds, validate_with_one_error
from quire.server.protocol.request_bodies import MAX_STOP_STRINGS, BodyModel, EngineRequestBody

MAX_EXTRA_CHUNKS = 1024
MAX_NAMES = 128
NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "dynatemp_range": (0,),
    "mirostat": (0,),
    "post_sampling_probs": (False,),
    "image_data": ([],),
    "lora": ([],),
}
"""Accepted values by field. Other values would change the answer."""
ALTERNATIVES: Mapping[str, str] = {"lora": ": an adapter is requested by its name, as model"}
INFILL_SAMPLER_MIN_P = 0.2
"""Stands in for llama.cpp's sampler `infill`, which drops tokens below this probability. It is not the same, because
min_p is relative to the largest probability.
"""
SAMPLER_FIELDS: Mapping[str, tuple[str, float]] = {
    "dry": ("dry_multiplier", 0.0),
    "top_n_sigma": ("top_n_sigma", -1.0),
    "top_k": ("top_k", 0),
    "typ_p": ("typical_p", 1.0),
    "top_p": ("top_p", 1.0),
    "min_p": ("min_p", 0.0),
    "xtc": ("xtc_probability", 0.0),
    "temperature": ("temperature", 1.0),
}
"""A sampler's field, and the neutral value used if `samplers` lacks the sampler."""
KNOWN_SAMPLERS = (*SAMPLER_FIELDS, "infill")
PENALTIES_SAMPLER = "penalties"

Bias = Annotated[tuple[StrictInt | str, float | bool], Field(description="A token or a text, and a bias.")]


class LlamaCppBody(EngineRequestBody):
    n_predict: int | None = None
    """Negative values set no limit besides the context. 0 only computes the prompt into the prefix cache."""
    max_tokens: int | None = None
    n_cmpl: int = 1
    temperature: float | None = None
    top_k: int | None = Field(None, lt=2**31)
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    top_n_sigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = Field(None, lt=2**31)
    dry_penalty_last_n: int | None = Field(None, lt=2**31)
    dry_sequence_breakers: Annotated[list[str], MaxEntries(MAX_SEQUENCE_BREAKERS)] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    samplers: Annotated[list[str], MaxEntries(MAX_NAMES)] | None = None
    seed: int | None = None
    """-1 means a random seed."""
    stop: str | Annotated[list[str], MaxEntries(MAX_STOP_STRINGS)] | None = None
    ignore_eos: bool = False
    logit_bias: (
        Annotated[list[Bias], MaxEntries(MAX_LISTED_TOKEN_IDS)]
        | Annotated[dict[str, float | bool], MaxEntries(MAX_LISTED_TOKEN_IDS)]
        | None
    ) = None
    """`false` forbids a token."""
    grammar: str = ""
    json_schema: Any = None
    n_probs: int = Field(0, ge=0)
    n_indent: int = Field(0, ge=0)
    """The answer ends at a line, except the first, that begins with fewer spaces and tabs than this."""
    t_max_predict_ms: float = Field(0.0, le=86_400_000.0)
    """Milliseconds after the first token. The answer ends at the next newline after that. 0 or less means no limit."""
    stream: bool = False
    return_tokens: bool = False
    response_fields: Annotated[list[str], MaxEntries(MAX_NAMES)] | None = None
    """Paths such as timings/prompt_ms. None selects all fields."""
    cache_prompt: bool = True
    """Has no effect: the prefix cache never changes an answer."""

    @property
    def num_tokens(self) -> int:
        """-1 if only the context limits the answer."""
        count = self.max_tokens if self.n_predict is None else self.n_predict
        return -1 if count is None else max(-1, count)

    def check_params_and_list_ignored(self) -> list[str]:
        extra = self.model_extra or {}
        for name, neutral_values in NEUTRAL_VALUES.items():
            if extra.get(name) is not None and extra[name] not in neutral_values:
                raise InvalidRequest(f"{name} is not supported{ALTERNATIVES.get(name, '')}", param=name)
        ignored = [name for name in super().check_params_and_list_ignored() if name not in NEUTRAL_VALUES]
        known = {*KNOWN_SAMPLERS, PENALTIES_SAMPLER}
        return [*ignored, *(f"samplers.{name}" for name in self.samplers or () if name not in known)]


def _explain_prompt(prompt: Any) -> str:
    return "prompt must be a string or a list of token ids: /v1/completions takes several prompts" if prompt else ""


class LlamaCppCompletionRequest(LlamaCppBody):
    prompt: Annotated[
        str | TokenIds, WrapValidator(partial(validate_with_one_error, "prompt", explain_error=_explain_prompt))
    ]


class InfillChunk(BodyModel):
    """A snippet of another file."""

    text: str
    filename: str = "tmp"


class InfillRequest(LlamaCppBody):
    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[InfillChunk], MaxEntries(MAX_EXTRA_CHUNKS)] = Field(default_factory=list)
    prompt: str = ""
