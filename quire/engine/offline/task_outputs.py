from __future__ import annotations

from collections.abc import AsyncGenerator, Collection
from dataclasses import replace

from quire.engine.client.engine_client import EngineClient
from quire.engine.common.errors import EngineError
from quire.engine.common.types import EngineCoreOutput, EngineCoreRequest
from quire.engine.offline.offline_model import GenerationTask
from quire.engine.offline.outputs import (
    CompletionBuilder,
    RequestMetrics,
    RequestOutput,
    logprobs_by_token,
    make_request_metrics,
)
from quire.engine.offline.params import RequestOutputKind
from quire.engine.offline.receipt_maker import ReceiptMaker
from quire.engine.receipts.receipt_recorder import ReceiptRecorder
from quire.engine.text.tokenizer import Tokenizer


async def stream_outputs(
    client: EngineClient, tokenizer: Tokenizer, task: GenerationTask, receipts: ReceiptMaker | None = None
) -> AsyncGenerator[RequestOutput]:
    """Yield outputs of the task's kind. The last one is finished, and has a receipt if `receipts` is given. Closing the
    iterator aborts the request. Raises EngineError if the engine fails the request.
    """
    params = task.params
    requests = _make_choice_requests(task)
    names = [each.id for each in requests]
    builders = {
        name: CompletionBuilder(tokenizer, task.prompt.token_ids, params, index, detokenize=task.detokenize)
        for index, name in enumerate(names)
    }
    request_output = RequestOutput(task.id, task.prompt.text, task.prompt.token_ids, [])
    stream = ReceiptRecorder(client.submit(requests, task.id), requests)
    try:
        async for outputs in stream:
            request_output.weights_version = stream.weights_version
            new_outputs = []
            for output in outputs:
                if output.error is not None:
                    raise EngineError(output.error)
                _add_prompt_outputs(request_output, output, tokenizer)
                new_outputs.append(builders[output.id].add_output_and_get_delta(output))
                if new_outputs[-1].finished():
                    stream.abort(output.id)  # the engine would go on after a stop string
            if task.output_kind is RequestOutputKind.FINAL_ONLY:
                continue
            request_output.finished = all(builder.completion.finished() for builder in builders.values())
            if request_output.finished:
                await _add_versions_and_receipt(request_output, task, stream, builders.values(), receipts)
                request_output.metrics = _request_metrics_from_history(client, names[0])
            delta = task.output_kind is RequestOutputKind.DELTA
            yield replace(
                request_output,
                outputs=new_outputs if delta else [builder.copy_completion() for builder in builders.values()],
            )
    finally:
        stream.close()
    if task.output_kind is RequestOutputKind.FINAL_ONLY:
        await _add_versions_and_receipt(request_output, task, stream, builders.values(), receipts)
        request_output.finished, request_output.metrics = True, _request_metrics_from_history(client, names[0])
        request_output.outputs = [builder.completion for builder in builders.values()]
        yield request_output


def _make_choice_requests(task: GenerationTask) -> list[EngineCoreRequest]:
    return [
        EngineCoreRequest(
            id=f"{task.id}-{index}",
            prompt_ids=task.prompt.token_ids,
            params=task.params,
            seed=task.params.choice_seed(index),
            adapter=task.adapter,
            priority=task.priority,
            spans=task.prompt.spans,
            images=task.prompt.images,
        )
        for index in range(task.params.n)
    ]


def _add_prompt_outputs(request_output: RequestOutput, output: EngineCoreOutput, tokenizer: Tokenizer) -> None:
    if output.prompt_logprobs is not None:
        request_output.prompt_logprobs = [
            None if each is None else logprobs_by_token(each, tokenizer) for each in output.prompt_logprobs
        ]
    request_output.num_cached_tokens = max(request_output.num_cached_tokens, output.cached_tokens)
    if output.prefix is not None and output.prefix.tokens_by_reason and not request_output.num_missed_tokens:
        request_output.num_missed_tokens = output.prefix.num_missed_tokens
        request_output.miss_reason = output.prefix.tokens_by_reason[0][0]


async def _add_versions_and_receipt(
    request_output: RequestOutput,
    task: GenerationTask,
    recorder: ReceiptRecorder,
    builders: Collection[CompletionBuilder],
    receipts: ReceiptMaker | None,
) -> None:
    completions = [builder.completion for builder in builders]
    choice_receipts = recorder.choice_receipts(
        (len(completion.token_ids), completion.finish_reason or "") for completion in completions
    )
    for completion, receipt in zip(completions, choice_receipts, strict=True):
        completion.weights_versions = list(receipt.versions)
    if receipts is not None:
        request_output.receipt = await receipts.make_receipt(task, choice_receipts)


def _request_metrics_from_history(client: EngineClient, name: str) -> RequestMetrics | None:
    timeline = client.history.find_timeline(name)
    return None if timeline is None else make_request_metrics(timeline)
