"""Base of other APIs' bodies, which are translated to a chat and accept a chat's other fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from quire.engine.common.errors import InvalidRequest
from quire.engine.common.request_params import COPIED_SAMPLING_FIELDS
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.request_bodies import ModelBody

CHAT_EXTENSIONS = (
    *(each.name for each in COPIED_SAMPLING_FIELDS if each.name not in ("temperature", "top_p", "top_k")),
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "dry_sequence_breakers",
    "seed",
    "stop_token_ids",
    "truncate_prompt_tokens",
    "truncation_side",
    "structured_outputs",
    "repetition_detection",
    "timeout",
    "queue_timeout",
    "request_id",
    "cache_salt",
    "priority",
    "session_id",
    "session_ttl",
    "prompt_cache_key",
    "prompt_cache_retention",
    "receipt",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "add_special_tokens",
)
"""Fields that mean the same in every API."""


class TranslatableBody(ModelBody):
    chat_field_aliases: ClassVar[Mapping[str, str]] = {}
    accepted_extensions: ClassVar[tuple[str, ...]] = CHAT_EXTENSIONS

    def pick_extensions(self) -> dict[str, Any]:
        return {name: value for name, value in (self.model_extra or {}).items() if name in self.accepted_extensions}

    def check_params_and_list_ignored(self) -> list[str]:
        """Returns parameters without effect. Raises InvalidRequest for a chat's unsupported fields."""
        for name, value in (self.model_extra or {}).items():
            field = ChatRequest.model_fields.get(name)
            if field is None or name in self.accepted_extensions:
                continue
            if value != field.get_default(call_default_factory=True):
                hint = f": use {self.chat_field_aliases[name]}" if name in self.chat_field_aliases else ""
                raise InvalidRequest(f"{name} is not a parameter of this endpoint{hint}", param=name)
        return [name for name in super().check_params_and_list_ignored() if name not in ChatRequest.model_fields]
