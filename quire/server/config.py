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
from quire.engine.gguf.file_names import GGUF_SUFFIX, model_stem
from quire.engine.text.conversation.chat_messages import RESERVED_VARIABLES
from quire.engine.unsupported_options import redundant_vllm_value_reason

_JsonToolParser = Literal["hermes", "llama3_json", "mistral", "mistral_args", "deepseek_v3", "deepseek_v31"]
ToolStrictLevel = Literal["auto", "function", "parameter"]
ToolCallParser = Literal["auto", "none", _JsonToolParser, "granite", "openai", "pythonic", "qwen3_coder", "seed_oss"]
ReasoningParser = Literal["auto", "none", "think", "mistral", "seed_oss", "cohere"]
DEMO_NAME = "quire-demo"
_UNINFORMATIVE_NAME = re.compile(r"hf|models?|main|weights|checkpoint|snapshot|huggingface|[0-9a-f]{40}")
_MAX_NAME_LENGTH = 200
_HUB_CACHE_FOLDER = re.compile(r"models--(.+?)--(.+)")


class ServerConfig(EngineConfig):
    """Fields that mean the same as a vLLM flag have its name."""

    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0: all interfaces")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0: any free one")
    uds: Path | None = Field(None, description="Path of a Unix socket to listen on, instead of --host and --port")
    api_server_count: int = Field(
        1, ge=1, le=64, description="Number of API processes that share the port and the engines"
    )
    served_model_name: list[str] = Field(
        default_factory=list,
        description="Names that requests may use for the model; answers have the first; default: the model's own",
    )
    lora_modules: list[str] = Field(
        default_factory=list,
        description="NAME=PATH of each adapter to serve, a folder or a hub id; needs --enable-lora",
    )
    allowed_lora_paths: list[Path] = Field(
        default_factory=list,
        description="Folders from which adapters may be loaded at run time; default: any folder, and the hub",
    )
    max_logprobs: int = Field(
        20,
        ge=-1,
        description="Maximum number of log probabilities per token that a request may ask for; -1: the whole "
        "vocabulary",
    )
    return_tokens_as_token_ids: bool = Field(
        False, description="Write tokens of log probabilities as token_id:N in every answer"
    )
    dev_endpoints: bool = Field(
        False, description="Enable POST /collective_rpc, which calls the ranks, for admin keys or this machine"
    )
    allow_pull: bool = Field(False, description="Let POST /api/pull download models, for admin keys or this machine")
    enable_per_request_metrics: bool = Field(
        False, description="Add timing metrics to completions and chats with one answer"
    )
    allow_unknown_roles: bool = Field(
        False, description="Accept message roles that neither the APIs nor the chat template name"
    )
    api_key: list[str] = Field(
        default_factory=list,
        description="API keys; each request must send one as a bearer token; default: no key needed",
    )
    api_key_file: Path | None = Field(
        None, description="TOML file of API keys with names, weights and limits; see docs/deploy/security-and-limits.md"
    )
    admin_api_key: list[str] = Field(
        default_factory=list,
        description="API keys that may also watch the engine, cancel any request and change the weights",
    )
    metrics_api_key: list[str] = Field(
        default_factory=list,
        description="Keys that may read /metrics and nothing else, for Prometheus; with other API keys",
    )
    requests_per_minute: int | None = Field(
        None, ge=1, description="Requests per minute for each API key; default: no limit"
    )
    tokens_per_minute: int | None = Field(
        None, ge=1, description="Tokens per minute, of prompts and answers, for each API key; default: no limit"
    )
    trusted_gateways: list[str] = Field(
        default_factory=list,
        description="Addresses or networks of gateways whose headers may name a tenant and a priority",
    )
    objective_priorities: list[str] = Field(
        default_factory=list, description="NAME=PRIORITY of each objective that such a gateway may name"
    )
    share_prefix_cache: bool = Field(False, description="Let requests of different API keys share cached prefixes")
    max_queued_requests: int = Field(
        2048, ge=0, description="Maximum number of waiting requests; further ones are answered 503"
    )
    max_queued_tokens: int = Field(
        4_000_000,
        ge=1,
        description="Maximum number of prompt tokens of waiting requests; further requests are answered 503",
    )
    allowed_media_domains: list[str] = Field(
        default_factory=list,
        description="Hosts from which images may be fetched; *.HOST allows all names below it, * any host; "
        "default: none",
    )
    max_body_size: float = Field(
        16.0, gt=0, description="Maximum size of a request's body in MiB; larger ones are answered 413"
    )
    read_timeout: float = Field(
        20.0, gt=0, description="Seconds in which a request's headers, and then each 16 KiB of its body, must arrive"
    )
    write_timeout: float = Field(
        60.0, gt=0, description="Seconds that a client may leave its answer unread before it is disconnected"
    )
    max_websockets: int = Field(
        1000, ge=0, description="Maximum number of open WebSockets per API process; 0: no WebSockets"
    )
    sse_ping: float = Field(
        15.0,
        ge=0,
        description="Seconds of silence after which a stream gets a comment to keep the connection open; 0: never",
    )
    allowed_origins: list[str] = Field(
        default_factory=list, description="Origins whose web pages may call the server (CORS); * is all; default: none"
    )
    allowed_hosts: list[str] = Field(
        default_factory=list,
        description="Further host names that requests may use if no API key is needed and --host is a loopback "
        "address; *.HOST allows all names below it, * any",
    )
    allowed_methods: list[str] = Field(["*"], description="HTTP methods that pages of --allowed-origins may use")
    allowed_headers: list[str] = Field(["*"], description="HTTP headers that pages of --allowed-origins may send")
    allow_credentials: bool = Field(False, description="Let pages of --allowed-origins send cookies")
    ssl_certfile: Path | None = Field(None, description="PEM file of the certificate chain; enables HTTPS")
    ssl_keyfile: Path | None = Field(
        None, description="PEM file of the certificate's key, if it is in a file of its own"
    )
    ssl_ca_certs: Path | None = Field(
        None, description="PEM file of authorities; each client's certificate must be signed by one of them"
    )
    request_history: int = Field(1000, ge=0, description="Number of ended requests that can still be explained")
    strict: bool = Field(
        False, description="Refuse request fields that have no effect, instead of listing them in X-Ignored-Params"
    )
    trust_request_chat_template: bool = Field(False, description="Accept chat templates in requests")
    data_dir: Path | None = Field(
        None,
        description="Directory for stored responses, conversations, files, batches and streams; default: nothing "
        "is stored",
    )
    max_stored_size: float = Field(
        1.0,
        gt=0,
        description="GiB that files, the journal and everything else in --data-dir may each take; beyond it, the "
        "oldest entries of the key that stores most are deleted",
    )
    response_retention_days: float = Field(
        30.0,
        ge=0,
        description="Days after which a stored response is deleted, unless a stored response continues it; 0: never",
    )
    receipt_log: Path | None = Field(
        None, description="File that gets a receipt of each answer, for quire replay; default: none"
    )
    receipt_log_size: float = Field(
        1.0, gt=0, description="GiB after which the receipt log is renamed to FILE.1, which it replaces"
    )
    stream_grace: float = Field(
        600.0,
        ge=0,
        le=86_400,
        description="Seconds for which an unread stream can be resumed, with --data-dir",
    )
    tool_call_parser: ToolCallParser = Field(
        "auto", description="Format of tool calls; auto: read from the chat template"
    )
    tool_strict_level: ToolStrictLevel = Field(
        "auto",
        description="Which tool calls a grammar constrains; auto: required calls and calls of strict tools; "
        "function: all calls, to the call format and the name of a tool; parameter: all calls, to the tool's schema",
    )
    strict_tool_calls: bool = Field(
        False, description="Do not take a code block with a tool's name and arguments for a tool call"
    )
    disable_additional_properties: bool = Field(
        True,
        description="Close JSON schema objects that have properties but no additionalProperties; off: the letter "
        "of JSON Schema, which allows any others",
    )
    clip_max_tokens: bool = Field(
        True, description="Clip a max_tokens beyond the context and say so in a header; off: refuse such requests"
    )
    reasoning_parser: ReasoningParser = Field(
        "auto", description="Format of the model's reasoning; auto: read from the chat template"
    )
    default_chat_template_kwargs: JsonObject = Field(
        default_factory=dict,
        description='JSON object of default chat template variables, such as {"enable_thinking": false}',
    )
    chat_template_content_format: Literal["auto", "string", "openai"] = Field(
        "auto",
        description="How the chat template gets message text: string, openai (a list of parts), or auto, which "
        "detects it",
    )
    root_path: str = Field(
        "",
        pattern=r"^(/[\w.~%-]+)*/?$",
        description="Path prefix behind a proxy, whether or not the proxy strips it",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Level of Quire's log")
    log_format: Literal["text", "json"] = Field(
        "text", description="text, or json: one object per line, with request ids"
    )
    otlp_traces_endpoint: str | None = Field(
        None, description="OTLP address (HTTP) for OpenTelemetry traces; needs the extra otel"
    )
    uvicorn_log_level: Literal["debug", "info", "warning", "error"] = Field(
        "warning", description="Level of the HTTP server's log"
    )
    disable_access_log: bool = Field(False, description="Do not log each HTTP request")
    disable_log_stats: bool = Field(False, description="Do not log throughput every 10 s while requests run")
    shutdown_timeout: float = Field(
        30.0, ge=0, description="Seconds that open requests get to finish on Ctrl-C, SIGTERM or SIGHUP"
    )

    @field_validator("tool_call_parser", "reasoning_parser", mode="before")
    @classmethod
    def replace_redundant_parser_with_auto(cls, value: object, info: ValidationInfo) -> object:
        return "auto" if redundant_vllm_value_reason(str(info.field_name), value) else value

    @field_validator("default_chat_template_kwargs")
    @classmethod
    def reject_reserved_kwargs(cls, value: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(RESERVED_VARIABLES & value.keys()):
            raise ValueError(f"{taken[0]} is set by requests, and is not a variable with a default")
        return value

    @property
    def has_api_keys(self) -> bool:
        return bool(self.api_key or self.admin_api_key or self.api_key_file is not None)

    @property
    def model_names(self) -> tuple[str, ...]:
        """If a folder's name says nothing (such as `model`), the default is the hub id in the hub cache's path, or else
        the name in config.json.
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
    ):  # in the hub's cache: models--OWNER--NAME/snapshots/COMMIT
        return "/".join(cached.groups())
    try:
        known = (read_json_if_present(path / "config.json") or {}).get("_name_or_path")
    except ModelError:  # reported at startup
        known = None
    if not isinstance(known, str) or not known.isprintable() or len(known) > _MAX_NAME_LENGTH:
        return path.name
    return Path(known).name if known.startswith((".", "/", "~")) else known or path.name
