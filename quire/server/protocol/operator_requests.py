"""Bodies of the routes for operators: /update_weights, /init_weights_group, /collective_rpc, and those of adapters, as
vLLM takes them."""

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
    """A folder of safetensors files, or a GGUF file, on the server's machine."""
    tensors: Annotated[list[BroadcastTensor], Field(min_length=1, max_length=2**17)] | None = None
    """Instead of path: what rank 0 of the group broadcasts next, in this order."""
    last: bool = True
    """Whether the model is complete with these tensors, and to be served."""
    mode: Literal["keep", "wait", "abort"] = "keep"
    """What becomes of open requests: they go on with the new weights, end first, or end at once."""
    version: Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,100}$")] | None = None
    """What to call the weights; default: they are counted."""


class WeightsGroupRequest(RequestBody):
    master_address: Annotated[str, Field(pattern=r"^[0-9A-Za-z.:_-]{1,255}$")]
    """Where rank 0, which sends the weights, waits for the others."""
    master_port: Annotated[int, Field(ge=1, le=65535)]
    rank: Annotated[int, Field(ge=1, le=65535)] = 1
    """This server's."""
    world_size: Annotated[int, Field(ge=2, le=65536)] = 2
    backend: Literal["gloo", "nccl"] = "gloo"
    timeout: Annotated[float, Field(gt=0, le=3600)] = 300.0
    """Seconds to wait for the other members: at the start, and in each broadcast."""


class CallRequest(RequestBody):
    method: Annotated[str, Field(max_length=200)]
    """A name; functions come from programs alone."""
    args: list[Any] = Field(default_factory=list)
    timeout: Annotated[float, Field(gt=0, le=3600)] | None = None

    @property
    def call_kwargs(self) -> dict[str, Any]:
        """The body's kwargs. Raises InvalidRequest."""
        kwargs = (self.model_extra or {}).get("kwargs", {})  # no field can have this name
        if not isinstance(kwargs, dict):
            raise InvalidRequest("kwargs: must be an object", param="kwargs")
        return kwargs


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
