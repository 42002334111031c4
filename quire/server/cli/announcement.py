"""What `quire serve` prints when ready: a first request to paste."""

from __future__ import annotations

import json
import shlex
import ssl
from pathlib import Path
from urllib.parse import urlsplit

from quire.engine import VERSION
from quire.engine.common.types import EngineInfo
from quire.server.config import ServerConfig


def listen_url(host: str, port: int | None, *, tls: bool = False) -> str:
    """`port` is None for a Unix socket."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    scheme, suffix = "https" if tls else "http", "" if port is None else f":{port}"
    return f"{scheme}://[{reachable}]{suffix}" if ":" in reachable else f"{scheme}://{reachable}{suffix}"


def display_address(config: ServerConfig, base: str) -> str:
    return base if config.uds is None else str(config.uds)


def example_path_and_body(info: EngineInfo, *, has_chat_template: bool) -> tuple[str, dict[str, object]]:
    if has_chat_template and "generate" in info.tasks:
        message = {"role": "user", "content": "Tell me a story about a fox."}
        return "/v1/chat/completions", {"messages": [message], "max_tokens": 100, "stream": True}
    if "generate" in info.tasks:
        return "/v1/completions", {"prompt": "Once upon a time", "max_tokens": 100, "stream": True}
    if "embed" in info.tasks:
        return "/v1/embeddings", {"input": "Once upon a time"}
    return "/classify", {"input": "Once upon a time"}


def curl_command(
    config: ServerConfig, info: EngineInfo, base: str, tls: ssl.SSLContext | None, *, has_chat_template: bool = False
) -> str:
    path, body = example_path_and_body(info, has_chat_template=has_chat_template)
    flags = [] if config.uds is None else [f"--unix-socket {shlex.quote(str(config.uds))}"]
    if config.has_api_keys:
        flags.append('-H "Authorization: Bearer $OPENAI_API_KEY"')
    if tls is not None:
        flags += _curl_tls_flags(config, base, tls)
    encoded_body = json.dumps({"model": config.model_names[0], **body})
    return " ".join(
        [f"curl -N {base}{path}", *flags, "-H 'Content-Type: application/json'", f"-d {shlex.quote(encoded_body)}"]
    )


def _curl_tls_flags(config: ServerConfig, base: str, tls: ssl.SSLContext) -> list[str]:
    host, flags = urlsplit(base).hostname or "", []
    if not _is_certificate_trusted(tls, host, None):
        certificate = config.ssl_certfile
        assert certificate is not None, "there is TLS"
        flags = (
            [f"--cacert {shlex.quote(str(certificate))}"]
            if _is_certificate_trusted(tls, host, certificate)
            else ["--insecure"]
        )
    if config.ssl_ca_certs is not None:
        flags.append("--cert YOURS.pem")
    return flags


def _is_certificate_trusted(tls: ssl.SSLContext, host: str, trust: Path | None) -> bool:
    client = ssl.create_default_context(cafile=trust)
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    down, up = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (client.wrap_bio(down, up, server_hostname=host), tls.wrap_bio(up, down, server_side=True))
    done = [False, False]
    for _ in range(4):
        for place, side in enumerate(sides):
            try:
                side.do_handshake()
                done[place] = True
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError:
                return done[0]  # the server may still require a client certificate
    return done[0]


def build_announcement(
    config: ServerConfig,
    info: EngineInfo,
    base: str,
    seconds: float,
    planned_tokens: int | None = None,
    *,
    tool_format_source: str = "",
    tls: ssl.SSLContext | None = None,
    has_chat_template: bool = False,
) -> str:
    names = ", ".join(config.model_names)
    weights = f"{info.weight_bytes / 2**20:.1f} MiB" + (f" ({info.quantization})" if info.quantization else "")
    notes = "".join(f"\n  note       {note}" for note in info.notes)
    plan = ""
    if planned_tokens:
        available_tokens = info.num_blocks * info.block_size
        plan = (
            f"\n  plan       {planned_tokens:,} tokens of KV foreseen, "
            f"{available_tokens:,} are there ({available_tokens / planned_tokens - 1:+.1%})"
        )
    calls = f"\n  tools      {tool_format_source}" if tool_format_source and "generate" in info.tasks else ""
    return f"""\
quire {VERSION}
  model      {names}: {info.dtype} on {info.device}, {weights} loaded in {info.load_seconds:.1f} s
  attention  {info.backend}{notes}
  memory     {info.arithmetic}{plan}{calls}
  ready      {display_address(config, base)} after {seconds:.1f} s; Ctrl-C ends it

{curl_command(config, info, base, tls, has_chat_template=has_chat_template)}
"""
