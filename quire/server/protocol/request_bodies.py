"""Base classes of bodies. null means not set. Parameters without effect are named or refused."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, create_model, model_validator

from quire.engine.common.errors import InvalidRequest
from quire.engine.common.request_params import COPIED_SAMPLING_FIELDS, MAX_SEQUENCE_BREAKERS, MAX_STOP_STRINGS
from quire.engine.common.types import DEFAULT_KEEP_SECONDS
from quire.engine.unsupported_options import suggest_nearest
from quire.server.protocol.field_limits import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_CACHE_SALT_LENGTH,
    MAX_FIELDS,
    MAX_LISTED_TOKEN_IDS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_PROMPT_ENTRIES,
    MAX_SESSION_ID_LENGTH,
    MAX_STRUCTURED_CHOICES,
    BadWord,
    MaxEntries,
)

UNSUPPORTED_PARAMS: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "ec_transfer_params": ({},),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "mcp_servers": ([],),
    "modalities": (["text"],),
    "multi_modal_data": ({},),
    "multi_modal_uuids": ({},),
    "prompt_embeds": (),
    "suffix": ("",),
    "thinking_token_budget": (),
    "verbosity": ("medium",),
    "audios": ([],),
    "video": ([],),
    "videos": ([],),
    "web_search_options": (),
    "webhook": (),
    "webhook_url": (),
    "regex": (),
    "stop_regex": (),
    "ebnf": (),
    "grammar": (),
    "json_schema": (),
}
"""Other values would change the answer, so only these neutral ones are accepted."""
PARAM_ALTERNATIVES: Mapping[str, str] = {
    "regex": "structured_outputs.regex",
    "ebnf": "structured_outputs.grammar",
    "grammar": "structured_outputs.grammar",
    "json_schema": "structured_outputs.json, or response_format",
    **dict.fromkeys(("multi_modal_data", "multi_modal_uuids"), "images in the messages of /v1/chat/completions"),
    **dict.fromkeys(("audio", "audios", "modalities", "video", "videos"), "only text and images are read"),
    "functions": "tools",
    "function_call": "tool_choice",
    **dict.fromkeys(("webhook", "webhook_url"), "GET /v1/responses/{id} or /v1/batches/{id}; webhooks are not sent"),
}
"""Alternatives to unsupported parameters, mostly of SGLang and llama.cpp."""

BEAM_SEARCH_SAMPLING_FIELDS = ("temperature", "ignore_eos", "skip_special_tokens")
"""The sampling fields that beam search accepts."""
BEAM_SEARCH_UNSUPPORTED_PARAMS = (
    "stream",
    "echo",
    "best_of",
    "stop",
    *(each.name for each in COPIED_SAMPLING_FIELDS if each.name not in BEAM_SEARCH_SAMPLING_FIELDS),
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "dry_sequence_breakers",
    "prompt_logprobs",
    "queue_timeout",
    "repetition_detection",
    "thinking_token_budget",
    "logprob_token_ids",
    "session_id",
    "session_ttl",
    "prompt_cache_key",
    "prompt_cache_retention",
    "receipt",
)
RESPONSE_FORMAT_FIELDS = ("type", "json_schema", "schema", "value", "format", "structures", "triggers")
JSON_SCHEMA_FIELDS = ("name", "schema", "strict")
IGNORED_PARAMS_HEADER = "X-Ignored-Params"
ADAPTED_HEADER = "X-Quire-Adapted"
"""Header that says how a conversation was adapted to its chat template."""
MAX_ADAPTATIONS = 10
MAX_IGNORED_NAMES = 20
MAX_IGNORED_NAME_LENGTH = 64
MAX_SESSION_TTL = 86_400.0
SAFE_ID_PATTERN = r"[A-Za-z0-9._:/+=@-]{1,128}"
"""Safe in logs and headers."""


class BodyModel(BaseModel):
    """Part of a body. Unknown fields have no effect; null means not set."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def drop_nulls(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if value is not None}


