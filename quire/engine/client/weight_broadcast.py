"""Receives weights that are broadcast in a torch.distributed group. A separate process (worker/weight_receiver.py)
writes them to files in memory, which weights.py loads.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL
from typing import Any, Concatenate, NamedTuple, ParamSpec

from quire.engine.client.weights import Mode, WeightChanges, to_its_end
from quire.engine.common.errors import EngineError, InvalidRequest, QuireError
from quire.engine.common.weight_receiver import WeightReceiverMethods
from quire.engine.processes.child import Child, module
from quire.engine.processes.frames import encode_frame, receive_frame
from quire.engine.processes.utility_calls import decode_result, decode_utility_result, make_call

P = ParamSpec("P")
_MEMORY = Path("/dev/shm")
_LEEWAY_SECONDS = 30.0
"""If a call takes this much longer than the group's timeout, the receiver is considered hung."""
_NO_GROUP = "there is no process group: call /init_weights_group first"


class Group(NamedTuple):
    """The sender is rank 0."""

    address: str
    port: int
    rank: int
    world_size: int
    backend: str
    """"gloo", or "nccl" on NVIDIA GPUs."""
    timeout: float
    """Seconds to wait for other members in each operation."""


class Tensor(NamedTuple):
    name: str
    dtype: str
    """"float32", "bfloat16" or "float16"."""
    shape: Sequence[int]


class WeightsGroup:
    """Only one group exists at a time. Call all methods from the client's event loop. Calls run one by one, and
    complete even if nobody awaits them.
    """

    def __init__(self, weights: WeightChanges) -> None:
        self.weights = weights
        self._process: Child | None = None
        self._connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._group: Group | None = None
        self._turn = asyncio.Lock()
        self._root: Path | None = None
        """The receiver removes it when this process is gone."""
        self._folders = 0
        self._partial: Path | None = None
        self._served: Path | None = None

    async def join(self, group: Group) -> None:
        """Raises InvalidRequest if a member is missing."""

        async def join_group() -> None:
            await self._forget()
            self._group = group
            try:
                await self._call(WeightReceiverMethods.join, *group)
            except QuireError:
                self._group = None
                raise

        await to_its_end(self._turn, join_group())

    async def leave(self) -> None:
        """Weights that were loaded stay in use; an incomplete model is dropped."""

        async def leave_group() -> None:
            if self._group is not None:
                await self._forget()
                await self._call(WeightReceiverMethods.leave)
                self._group = None

        await to_its_end(self._turn, leave_group())

    async def receive(self, tensors: Sequence[Tensor]) -> None:
        """If the group breaks, raises InvalidRequest, and the old weights stay in use."""

        async def receive_tensors() -> None:
            if self._group is None:
                raise InvalidRequest(_NO_GROUP, param="tensors")
            if self._partial is None:
                self._folders += 1
                self._partial = self._folder() / str(self._folders)
            try:
                fields = [(each.name, each.dtype, [*each.shape]) for each in tensors]
                await self._call(WeightReceiverMethods.receive, str(self._partial), fields)
            except QuireError:
                await self._forget()
                self._group = None
                raise

        await to_its_end(self._turn, receive_tensors())

    async def serve(self, mode: Mode = "keep", version: str | None = None) -> str:
        """Loads the weights received since the last call. Raises the errors of Weights.update."""

        async def serve_weights() -> str:
            if self._partial is None:
                raise InvalidRequest("no tensor was received", param="tensors")
            folder = self._partial
            await self._call(WeightReceiverMethods.finish, str(folder))
            self._partial = None
            try:
                name = await self.weights.update(str(folder), mode, version)
            except QuireError:
                await _remove(folder)
                raise
            if self._served is not None:
                await _remove(self._served)
            self._served = folder
            return name

        return await to_its_end(self._turn, serve_weights())

    async def close(self) -> None:
        """Call it only after the client has ended."""
        await self._end()
        if self._root is not None:
            await _remove(self._root)

    async def _forget(self) -> None:
        if self._partial is not None:
            folder, self._partial = self._partial, None
            await _remove(folder)

    def _folder(self) -> Path:
        if self._root is None:
            try:
                place = _MEMORY if os.access(_MEMORY, os.W_OK) else None
                self._root = Path(tempfile.mkdtemp(prefix="quire-weights-", dir=place))
            except OSError as error:
                raise EngineError(f"no folder for weights can be created: {error.strerror}") from None
        return self._root

    async def _call(self, method: Callable[Concatenate[Any, P], None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Raises InvalidRequest with the receiver's error, EngineError if it ends or hangs."""
        if method is WeightReceiverMethods.join and (self._process is None or self._process.returncode is not None):
            await self._start()
        timeout = (self._group.timeout if self._group is not None else 0.0) + _LEEWAY_SECONDS
        content = b""
        if self._connection is not None:
            reader, writer = self._connection
            with suppress(TimeoutError, OSError, asyncio.IncompleteReadError):
                writer.write(encode_frame(make_call(method, 1, *args, **kwargs)))
                content = await asyncio.wait_for(receive_frame(reader), timeout)
        if not content:
            await self._end()
            raise EngineError("the process that receives weights has ended or hung: the process group is gone")
        decode_result(method, decode_utility_result(content))

    async def _start(self) -> None:
        await self._end()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = Child(
                [*module("quire.engine.worker.weight_receiver"), str(theirs.fileno()), str(self._folder())],
                descriptors=[theirs.fileno()],
                stdout=DEVNULL,  # gloo prints there which members have joined
            )
        self._connection = await asyncio.open_connection(sock=ours)

    async def _end(self) -> None:
        if self._connection is not None:
            self._connection[1].close()
            self._connection = None
        if self._process is not None:
            await self._process.stop(0.0)
            self._process = None


async def _remove(folder: Path) -> None:
    await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
