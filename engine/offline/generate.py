"""From a task to its outputs, over the engine client."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace

from quire.engine.errors import EngineError
from quire.engine.link.client import EngineClient
from quire.engine.offline.model import Task
from quire.engine.offline.outputs import Answer, RequestMetrics, RequestOutput, as_dict, metrics_of
from quire.engine.offline.params import RequestOutputKind
from quire.engine.text.tokenizer import Tokenizer
from quire.engine.types import Request


async def generate(client: EngineClient, tokenizer: Tokenizer, task: Task) -> AsyncGenerator[RequestOutput]:
    """Submit a task; yields outputs as its kind says, the last one finished. Closing the iterator aborts it.

    Raises EngineError when the engine fails it.
    """
    params = task.params
    names = [f"{task.id}-{index}" for index in range(params.n)]
    requests = [
        Request(
            id=name,
            prompt_ids=task.prompt_ids,
            params=params,
            seed=params.choice_seed(index),
            adapter=task.adapter,
            priority=task.priority,
            spans=task.spans,
            images=task.images,
        )
        for index, name in enumerate(names)
    ]
    answers = {
        name: Answer(tokenizer, task.prompt_ids, params, index, detokenize=task.detokenize)
        for index, name in enumerate(names)
    }
    found = RequestOutput(task.id, task.prompt, task.prompt_ids, [])
    stream = client.submit(requests, task.id)
    try:
        async for outputs in stream:
            found.weights_version = stream.weights_version
            news = []
            for output in outputs:
                if output.error is not None:
                    raise EngineError(output.error)
                if output.prompt_logprobs is not None:
                    found.prompt_logprobs = [
                        None if each is None else as_dict(each, tokenizer) for each in output.prompt_logprobs
                    ]
                found.num_cached_tokens = max(found.num_cached_tokens, output.cached_tokens)
                if output.prefix is not None and output.prefix.missed and not found.num_missed_tokens:
                    found.num_missed_tokens = output.prefix.missed_tokens
                    found.miss_reason = output.prefix.missed[0][0]
                news.append(answers[output.id].add(output))
                if news[-1].finished():
                    stream.abort(output.id)  # which a stop string has ended, while the engine goes on
            if task.kind is RequestOutputKind.FINAL_ONLY:
                continue
            found.finished = all(answer.whole.finished() for answer in answers.values())
            found.metrics = _metrics(client, names[0]) if found.finished else None
            delta = task.kind is RequestOutputKind.DELTA
            yield replace(found, outputs=news if delta else [answer.copied() for answer in answers.values()])
    finally:
        stream.close()
    if task.kind is RequestOutputKind.FINAL_ONLY:
        found.finished, found.metrics = True, _metrics(client, names[0])
        found.outputs = [answer.whole for answer in answers.values()]
        yield found


def _metrics(client: EngineClient, name: str) -> RequestMetrics | None:
    timeline = client.history.find(name)
    return None if timeline is None else metrics_of(timeline)