class RequestBody(BodyModel):
    """Unknown fields are kept in model_extra."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def check_num_fields(cls, body: Any) -> Any:
        if isinstance(body, dict) and len(body) > MAX_FIELDS:
            raise InvalidRequest(f"The body has {len(body)} fields, at most {MAX_FIELDS} are read")
        return body

    def misspelling_hint(self) -> str:
        return misspelling_hint(self.model_extra or (), sorted(type(self).model_fields.keys() - self.model_fields_set))

    def check_params_and_list_ignored(self) -> list[str]:
        """Returns parameters without effect. Raises InvalidRequest for unsupported ones."""
        ignored = []
        for name, value in (self.model_extra or {}).items():
            neutral_values = UNSUPPORTED_PARAMS.get(name)
            if neutral_values is None:
                ignored.append(name)
            elif not any(
                value == neutral_value and isinstance(value, bool) is isinstance(neutral_value, bool)
                for neutral_value in neutral_values
            ):
                hint = f": use {PARAM_ALTERNATIVES[name]}" if name in PARAM_ALTERNATIVES else ""
                raise InvalidRequest(f"{name} is not supported{hint}", param=name)
        return ignored


def misspelling_hint(unknown: Iterable[str], missing: Iterable[str]) -> str:
    """`; got mesages: did you mean messages?` for the first unknown name close to a missing one, or ""."""
    missing = list(missing)
    short = (name for name in islice(unknown, MAX_IGNORED_NAMES) if len(name) <= MAX_IGNORED_NAME_LENGTH)
    hints = ((name, suggest_nearest(name.lower(), missing)) for name in short)
    return next((f"; got {name}: {hint}" for name, hint in hints if hint), "")


class RepetitionDetection(RequestBody):
    """As in vLLM: an answer ends when its last tokens are min_count times the same pattern."""

    model_config = ConfigDict(extra="forbid")

    max_pattern_size: int = Field(0, ge=0, le=1024)
    """Tokens; 0 disables detection."""
    min_pattern_size: int = Field(0, ge=0)
    min_count: int = Field(0, ge=0, lt=2**31)

    @model_validator(mode="after")
    def check_sizes(self) -> RepetitionDetection:
        if self.min_pattern_size > self.max_pattern_size:
            raise InvalidRequest("min_pattern_size must not exceed max_pattern_size", param="repetition_detection")
        if self.max_pattern_size and self.min_count < 2:
            raise InvalidRequest("min_count must be at least 2", param="repetition_detection")
        return self


class ModelBody(RequestBody):
    """The model may be an adapter."""

    model: str | None = None


class EngineRequestBody(ModelBody):
    timeout: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Seconds within which the answer must be complete. Otherwise, the status is 408."""
    queue_timeout: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Seconds until the first token. Otherwise, the status is 503."""
    request_id: str | None = Field(None, pattern=f"^{SAFE_ID_PATTERN}$")
    """Follows the prefix in the answer's id (chatcmpl-…); overrides X-Request-Id."""
    cache_salt: str = Field("", max_length=MAX_CACHE_SALT_LENGTH)
    priority: int = Field(0, ge=-(2**31), lt=2**31)


class StreamOptions(RequestBody):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    """With include_usage, every chunk has the usage so far."""


class KvTransferParams(RequestBody):
    """Sent by vLLM's prefill servers. Only the token ids are used; KV is not transferred."""

    prompt_token_ids: Annotated[list[StrictInt], MaxEntries(MAX_PROMPT_ENTRIES)] = Field(default_factory=list)
    """The whole prompt; it is not tokenized again."""

    @model_validator(mode="after")
    def reject_kv_transfer(self) -> KvTransferParams:
        if unsupported := [name for name, value in (self.model_extra or {}).items() if value]:
            message = f"kv_transfer_params.{unsupported[0]} is not supported: only prompt_token_ids is read"
            raise InvalidRequest(message, param="kv_transfer_params")
        return self


def _sampling_body_fields() -> dict[str, Any]:
    """None stands for the model's default."""
    fields: dict[str, Any] = {}
    for row in COPIED_SAMPLING_FIELDS:
        default = None if row.field.has_model_default else row.default
        annotation = row.type | None if row.field.has_model_default else row.type
        fields[row.name] = (annotation, Field(default, lt=2**31) if row.type is int else default)
    return fields


if TYPE_CHECKING:

    class SamplingBody(EngineRequestBody):
        """Has the COPIED_SAMPLING_FIELDS."""

        temperature: float | None
else:
    SamplingBody = create_model("SamplingBody", __base__=EngineRequestBody, **_sampling_body_fields())


