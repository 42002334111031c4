from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from quire.engine.common.errors import QuireError
from quire.engine.common.types import EngineCoreOutput

Versions = list[tuple[str, int]]
"""(version, number of tokens) in order."""


def add_tokens(versions: Versions, version: str, count: int) -> None:
    if not count:
        return
    if versions and versions[-1][0] == version:
        count += versions.pop()[1]
    versions.append((version, count))


class OutputSink(Protocol):
    """It takes outputs in place of a waiting reader, and so saves waking it."""

    def can_take_outputs(self) -> bool:
        """False if the reader must get the next outputs."""

    def take_outputs(self, outputs: list[EngineCoreOutput]) -> None:
        """Errors raised here go to the reader."""


class OutputSource(ABC):
    """Outputs of a group of requests, in order of arrival; at most one per request and iteration. Ends when all
    requests have ended, or raises their error. Call `close` to stop reading.
    """

    @property
    def is_replaying(self) -> bool:
        return False

    @property
    def needs_engine(self) -> bool:
        """False if an earlier attempt computed all outputs."""
        return True

    @property
    @abstractmethod
    def sink(self) -> OutputSink | None:
        """Receives outputs that arrive while the reader waits, except the output that ends the last request."""

    @sink.setter
    @abstractmethod
    def sink(self, sink: OutputSink | None) -> None: ...

    @property
    @abstractmethod
    def weights_version(self) -> str:
        """Version that computed the last token or vector, unread ones included."""

    @abstractmethod
    def record_versions(self) -> dict[str, Versions]:
        """Start recording. Returns the growing record, by request id."""

    def __aiter__(self) -> OutputSource:
        return self

    @abstractmethod
    async def __anext__(self) -> list[EngineCoreOutput]: ...

    @abstractmethod
    def abort(self, request_id: str, reason: str = "abort") -> None:
        """End one request now; it gives no more outputs. `reason` goes into its history."""

    @abstractmethod
    def give_up(self, error: QuireError) -> bool:
        """Abort all running requests; the reader gets `error` after the pending outputs.

        Returns False and does nothing if all requests have ended.
        """

    @abstractmethod
    def close(self) -> None:
        """Abort all running requests."""


class WrappedOutputs(OutputSource):
    def __init__(self, outputs: OutputSource) -> None:
        self._outputs = outputs
        self._sink: OutputSink | None = None

    @property
    def is_replaying(self) -> bool:
        return self._outputs.is_replaying

    @property
    def needs_engine(self) -> bool:
        return self._outputs.needs_engine

    @property
    def sink(self) -> OutputSink | None:
        return self._sink

    @sink.setter
    def sink(self, sink: OutputSink | None) -> None:
        """This wrapper becomes the inner source's sink, and passes outputs on with `take_outputs`."""
        self._sink = sink
        self._outputs.sink = None if sink is None else self

    def can_take_outputs(self) -> bool:
        return self._sink is not None and self._sink.can_take_outputs()

    def take_outputs(self, outputs: list[EngineCoreOutput]) -> None:
        assert self._sink is not None
        self._sink.take_outputs(outputs)

    @property
    def weights_version(self) -> str:
        return self._outputs.weights_version

    def record_versions(self) -> dict[str, Versions]:
        return self._outputs.record_versions()

    async def __anext__(self) -> list[EngineCoreOutput]:
        return await self._outputs.__anext__()

    def abort(self, request_id: str, reason: str = "abort") -> None:
        self._outputs.abort(request_id, reason)

    def give_up(self, error: QuireError) -> bool:
        return self._outputs.give_up(error)

    def close(self) -> None:
        self._outputs.close()
