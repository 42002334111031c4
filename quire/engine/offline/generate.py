"""From a task to its outputs, over the engine client."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace

from quire.engine.errors import EngineError
from quire.engine.link.client import EngineClient
from quire.engine.link.output_stream import OutputStream
from quire.engine.offline.model import Task
from quire.engine.offline.outputs import Answer, RequestMetrics, RequestOutput, as_dict, metrics_of
from quire.engine.offline.params import RequestOutputKind
from quire.engine.offline.receipts import Receipts
from quire.engine.receipts.receipt import ChoiceReceipt, first_tokens
from quire.engine.text.tokenizer import Tokenizer
from quire.engine.types import EngineCoreRequest


async def generate(
    client: EngineClient, tokenizer: Tokenizer, task: Task, receipts: Receipts | None = None
) -> AsyncGenerator[RequestOutput]:
    """Submit a task; yields outputs as its kind says, the last one finished, with a receipt if there are `receipts`.
    Closing the iterator aborts it.

    Raises EngineError when the engine fails it.
    """
    params = task.params
    requests = _requests(task)
    names = [each.id for each in requests]
    answers = {
        name: Answer(tokenizer, task.prompt.ids, params, index, detokenize=task.detokenize)
        for index, name in enumerate(names)
    }
    found = RequestOutput(task.id, task.prompt.text, task.prompt.ids, [])
    records = {each.id: ChoiceReceipt(index=index, seed=each.seed) for index, each in enumerate(requests)}
    stream = client.submit(requests, task.id)
    stream.versions = {}
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
                records[output.id].take(output, len(news[-1].token_ids))
                if news[-1].finished():
                    stream.abort(output.id)  # which a stop string has ended, while the engine goes on
            if task.kind is RequestOutputKind.FINAL_ONLY:
                continue
            found.finished = all(answer.whole.finished() for answer in answers.values())
            if found.finished:
                await _tell_ended(found, task, stream, records, answers, receipts)
                found.metrics = _metrics(client, names[0])
            delta = task.kind is RequestOutputKind.DELTA
            yield replace(found, outputs=news if delta else [answer.copied() for answer in answers.values()])
    finally:
        stream.close()
    if task.kind is RequestOutputKind.FINAL_ONLY:
        await _tell_ended(found, task, stream, records, answers, receipts)
        found.finished, found.metrics = True, _metrics(client, names[0])
        found.outputs = [answer.whole for answer in answers.values()]
        yield found


def _requests(task: Task) -> list[EngineCoreRequest]:
    """One for each choice."""
    return [
        EngineCoreRequest(
            id=f"{task.id}-{index}",
            prompt_ids=task.prompt.ids,
            params=task.params,
            seed=task.params.choice_seed(index),
            adapter=task.adapter,
            priority=task.priority,
            spans=task.prompt.spans,
            images=task.prompt.images,
        )
        for index in range(task.params.n)
    ]


async def _tell_ended(
    found: RequestOutput,
    task: Task,
    stream: OutputStream,
    records: Mapping[str, ChoiceReceipt],
    answers: Mapping[str, Answer],
    receipts: Receipts | None,
) -> None:
    """Which weights computed which tokens, and the receipt."""
    assert stream.versions is not None
    for name, record in records.items():
        record.versions = first_tokens(stream.versions.get(name, []), len(record.token_ids))
        answers[name].whole.weights_versions = list(record.versions)
        record.finish_reason = answers[name].whole.finish_reason or ""
    if receipts is not None:
        found.receipt = await receipts.of(task, list(records.values()))


def _metrics(client: EngineClient, name: str) -> RequestMetrics | None:
    timeline = client.history.find(name)
    return None if timeline is None else metrics_of(timeline)