class GenerationBody(SamplingBody):
    max_tokens: int | None = None
    """-1 means as many as the context holds."""
    logit_bias: Annotated[dict[int, float], MaxEntries(MAX_LISTED_TOKEN_IDS)] | None = None
    allowed_token_ids: Annotated[list[int], MaxEntries(MAX_ALLOWED_TOKEN_IDS)] | None = None
    bad_words: Annotated[list[BadWord], MaxEntries(MAX_BAD_WORDS)] = Field(default_factory=list)
    dry_sequence_breakers: Annotated[list[str], MaxEntries(MAX_SEQUENCE_BREAKERS)] | None = None
    """They end DRY's repetitions. None means newline, colon, quotation mark and asterisk."""
    n: int = 1
    seed: int | None = None
    stop: str | Annotated[list[str], MaxEntries(MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[int], MaxEntries(MAX_LISTED_TOKEN_IDS)] = Field(default_factory=list)
    prompt_logprobs: int | None = Field(None, ge=0)
    logprob_token_ids: Annotated[list[StrictInt], MaxEntries(MAX_LOGPROB_TOKEN_IDS)] = Field(default_factory=list)
    """Tokens to report in logprobs instead of the likeliest ones."""
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    """Tokens to keep. -1 keeps as many as fit with the answer."""
    truncation_side: Literal["left", "right"] = "left"
    """ "left" keeps the last tokens."""
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    """logprobs name tokens `token_id:123`, because different tokens may have equal texts."""
    kv_transfer_params: KvTransferParams | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    """The guided_ fields are vLLM's older names of structured_outputs."""
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], MaxEntries(MAX_STRUCTURED_CHOICES)] | None = None
    guided_grammar: str | None = None
    repetition_detection: RepetitionDetection | None = None
    use_beam_search: bool = False
    """Returns the n best of n beams; not for streams."""
    length_penalty: float = Field(1.0, ge=-10.0, le=10.0)
    """Log probabilities are divided by length ** length_penalty."""
    receipt: bool = False
    """Requests a receipt for `quire replay`, like the header X-Receipt: 1."""
    session_id: str = Field("", max_length=MAX_SESSION_ID_LENGTH)
    """Id of the conversation, whose KV is kept for the next turn."""
    session_ttl: float | None = Field(None, gt=0, le=MAX_SESSION_TTL)
    """Seconds to keep KV, even without session_id."""
    prompt_cache_key: str | None = Field(None, max_length=MAX_SESSION_ID_LENGTH)
    """OpenAI's name of session_id. KV is kept for DEFAULT_KEEP_SECONDS."""
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    """24h means MAX_SESSION_TTL."""

    @property
    def prompt_cache_retention_seconds(self) -> float:
        """0 if nothing is to be kept."""
        if self.session_ttl is not None:
            return self.session_ttl
        return (
            MAX_SESSION_TTL
            if self.prompt_cache_retention == "24h"
            else DEFAULT_KEEP_SECONDS * (self.prompt_cache_key is not None)
        )

    @property
    def transferred_prompt_ids(self) -> list[int]:
        """Prompt ids from another server, if any."""
        return [] if self.kv_transfer_params is None else self.kv_transfer_params.prompt_token_ids

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def has_continuous_usage(self) -> bool:
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats

    def check_params_and_list_ignored(self) -> list[str]:
        ignored = super().check_params_and_list_ignored()
        self._check_beam_search()
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs is not available when stream is true", param="prompt_logprobs")
        if self.stream_options is not None:
            if not self.stream:
                raise InvalidRequest("stream_options is only allowed when stream is true", param="stream_options")
            ignored += [f"stream_options.{name}" for name in self.stream_options.check_params_and_list_ignored()]
        ignored += _ignored_format_params(self.response_format or {}, self.structured_outputs or {})
        if "truncation_side" in self.model_fields_set and self.truncate_prompt_tokens is None:
            ignored.append("truncation_side")
        return ignored

    def _check_beam_search(self) -> None:
        if not self.use_beam_search:
            if self.length_penalty != 1.0:
                raise InvalidRequest("length_penalty needs use_beam_search to be true", param="length_penalty")
            return
        if self.temperature not in (None, 0.0, 1.0):
            raise InvalidRequest("temperature has no effect on beam search: leave it out", param="temperature")
        fields = type(self).model_fields
        for name in BEAM_SEARCH_UNSUPPORTED_PARAMS:
            field = fields.get(name)
            if field is not None and getattr(self, name) != field.get_default(call_default_factory=True):
                raise InvalidRequest(f"{name} is not available with use_beam_search", param=name)


def _ignored_format_params(response_format: Mapping[str, Any], structured_outputs: Mapping[str, Any]) -> list[str]:
    """Lists parameters without effect. There is only one backend, answers follow schemas exactly even without `strict`,
    and the model decides on spaces after commas and colons.
    """
    schema = response_format.get("json_schema")
    schema = schema if isinstance(schema, dict) else {}
    ignored = [
        f"response_format.{name}" for name, _ in _non_null_items(response_format) if name not in RESPONSE_FORMAT_FIELDS
    ]
    for name, value in _non_null_items(schema):
        if name not in JSON_SCHEMA_FIELDS or (name == "strict" and value is False):
            ignored.append(f"response_format.json_schema.{name}")
    if structured_outputs.get("backend") is not None:
        ignored.append("structured_outputs.backend")
    if structured_outputs.get("disable_any_whitespace"):
        ignored.append("structured_outputs.disable_any_whitespace")
    return ignored


def _non_null_items(entries: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in entries.items() if value is not None]


def ignored_params_header(names: list[str], strict: bool) -> dict[str, str]:
    """Raises InvalidRequest if the server is strict. Names come from callers: unsafe characters are replaced, many or
    long names truncated.
    """
    if names and strict:
        raise InvalidRequest(f"{names[0]} has no effect here", param=names[0])
    short = [
        name if len(name) <= MAX_IGNORED_NAME_LENGTH else f"{name[:MAX_IGNORED_NAME_LENGTH]}..."
        for name in names[:MAX_IGNORED_NAMES]
    ]
    safe = [re.sub(r"[^\w.\-]", "?", name, flags=re.ASCII) for name in short]
    if len(names) > MAX_IGNORED_NAMES:
        safe.append(f"and {len(names) - MAX_IGNORED_NAMES} more")
    return {IGNORED_PARAMS_HEADER: ", ".join(safe)} if safe else {}


def build_adapted_header(adapted: str) -> dict[str, str]:
    return {ADAPTED_HEADER: adapted} if adapted else {}
