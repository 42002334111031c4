from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from quire.engine.checkpoint.pooling import PoolingConfig
from quire.engine.client.engine_client import EngineClient
from quire.engine.common import random_source
from quire.engine.common.errors import EngineError, InvalidRequest, check_task
from quire.engine.common.request_params import PoolingParams
from quire.engine.common.types import Adapter, EngineCoreRequest, EngineInfo
from quire.engine.text.pooling_inputs import encode_pairs_with_second_start, encode_reranker_prompts
from quire.engine.text.tokenizer import Tokenizer


@dataclass(slots=True)
class PoolingOutput:
    data: np.ndarray
    """float32 [size], or [tokens, size] if each token has a vector."""

    @property
    def embedding(self) -> list[float]:
        values: list[float] = self.data.tolist()
        return values

    probs = embedding

    @property
    def score(self) -> float:
        return float(self.data[0])


@dataclass(slots=True)
class PoolingRequestOutput:
    """Result for a prompt or a pair of texts. If two embeddings were compared, `prompt` is None and `prompt_token_ids`
    is empty.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: PoolingOutput
    num_cached_tokens: int = 0
    request_id: str = ""
    """Set for requests of `LLMEngine.add_request`."""
    finished: bool = True


def check_pooling_params(params: Sequence[PoolingParams], info: EngineInfo, pooling: PoolingConfig) -> None:
    """Raises InvalidRequest."""
    for one in params:
        check_task(one.task, info.tasks)
        if one.dimensions is not None and one.dimensions > pooling.vector_size:
            message = f"dimensions must be at most the model's {pooling.vector_size}, got {one.dimensions}"
            raise InvalidRequest(message, param="dimensions")


def encode_pairs_with_pooling_params(
    tokenizer: Tokenizer,
    pooling: PoolingConfig,
    pairs: Sequence[tuple[str, str]],
    instruction: str | None,
    limit: int | None,
) -> tuple[list[list[int]], list[PoolingParams]]:
    """A pair's score is that of the only label. Raises InvalidRequest for several labels, or a too low `limit`."""
    if pooling.classifier_tokens is not None:
        prompts = encode_reranker_prompts(tokenizer, pairs, instruction, limit)
        return prompts, [PoolingParams(task="classify")] * len(prompts)
    if len(pooling.labels) != 1:
        raise InvalidRequest(f"the model classifies {len(pooling.labels)} labels and gives no score", param="model")
    encoded = encode_pairs_with_second_start(tokenizer, pairs, limit)
    return [ids for ids, _ in encoded], [PoolingParams(task="classify", second_segment=begin) for _, begin in encoded]


def cosine_similarity(first: PoolingOutput, second: PoolingOutput) -> PoolingOutput:
    a, b = first.data.astype(np.float64), second.data.astype(np.float64)
    return PoolingOutput(np.array([a @ b / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-24)]))


async def pool_prompts(
    client: EngineClient,
    prompts: Sequence[tuple[str | None, list[int]]],
    params: Sequence[PoolingParams],
    adapters: Sequence[Adapter | None],
    done: Callable[[], None],
    pooling: PoolingConfig,
) -> list[PoolingRequestOutput]:
    """`prompts`: (text or None, token ids). `done` is called after each prompt. Raises EngineError."""
    if not prompts:
        return []
    name = random_source.token_hex(8)
    requests = [
        EngineCoreRequest(id=f"{name}-{index}", prompt_ids=ids, params=one, seed=0, adapter=adapter)
        for index, ((_, ids), one, adapter) in enumerate(zip(prompts, params, adapters, strict=True))
    ]
    outputs_by_id: dict[str, PoolingRequestOutput] = {}
    prompts_by_id = {request.id: prompt for request, prompt in zip(requests, prompts, strict=True)}
    stream = client.submit(requests)
    try:
        async for outputs in stream:
            for output in outputs:
                if output.vector is None:
                    raise EngineError(output.error or "the request was aborted")
                data = np.frombuffer(output.vector, dtype="<f4")
                tokens = len(prompts_by_id[output.id][1])
                vector = PoolingOutput(data.reshape(tokens, -1) if pooling.pooling_type == "none" else data)
                outputs_by_id[output.id] = PoolingRequestOutput(*prompts_by_id[output.id], vector, output.cached_tokens)
                done()
    finally:
        stream.close()
    return [outputs_by_id[request.id] for request in requests]
