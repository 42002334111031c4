"""What all request bodies share: a null means unset, and a parameter that is not honoured is named or refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from quire.engine.errors import InvalidRequest

NOT_HONOURED: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logprob_token_ids": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_embeds": (),
    "suffix": ("",),
    "thinking_token_budget": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Parameters that would change the answer but are not supported, with the values at which they change nothing."""

NOT_WITH_BEAM_SEARCH = (
    *("stream", "echo", "best_of", "stop", "min_tokens", "top_p", "top_k", "min_p", "logit_bias", "allowed_token_ids"),
    *("bad_words", "repetition_penalty", "presence_penalty", "frequency_penalty", "prompt_logprobs", "queue_timeout"),
    *("repetition_detection", "include_stop_str_in_output", "thinking_token_budget"),
)
"""Parameters that beam search does not support."""
MAX_NAMES = 20
MAX_BAD_WORDS = 1024
MAX_WORD = 128
"""Most characters of a bad word."""
MAX_SALT = 1024
MAX_IDS = 1024
"""Most entries of logit_bias and of stop_token_ids: each of n answers carries a copy."""


class RequestBody(BaseModel):
    """Base of all request bodies. Fields that no subclass names are kept in model_extra."""

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def drop_nulls(cls, body: Any) -> Any:
        return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body

    def ignored_params(self) -> list[str]:
        """Names of parameters that have no effect. Raises InvalidRequest for one that should have had one."""
        ignored = []
        for name, value in (self.model_extra or {}).items():
            harmless = NOT_HONOURED.get(name)
            if harmless is None:
                ignored.append(name)
            elif not any(value == one and isinstance(value, bool) is isinstance(one, bool) for one in harmless):
                raise InvalidRequest(f"{name} is not supported", param=name)
        return ignored


class RepetitionDetection(RequestBody):
    """vLLM's RepetitionDetectionParams: an answer ends when its last tokens are min_count times the same pattern."""

    model_config = ConfigDict(extra="forbid")

    max_pattern_size: int = Field(0, ge=0, le=1024)
    """In tokens; 0 detects nothing."""
    min_pattern_size: int = Field(0, ge=0)
    min_count: int = Field(0, ge=0, lt=2**31)

    @model_validator(mode="after")
    def in_order(self) -> RepetitionDetection:
        if self.min_pattern_size > self.max_pattern_size:
            raise InvalidRequest("min_pattern_size must not exceed max_pattern_size", param="repetition_detection")
        if self.max_pattern_size and self.min_count < 2:
            raise InvalidRequest("min_count must be at least 2", param="repetition_detection")
        return self


class StreamOptions(RequestBody):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    """With include_usage: every chunk gives the usage so far."""


class GenerationBody(RequestBody):
    """The fields that completions and chat have in common."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, lt=2**31)
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = Field(None, max_length=MAX_IDS)
    allowed_token_ids: list[int] | None = None
    bad_words: list[Annotated[str, Field(max_length=MAX_WORD)]] = Field(default_factory=list, max_length=MAX_BAD_WORDS)
    n: int = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = Field(default_factory=list, max_length=MAX_IDS)
    min_tokens: int = Field(0, lt=2**31)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    prompt_logprobs: int | None = Field(None, ge=0)
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    """Keep only the last tokens of a prompt, so many; -1: as many as the context holds beside the answer."""
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    """Log probabilities name tokens `token_id:123`, so that tokens of the same text can be told apart."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    """The guided_ fields are vLLM's older names of structured_outputs' entries."""
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    repetition_detection: RepetitionDetection | None = None
    use_beam_search: bool = False
    """Answer with the n best hypotheses of a search n beams wide; whole answers only."""
    length_penalty: float = Field(1.0, ge=-10.0, le=10.0)
    """A hypothesis scores its log probability divided by its length to this power."""
    timeout: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Seconds in which the answer must be complete; 408 otherwise."""
    queue_timeout: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Seconds in which the first token must have come; 503 otherwise."""
    cache_salt: str = Field("", max_length=MAX_SALT)
    priority: int = Field(0, ge=-(2**31), lt=2**31)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats

    def ignored_params(self) -> list[str]:
        ignored = super().ignored_params()
        self._check_beam_search()
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs is not available when stream is true", param="prompt_logprobs")
        if self.stream_options is not None:
            if not self.stream:
                raise InvalidRequest("stream_options is only allowed when stream is true", param="stream_options")
            ignored += [f"stream_options.{name}" for name in self.stream_options.ignored_params()]
        return ignored

    def _check_beam_search(self) -> None:
        if not self.use_beam_search:
            if self.length_penalty != 1.0:
                raise InvalidRequest("length_penalty needs use_beam_search to be true", param="length_penalty")
            return
        if self.temperature not in (None, 0.0, 1.0):
            raise InvalidRequest("temperature has no effect on beam search: leave it out", param="temperature")
        fields = type(self).model_fields
        for name in NOT_WITH_BEAM_SEARCH:
            field = fields.get(name)
            if field is not None and getattr(self, name) != field.get_default(call_default_factory=True):
                raise InvalidRequest(f"{name} is not available with use_beam_search", param=name)


def ignored_header(names: list[str], strict: bool) -> dict[str, str]:
    """The X-Ignored-Params header. Raises InvalidRequest instead when the server is strict.

    The names come from the caller, so characters that are not safe in a header are replaced.
    """
    if names and strict:
        raise InvalidRequest(f"{names[0]} is not a parameter that has an effect here", param=names[0])
    safe = [re.sub(r"[^\w.\-]", "?", name, flags=re.ASCII)[:64] for name in names[:MAX_NAMES]]
    return {"X-Ignored-Params": ", ".join(safe)} if safe else {}
