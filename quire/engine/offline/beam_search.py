from __future__ import annotations

from collections.abc import Sequence

from quire.engine.client.engine_client import EngineClient
from quire.engine.common.errors import EngineError
from quire.engine.common.request_params import SamplingParams
from quire.engine.common.types import Adapter, EngineCoreOutput, EngineCoreRequest, FinishReason
from quire.engine.offline.offline_model import EncodedPrompt
from quire.engine.offline.outputs import BeamSearchOutput, BeamSearchSequence, CompletionBuilder, logprobs_by_token
from quire.engine.offline.params import BeamSearchParams
from quire.engine.text.beams import Beam, BeamSearchState
from quire.engine.text.detokenizer import without_partial_character
from quire.engine.text.tokenizer import Tokenizer


async def beam_search_prompt(
    client: EngineClient,
    tokenizer: Tokenizer,
    id: str,
    prompt: EncodedPrompt,
    adapter: Adapter | None,
    params: BeamSearchParams,
    max_model_len: int,
) -> BeamSearchOutput:
    """`max_model_len` limits the tokens of prompt and answer. Raises EngineError."""
    beam_width, max_tokens = params.beam_width, min(max_model_len - len(prompt.token_ids), params.max_tokens)
    stop_token_ids = frozenset(() if params.ignore_eos else tokenizer.eos_token_ids)
    search = BeamSearchState(beam_width, beam_width, stop_token_ids, params.length_penalty, max_tokens)
    for step in range(max_tokens):
        if not search.advance_and_check_running(
            await _generate_next_tokens(client, f"{id}-{step}", prompt, adapter, search.running_beams, 2 * beam_width)
        ):
            break
    return BeamSearchOutput([_beam_to_sequence(tokenizer, prompt, beam) for beam in search.best_beams_so_far])


async def _generate_next_tokens(
    client: EngineClient,
    name: str,
    prompt: EncodedPrompt,
    adapter: Adapter | None,
    beams: Sequence[Beam],
    num_logprobs: int,
) -> list[EngineCoreOutput]:
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=num_logprobs, ignore_eos=True)
    requests = [
        EngineCoreRequest(
            id=f"{name}-{index}",
            prompt_ids=[*prompt.token_ids, *beam.token_ids],
            params=params,
            seed=0,
            adapter=adapter,
            spans=prompt.spans,
            images=prompt.images,
        )
        for index, beam in enumerate(beams)
    ]
    outputs_by_id: dict[str, EngineCoreOutput] = {}
    stream = client.submit(requests)
    try:
        async for outputs in stream:
            for output in outputs:
                if output.error is not None or output.logprobs is None:
                    raise EngineError(output.error or "the request was aborted")
                outputs_by_id[output.id] = output
    finally:
        stream.close()
    return [outputs_by_id[request.id] for request in requests]


def _beam_to_sequence(tokenizer: Tokenizer, prompt: EncodedPrompt, beam: Beam) -> BeamSearchSequence:
    prompt_ids = prompt.token_ids
    text = (
        without_partial_character(tokenizer, prompt_ids, tokenizer.decode(prompt_ids))
        if prompt.text is None
        else prompt.text
    )
    answer = CompletionBuilder(tokenizer, prompt_ids, SamplingParams(), 0, detokenize=True)
    reason: FinishReason = "stop" if beam.is_finished else "length"
    answer.add_output_and_get_delta(EngineCoreOutput("", list(beam.token_ids), finish_reason=reason))
    return BeamSearchSequence(
        tokens=[*prompt_ids, *beam.token_ids],
        logprobs=[logprobs_by_token(each, tokenizer) for each in beam.logprobs],
        cum_logprob=beam.cumulative_logprob,
        text=text + answer.completion.text,
        finish_reason=reason,
        stop_reason=beam.token_ids[-1] if beam.is_finished else None,
    )
