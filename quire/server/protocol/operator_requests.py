"""Bodies of /update_weights, /init_weights_group, /collective_rpc, and of adapters, as in vLLM."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from quire.engine.common.errors import InvalidRequest
from quire.server.protocol.request_bodies import RequestBody


class BroadcastTensor(RequestBody):
    name: Annotated[str, Field(min_length=1, max_length=1000)]
    dtype: Literal["float32", "bfloat16", "float16"]
    shape: Annotated[list[Annotated[int, Field(ge=1, le=2**31)]], Field(max_length=8)]


class UpdateWeightsRequest(RequestBody):
    path: Annotated[str, Field(max_length=4096)] | None = None
    """Safetensors folder or GGUF file."""
    tensors: Annotated[list[BroadcastTensor], Field(min_length=1, max_length=2**17)] | None = None
    """Alternative to path: rank 0 broadcasts these tensors next, in this order."""
    last: bool = True
    mode: Literal["keep", "wait", "abort"] = "keep"
    """Open requests continue with the new weights (keep), finish first (wait), or end (abort)."""
    version: Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,100}$")] | None = None


class WeightsGroupRequest(RequestBody):
    master_address: Annotated[str, Field(pattern=r"^[0-9A-Za-z.:_-]{1,255}$")]
    """Rank 0, the sender, listens there."""
    master_port: Annotated[int, Field(ge=1, le=65535)]
    rank: Annotated[int, Field(ge=1, le=65535)] = 1
    world_size: Annotated[int, Field(ge=2, le=65536)] = 2
    backend: Literal["gloo", "nccl"] = "gloo"
    timeout: Annotated[float, Field(gt=0, le=3600)] = 300.0
    """Seconds to wait for members at each step."""


class CallRequest(RequestBody):
    method: Annotated[str, Field(max_length=200)]
    args: list[Any] = Field(default_factory=list)
    timeout: Annotated[float, Field(gt=0, le=3600)] | None = None

    @property
    def call_kwargs(self) -> dict[str, Any]:
        """Raises InvalidRequest."""
        kwargs = (self.model_extra or {}).get("kwargs", {})  # a pydantic field cannot have this name
        if not isinstance(kwargs, dict):
            raise InvalidRequest("kwargs: must be an object", param="kwargs")
        return kwargs


class LoadAdapterRequest(RequestBody):
    lora_name: str = Field(max_length=1024)
    lora_path: str = Field(max_length=4096)
    load_inplace: bool = False


class UnloadAdapterRequest(RequestBody):
    lora_name: str = Field(max_length=1024)
    lora_int_id: int | None = None
    """Has no effect."""
