"""The bodies of /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM takes them."""

from __future__ import annotations

from pydantic import Field

from quire.server.protocol.common import RequestBody


class LoadAdapterRequest(RequestBody):
    lora_name: str = Field(max_length=1024)
    lora_path: str = Field(max_length=4096)
    """A folder as PEFT writes it, or a hub id."""
    load_inplace: bool = False
    """The name may be served already; its new content takes the place of the old."""


class UnloadAdapterRequest(RequestBody):
    lora_name: str = Field(max_length=1024)
    lora_int_id: int | None = None
    """Without effect: names are enough."""
