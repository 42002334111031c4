from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quire.engine.client.output_stream import OutputSource
from quire.engine.common import clock
from quire.engine.common.errors import EngineError, QueueTimeout, Timeout
from quire.engine.common.request_params import PoolingParams
from quire.engine.common.types import EngineCoreOutput, EngineCoreRequest, Image, MediaSpan
from quire.server.generation.resolved_request import ResolvedRequest

if TYPE_CHECKING:
    from quire.server.observe.metrics import Metrics


@dataclass(frozen=True, slots=True)
class VectorInput:
    ids: list[int]
    params: PoolingParams
    spans: tuple[MediaSpan, ...] = ()
    images: tuple[Image, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorRequest(ResolvedRequest):
    inputs: Sequence[VectorInput]
    write_body: VectorBodyWriter

    @property
    def num_prompts(self) -> int:
        return len(self.inputs)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(each.ids) for each in self.inputs)

    def engine_requests(self) -> list[EngineCoreRequest]:
        caller = self.authorized_caller
        return [
            EngineCoreRequest(
                id=f"{self.id}-{index}",
                prompt_ids=each.ids,
                params=each.params,
                spans=each.spans,
                images=each.images,
                seed=0,
                cache_salt=caller.cache_salt,
                priority=caller.priority,
                tenant=caller.tenant,
                adapter=caller.adapter,
                weight=caller.weight,
            )
            for index, each in enumerate(self.inputs)
        ]


VectorBodyWriter = Callable[[VectorRequest, str, Sequence[np.ndarray]], bytes]
"""Makes JSON from the request, the last vector's weights version, and a float32 vector per input."""


class VectorGeneration:
    def __init__(self, request: VectorRequest, outputs: OutputSource, metrics: Metrics) -> None:
        """`outputs` belong to `request.engine_requests()`."""
        self._metrics = metrics
        self._start_time = clock.monotonic()
        self._open_prompt_tokens = {f"{request.id}-{index}": len(each.ids) for index, each in enumerate(request.inputs)}
        self._request_ids = list(self._open_prompt_tokens)
        self._outputs = outputs

    async def collect_vectors(self) -> list[np.ndarray] | None:
        """Returns the vectors in input order, or None if some inputs were aborted. Raises EngineError, Timeout,
        QueueTimeout.
        """
        vectors_by_id: dict[str, np.ndarray] = {}
        try:
            async for outputs in self._outputs:
                for output in outputs:
                    self._record_end_or_raise(output)
                    if output.vector is not None:
                        vectors_by_id[output.id] = np.frombuffer(output.vector, dtype="<f4")
        except EngineError:
            self._record_end_of_open_requests("error")
            raise
        except (Timeout, QueueTimeout) as error:
            self._record_end_of_open_requests(error.param or "timeout")
            raise
        finally:
            self.close()
        return [vectors_by_id[id] for id in self._request_ids] if len(vectors_by_id) == len(self._request_ids) else None

    @property
    def weights_version(self) -> str:
        return self._outputs.weights_version

    def close(self) -> None:
        self._outputs.close()
        self._record_end_of_open_requests("abort")

    def _record_end_or_raise(self, output: EngineCoreOutput) -> None:
        if output.finish_reason is not None and output.id in self._open_prompt_tokens:
            self._record_ended_request(output.id, output.finish_reason)
        if output.finish_reason == "error":
            raise EngineError(output.error or "the engine failed this request")

    def _record_end_of_open_requests(self, reason: str) -> None:
        for id in list(self._open_prompt_tokens):
            self._record_ended_request(id, reason)

    def _record_ended_request(self, id: str, reason: str) -> None:
        self._metrics.observe_finished_choice(
            reason,
            seconds=clock.monotonic() - self._start_time,
            decode_seconds=0.0,
            prompt_tokens=self._open_prompt_tokens.pop(id),
            generation_tokens=0,
            max_tokens=None,
        )
