"""Beam search for programs, by the rule of engine/text/beams.py."""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.errors import EngineError
from quire.engine.link.client import EngineClient
from quire.engine.offline.model import Encoded
from quire.engine.offline.outputs import Answer, BeamSearchOutput, BeamSearchSequence, as_dict
from quire.engine.offline.params import BeamSearchParams
from quire.engine.text.beams import Beam, Search
from quire.engine.text.detokenizer import without_begun
from quire.engine.text.tokenizer import Tokenizer
from quire.engine.types import Adapter, EngineCoreOutput, EngineCoreRequest, FinishReason, SamplingParams


async def beam_search(
    client: EngineClient,
    tokenizer: Tokenizer,
    id: str,
    prompt: Encoded,
    adapter: Adapter | None,
    params: BeamSearchParams,
    context: int,
) -> BeamSearchOutput:
    """The most likely continuations of a prompt. `context`: the most tokens of both. Raises EngineError."""
    width, longest = params.beam_width, min(context - len(prompt.ids), params.max_tokens)
    ends = frozenset(() if params.ignore_eos else tokenizer.eos_token_ids)
    search = Search(width, width, ends, params.length_penalty, longest)
    for step in range(longest):
        if not search.advance(await _step(client, f"{id}-{step}", prompt, adapter, search.running, 2 * width)):
            break
    return BeamSearchOutput([_sequence(tokenizer, prompt, beam) for beam in search.best])


async def _step(
    client: EngineClient, name: str, prompt: Encoded, adapter: Adapter | None, beams: Sequence[Beam], top: int
) -> list[EngineCoreOutput]:
    """One more token of every beam, with its alternatives."""
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=top, ignore_eos=True)
    requests = [
        EngineCoreRequest(
            id=f"{name}-{index}",
            prompt_ids=[*prompt.ids, *beam.ids],
            params=params,
            seed=0,
            adapter=adapter,
            spans=prompt.spans,
            images=prompt.images,
        )
        for index, beam in enumerate(beams)
    ]
    found: dict[str, EngineCoreOutput] = {}
    stream = client.submit(requests)
    try:
        async for outputs in stream:
            for output in outputs:
                if output.error is not None or output.logprobs is None:
                    raise EngineError(output.error or "the request was ended")
                found[output.id] = output
    finally:
        stream.close()
    return [found[request.id] for request in requests]


def _sequence(tokenizer: Tokenizer, prompt: Encoded, beam: Beam) -> BeamSearchSequence:
    prompt_ids = prompt.ids
    text = without_begun(tokenizer, prompt_ids, tokenizer.decode(prompt_ids)) if prompt.text is None else prompt.text
    answer = Answer(tokenizer, prompt_ids, SamplingParams(), 0, detokenize=True)
    reason: FinishReason = "stop" if beam.ended else "length"
    answer.add(EngineCoreOutput("", list(beam.ids), finish_reason=reason))
    return BeamSearchSequence(
        tokens=[*prompt_ids, *beam.ids],
        logprobs=[as_dict(each, tokenizer) for each in beam.logprobs],
        cum_logprob=beam.total,
        text=text + answer.whole.text,
        finish_reason=reason,
        stop_reason=beam.ids[-1] if beam.ended else None,
    )
