from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from quire.engine.checkpoint.hub_names import parse_hub_name
from quire.engine.common.config import DEMO_MODEL, EngineConfig
from quire.engine.common.config_types import JsonObject
from quire.engine.common.errors import ModelError
from quire.engine.common.folder_reader import read_json_if_present
from quire.engine.gguf.model_files import GGUF_SUFFIX, model_stem
from quire.engine.text.chat_messages import RESERVED_VARIABLES
from quire.engine.unsupported_options import redundant_vllm_value_reason

_JsonToolParser = Literal["hermes", "llama3_json", "mistral", "mistral_args", "deepseek_v3", "deepseek_v31"]
ToolCallParser = Literal["auto", "none", _JsonToolParser, "granite", "openai", "pythonic", "qwen3_coder", "seed_oss"]
ReasoningParser = Literal["auto", "none", "think", "mistral", "seed_oss", "cohere"]
DEMO_NAME = "quire-demo"
_UNINFORMATIVE_NAME = re.compile(r"hf|models?|main|weights|checkpoint|snapshot|huggingface|[0-9a-f]{40}")
"""Folder names that do not identify a model."""
_MAX_NAME_LENGTH = 200
_HUB_CACHE_FOLDER = re.compile(r"models--(.+?)--(.+)")


class ServerConfig(EngineConfig):
    """Fields have vLLM's flag names if they mean the same."""

    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0: all interfaces")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0: any free one")
    api_server_count: int = Field(
        1, ge=1, le=64, description="API processes that listen on the port together and share the engines"
    )
    served_model_name: list[str] = Field(
        default_factory=list, description="Names that requests may use, the first one in answers; default: the model's"
    )
    lora_modules: list[str] = Field(
        default_factory=list, description="NAME=PATH of each adapter to serve, a folder or a hub id; see --enable-lora"
    )
    allowed_lora_paths: list[Path] = Field(
        default_factory=list,
        description="Folders, in one of which adapters must be that are loaded at run time; default: any, and the hub",
    )
    max_logprobs: int = Field(
        20, ge=-1, description="Most log probabilities per token a request may ask for; -1: all of the vocabulary"
    )
    return_tokens_as_token_ids: bool = Field(
        False, description="Log probabilities name tokens token_id:N, also where a request does not ask for it"
    )
    dev_endpoints: bool = Field(
        False, description="POST /collective_rpc calls the ranks, for an admin's key or this machine"
    )
    allow_pull: bool = Field(False, description="POST /api/pull downloads models, for an admin's key or this machine")
    enable_per_request_metrics: bool = Field(
        False, description="Completions and chats of one answer tell its times, as metrics"
    )
    allow_unknown_roles: bool = Field(
        False, description="Chats may have roles that neither the APIs nor the chat template name"
    )
    api_key: list[str] = Field(
        default_factory=list,
        description="Keys, one of which requests must show as a bearer token; default: none needed",
    )
    api_key_file: Path | None = Field(
        None,
        description="TOML file of keys with names, weights and limits of their own; "
        "see docs/deploy/security-and-limits.md",
    )
    admin_api_key: list[str] = Field(
        default_factory=list, description="Keys that may also watch the engine and cancel others' requests"
    )
    requests_per_minute: int | None = Field(
        None, ge=1, description="Requests that each API key may make in a minute; default: any number"
    )
    tokens_per_minute: int | None = Field(
        None, ge=1, description="Tokens, of prompts and answers, that each API key may use in a minute; default: any"
    )
    trusted_gateways: list[str] = Field(
        default_factory=list,
        description="Addresses or networks of gateways, whose headers may name a tenant and a priority",
    )
    objective_priorities: list[str] = Field(
        default_factory=list, description="NAME=PRIORITY of each objective that such a gateway may name"
    )
    share_prefix_cache: bool = Field(False, description="Let requests of different API keys share cached prefixes")
    max_queued_requests: int = Field(2048, ge=0, description="Requests that may wait for a slot; more are answered 503")
    max_queued_tokens: int = Field(
        4_000_000, ge=1, description="Prompt tokens of requests that wait; more are answered 503"
    )
    allowed_media_domains: list[str] = Field(
        default_factory=list,
        description="Hosts from which images are fetched that requests name by address; *.HOST: all below it, *: any; "
        "default: none",
    )
    max_body_size: float = Field(16.0, gt=0, description="MiB of a request's body; larger ones are answered 413")
    read_timeout: float = Field(
        20.0, gt=0, description="Seconds in which a request's headers, and then each 16 KiB of its body, must come"
    )
    write_timeout: float = Field(
        60.0, gt=0, description="Seconds that a client may leave its answer unread before it is cut off"
    )
    sse_ping: float = Field(
        15.0, ge=0, description="Seconds of silence after which a stream gets a comment, to keep it alive; 0: never"
    )
    allowed_origins: list[str] = Field(
        default_factory=list, description="Origins whose web pages may call the server (CORS); *: all; default: none"
    )
    allowed_hosts: list[str] = Field(
        default_factory=list,
        description="Hosts, besides this machine's names, that requests may ask for where no API key is needed and "
        "--host is a loopback address; *.HOST: all below it, *: any",
    )
    allowed_methods: list[str] = Field(["*"], description="Methods that such pages may use")
    allowed_headers: list[str] = Field(["*"], description="Headers that such pages may send")
    allow_credentials: bool = Field(False, description="Such pages may send cookies")
    ssl_certfile: Path | None = Field(None, description="PEM file of the certificate chain; serve HTTPS with it")
    ssl_keyfile: Path | None = Field(None, description="PEM file of the certificate's key, if not in the same file")
    ssl_ca_certs: Path | None = Field(
        None, description="PEM file of authorities, one of which must have signed each client's certificate"
    )
    request_history: int = Field(1000, ge=0, description="Ended requests that can still be explained")
    strict: bool = Field(False, description="Refuse request fields without effect, instead of naming them in a header")
    trust_request_chat_template: bool = Field(False, description="Requests may bring a chat template of their own")
    data_dir: Path | None = Field(
        None, description="Directory that keeps responses, conversations, files, batches and streams; default: none are"
    )
    max_stored_size: float = Field(
        1.0, gt=0, description="GiB that they may take; the oldest of the API key with most are deleted"
    )
    response_retention_days: float = Field(
        30.0,
        ge=0,
        description="Days after which a stored response is deleted, unless a stored one continues it; 0: never",
    )
    receipt_log: Path | None = Field(
        None, description="File to which each answer's receipt is appended, for quire replay; default: none"
    )
    receipt_log_size: float = Field(
        1.0, gt=0, description="GiB of that file; beyond, it is renamed to FILE.1, in the place of the one before"
    )
    stream_grace: float = Field(
        600.0,
        ge=0,
        le=86_400,
        description="Seconds for which a stream that nobody reads can be resumed: see --data-dir",
    )
    tool_call_parser: ToolCallParser = Field("auto", description="Format of tool calls; auto: the chat template's")
    strict_tool_calls: bool = Field(
        False, description="A code block with the name and arguments of a tool is text, and no call in another form"
    )
    disable_additional_properties: bool = Field(
        True,
        description="Objects of JSON schemas that have properties and not additionalProperties have no others; else, "
        "by the letter of JSON Schema, they may have any",
    )
    clip_max_tokens: bool = Field(
        True, description="max_tokens beyond the context is clipped, which a header tells; else the request is refused"
    )
    reasoning_parser: ReasoningParser = Field(
        "auto", description="Marks around the model's thinking; auto: the chat template's"
    )
    default_chat_template_kwargs: JsonObject = Field(
        default_factory=dict,
        description="JSON object of the chat template's variables for requests that do not say them: "
        '{"enable_thinking": false}',
    )
    chat_template_content_format: Literal["auto", "string", "openai"] = Field(
        "auto",
        description="How the chat template gets messages' texts: as a string, or in parts, as OpenAI's; auto: as it "
        "shows them",
    )
    root_path: str = Field(
        "",
        pattern=r"^(/[\w.~%-]+)*/?$",
        description="Prefix of all paths behind a proxy, which may keep it or take it away",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Level of Quire's log")
    log_format: Literal["text", "json"] = Field(
        "text", description="json: an object a line, with the ids of a request in its line"
    )
    otlp_traces_endpoint: str | None = Field(
        None, description="OTLP address (HTTP) to send OpenTelemetry traces to; needs the extra otel"
    )
    uvicorn_log_level: Literal["debug", "info", "warning", "error"] = Field(
        "warning", description="Level of the HTTP server's log"
    )
    disable_access_log: bool = Field(False, description="No line per HTTP request")
    disable_log_stats: bool = Field(False, description="No line of throughput every 10 s while requests run")
    shutdown_timeout: float = Field(
        30.0, ge=0, description="Seconds that open requests get to finish on Ctrl-C, SIGTERM or SIGHUP"
    )

    @field_validator("tool_call_parser", "reasoning_parser", mode="before")
    @classmethod
    def replace_redundant_parser_with_auto(cls, value: object, info: ValidationInfo) -> object:
        """Return auto for vLLM's names of formats that the chat template tells."""
        return "auto" if redundant_vllm_value_reason(str(info.field_name), value) else value

    @field_validator("default_chat_template_kwargs")
    @classmethod
    def reject_reserved_kwargs(cls, value: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(RESERVED_VARIABLES & value.keys()):
            raise ValueError(f"{taken[0]} is what requests say, not a variable with a default")
        return value

    @property
    def has_api_keys(self) -> bool:
        return bool(self.api_key or self.admin_api_key or self.api_key_file is not None)

    @property
    def model_names(self) -> tuple[str, ...]:
        """Default: the hub id, the folder's name (or the one in config.json if it is uninformative), or the GGUF file's
        stem.
        """
        if self.served_model_name:
            return tuple(self.served_model_name)
        if self.model == DEMO_MODEL:
            return (DEMO_NAME,)
        path = Path(self.model)
        if path.suffix == GGUF_SUFFIX and path.is_file():
            return (model_stem(path),)
        if path.is_dir():
            return (_name_from_folder(path.resolve()),)
        hub = parse_hub_name(self.model)
        return (self.model if hub is None else hub.display_name,)


def _name_from_folder(path: Path) -> str:
    if not _UNINFORMATIVE_NAME.fullmatch(path.name.lower()):
        return path.name
    if cached := _HUB_CACHE_FOLDER.fullmatch(
        path.parent.parent.name
    ):  # the hub's cache: models--OWNER--NAME/snapshots/COMMIT
        return "/".join(cached.groups())
    try:
        known = (read_json_if_present(path / "config.json") or {}).get("_name_or_path")
    except ModelError:  # reported at startup
        known = None
    if not isinstance(known, str) or not known.isprintable() or len(known) > _MAX_NAME_LENGTH:
        return path.name
    return Path(known).name if known.startswith((".", "/", "~")) else known or path.name
