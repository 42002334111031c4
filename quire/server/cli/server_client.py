from __future__ import annotations

import json
import os
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from quire.engine.common.errors import ConfigError, EngineError, QuireError
from quire.engine.unsupported_options import suggest_nearest

API_KEY_HINT = "--api-key KEY, or the variable OPENAI_API_KEY"


def server_flags(url: str | None, *, key: str = "api_key") -> dict[str, Any]:
    default = "" if url is None else " (default: %(default)s)"
    cacert_help = "certificate of the server or of an authority to trust in addition to the system's"
    key_help = "API key of the server; default: the variable OPENAI_API_KEY"
    return {
        "--url": {"default": url, "help": f"address of the server, such as 127.0.0.1:8000{default}"},
        "--cacert": {"type": Path, "metavar": "PEM", "help": cacert_help},
        "--api-key": {"dest": key, "metavar": "KEY", "default": os.environ.get("OPENAI_API_KEY"), "help": key_help},
    }


def normalize_server_url(text: str, *, tls: bool = False) -> str:
    """Removes /v1 from the end. Without a scheme, the URL gets https if `tls`, otherwise http. Raises ConfigError."""
    full = text if "://" in text else f"{'https' if tls else 'http'}://{text}"
    try:
        parts = urlsplit(full)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_valid = False
    if not is_valid:
        raise ConfigError(f"url: not a server's: {text!r}; it looks like http://127.0.0.1:8000", param="url")
    return full.rstrip("/").removesuffix("/v1")


def auth_headers(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def client_ssl_context(cacert: Path | None) -> ssl.SSLContext:
    """Raises ConfigError."""
    context = httpx.create_ssl_context()
    context.load_default_certs()
    if cacert is not None:
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # accepts a server's own certificate
        try:
            context.load_verify_locations(cacert)
        except (OSError, ssl.SSLError) as error:
            why = "it is not a PEM file of certificates" if isinstance(error, ssl.SSLError) else error.strerror
            raise ConfigError(f"cacert: cannot use {cacert}: {why}", param="cacert") from None
    return context


class KeyRefused(EngineError):
    """The server requires another API key."""


def error_from_response(response: httpx.Response) -> QuireError:
    """The response must have been read."""
    message = error_message(response.content) or f"HTTP {response.status_code} from {response.url}"
    if response.status_code == 401:
        return KeyRefused(f"{message} ({API_KEY_HINT})")
    return EngineError(message)


def error_message(body: bytes) -> str:
    """Reads errors in the formats of OpenAI, Anthropic, Cohere and Ollama. Returns "" for other bodies."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    error = content.get("error", content) if isinstance(content, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else ""


class ServerUnreachable(EngineError):
    """No server answers at the URL, or its certificate is not trusted."""


def unreachable_error(base: str, error: Exception) -> ServerUnreachable:
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        other = "mismatch" in str(error)
        way = "name the server as its certificate does" if other else "--cacert PEM names a certificate to trust"
        return ServerUnreachable(f"cannot trust {base}: {error}; {way}")
    way = ""
    if base.startswith("http:") and isinstance(error, httpx.RemoteProtocolError):
        way = "; a server with TLS is at https://"
    elif base.startswith("https:") and "WRONG_VERSION_NUMBER" in str(error):
        way = "; a server without TLS is at http://"
    elif isinstance(error, httpx.ConnectError):
        way = "; is it started? quire serve starts one"
    return ServerUnreachable(f"no server at {base}: {error}{way}")


def fetch_model_names(http: httpx.Client) -> list[str]:
    """The client's base URL must end in /v1. Raises EngineError."""
    try:
        response = http.get("models")
        if response.is_error:
            raise error_from_response(response)
        names = [str(each["id"]) for each in response.json()["data"]]
    except httpx.HTTPError as error:
        raise unreachable_error(str(http.base_url), error) from None
    except (ValueError, LookupError, TypeError):
        names = []
    if not names:
        raise EngineError(f"no list of models at {http.base_url}: give the model's name")
    return names


def check_model_name(served_names: list[str], name: str) -> str:
    """Raises EngineError."""
    if name not in served_names:
        raise EngineError(
            f"no model {name}; {suggest_nearest(name, served_names) or 'there are ' + ', '.join(served_names)}"
        )
    return name


def choose_model(http: httpx.Client, name: str | None) -> str:
    """Raises EngineError."""
    try:
        served_names = fetch_model_names(http)
    except ServerUnreachable:
        raise
    except EngineError:
        if name is None:
            raise
        return name  # servers need not list models
    return served_names[0] if name is None else check_model_name(served_names, name)
