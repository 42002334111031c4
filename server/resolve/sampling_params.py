"""From a request body to the engine's SamplingParams: defaults, and limits that depend on the model."""

from __future__ import annotations

from quire.engine.errors import InvalidRequest
from quire.engine.text.bad_words import bad_words_ids
from quire.engine.types import SamplingParams
from quire.server.protocol.common import GenerationBody
from quire.server.resolve.checks import check_text, check_token_ids
from quire.server.served_model import ServedModel


def sampling_params(
    body: GenerationBody,
    model: ServedModel,
    *,
    max_tokens: int | None,
    max_tokens_name: str = "max_tokens",
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """The body's values, by default those of the model's generation_config.json.

    Raises InvalidRequest naming the parameter.
    """
    model.check_task("generate")
    defaults, max_model_len = model.sampling_defaults, model.context_length
    if max_tokens is not None and max_tokens > max_model_len:
        raise InvalidRequest(
            f"{max_tokens_name} is too large: {max_tokens}. This model's context is {max_model_len} tokens, "
            "prompt and answer together",
            param=max_tokens_name,
        )
    for name, ids in (
        ("logit_bias", body.logit_bias),
        ("stop_token_ids", body.stop_token_ids),
        ("allowed_token_ids", body.allowed_token_ids),
        ("logprob_token_ids", body.logprob_token_ids),
    ):
        check_token_ids(ids or (), model.vocab_size, name)
    if body.logprob_token_ids and logprobs is None:
        raise InvalidRequest("logprob_token_ids needs logprobs", param="logprob_token_ids")
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    for text in stop:
        check_text(text, "stop")
    named = (("cache_salt", body.cache_salt), ("session_id", body.session_id))
    for name, text in (*named, *(("bad_words", word) for word in body.bad_words)):
        check_text(text, name)
    return SamplingParams(
        n=body.n,
        temperature=_first(body.temperature, defaults.get("temperature"), 1.0),
        top_p=_first(body.top_p, defaults.get("top_p"), 1.0),
        top_k=int(_first(body.top_k, defaults.get("top_k"), 0)),
        min_p=_first(body.min_p, defaults.get("min_p"), 0.0),
        repetition_penalty=_first(body.repetition_penalty, defaults.get("repetition_penalty"), 1.0),
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=body.logit_bias or None,
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
        bad_words_ids=bad_words_ids(body.bad_words, model.tokenizer),
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        stop=stop,
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        seed=body.seed,
        logprobs=logprobs,
        logprob_token_ids=tuple(body.logprob_token_ids) or None,
        prompt_logprobs=prompt_logprobs,
        skip_special_tokens=body.skip_special_tokens,
        include_stop_str_in_output=body.include_stop_str_in_output,
    )


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)
