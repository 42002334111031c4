from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import msgspec

from quire.engine.client.engine_client import EngineClient
from quire.engine.common.errors import EngineError, InvalidRequest
from quire.engine.common.types import Adapter, EngineCoreRequest, Image, MediaSpan
from quire.engine.receipts.receipt import (
    ChoiceReceipt,
    ComputeInfo,
    PromptReceipt,
    Receipt,
    ReceiptHashes,
    logprob_values,
)
from quire.engine.text.tokenizer import Tokenizer

ReplayOutcome = Literal["equal", "different", "refused"]


@dataclass(frozen=True, slots=True)
class ReplayVerdict:
    id: str
    outcome: ReplayOutcome
    what: str
    """The first difference, the reason of refusal, or what was compared."""
    tokens: int = 0
    """Number of tokens that were computed again and compared."""
    warning: str = ""


@dataclass(frozen=True, slots=True)
class ReplayModel:
    hashes: ReceiptHashes
    """Hashes with exactly one version of the weights."""
    computed: ComputeInfo
    tokenizer: Tokenizer
    max_model_len: int
    vocab_size: int
    adapters: Mapping[str, Adapter]
    """Adapters keyed by digest."""
    images: Mapping[str, Image]
    """Images keyed by hexadecimal digest."""

    @property
    def weights_digest(self) -> str | None:
        (digest,) = self.hashes.weights.values()
        return digest


@dataclass(frozen=True, slots=True)
class ReplaySegment:
    """Tokens [begin, end), computed by one version of the weights."""

    choice: ChoiceReceipt
    begin: int
    end: int


async def replay_receipt(receipt: Receipt, model: ReplayModel, client: EngineClient) -> ReplayVerdict:
    """Recompute what the model's weights computed. Raises EngineError."""
    if (why := refusal_reason(receipt, model)) is not None:
        return ReplayVerdict(receipt.id, "refused", why)
    segments, num_other_tokens = select_segments_of_weights(receipt, model.weights_digest)
    warning = compute_difference_warning(receipt, model)
    num_compared = 0
    for segment in segments:
        try:
            difference = await _replay_and_compare_segment(receipt, segment, model, client)
        except InvalidRequest as error:
            return ReplayVerdict(receipt.id, "refused", error.message, num_compared, warning)
        if difference is not None:
            return ReplayVerdict(receipt.id, "different", difference, num_compared, warning)
        num_compared += segment.end - segment.begin
    if not num_compared:
        return ReplayVerdict(receipt.id, "refused", "nothing was compared: its answers have no tokens of these weights")
    extra_kinds = [] if receipt.choices[:1] and receipt.choices[0].logprobs is None else ["log probabilities"]
    what = " and ".join([f"{num_compared} tokens", *extra_kinds])
    if num_other_tokens:
        what += f"; {num_other_tokens} more are of other weights: replay it on those too"
    return ReplayVerdict(receipt.id, "equal", what, num_compared, warning)


def refusal_reason(receipt: Receipt, model: ReplayModel) -> str | None:
    """None: the model can recompute these answers."""
    if receipt.irreproducible:
        return receipt.irreproducible
    different_files = [
        name for name in ("config", "tokenizer") if getattr(receipt.hashes, name) != getattr(model.hashes, name)
    ]
    if different_files:
        files = {"config": "config.json", "tokenizer": "the tokenizer"}
        return f"{' and '.join(files[name] for name in different_files)} of this model differ from the receipt's"
    recorded_weights = receipt.hashes.weights
    if model.weights_digest is None or model.weights_digest not in recorded_weights.values():
        recorded_names = ", ".join(each or "some that were in no file" for each in recorded_weights.values())
        return f"the weights differ: the answer was computed by {recorded_names}; this model has {model.weights_digest}"
    if receipt.adapter is not None and receipt.adapter.digest not in model.adapters:
        return f"the adapter {receipt.adapter.name} ({receipt.adapter.digest}) was not given: --adapter FOLDER"
    digests = {digest for prompt in receipt.prompts for _, _, digest in prompt.images}
    if missing_images := sorted(digests - model.images.keys()):
        why = f"it has images, of which a receipt has only the hashes ({missing_images[0]})"
        return f"{why}: --image FILE, or images of LLM.replay, gives their pixels"
    invalid_token_id = next((id for id in all_receipt_token_ids(receipt) if not 0 <= id < model.vocab_size), None)
    if invalid_token_id is not None:
        return f"its token id {invalid_token_id} is outside this model's vocabulary of {model.vocab_size}"
    if any(not 0 <= choice.seed < 2**63 for choice in receipt.choices):
        return "it has a seed of more than 63 bits"
    if any(not _has_valid_image_spans(prompt) for prompt in receipt.prompts):
        return "its images do not stand within its prompts"
    if not all(receipt.choice_prompt(each).ids for each in receipt.choices):
        return "it has a prompt without tokens"
    longest = max((len(receipt.choice_prompt(each).ids) + len(each.token_ids) for each in receipt.choices), default=0)
    if longest > model.max_model_len:
        return f"max_model_len: it has {longest} tokens, and this model's context {model.max_model_len}"
    return None


def all_receipt_token_ids(receipt: Receipt) -> Iterator[int]:
    params = receipt.params
    yield from chain.from_iterable(prompt.ids for prompt in receipt.prompts)
    yield from chain.from_iterable(choice.token_ids for choice in receipt.choices)
    yield from chain.from_iterable(params.bad_words_ids)
    if params.thinking is not None:
        yield params.thinking.end_id
        if params.thinking.begin_id is not None:
            yield params.thinking.begin_id
    for ids in (params.logit_bias, params.allowed_token_ids, params.stop_token_ids, params.logprob_token_ids):
        yield from ids or ()


def _has_valid_image_spans(prompt: PromptReceipt) -> bool:
    """They must not overlap."""
    end = 0
    for start, count, _ in sorted(prompt.images):
        if start < end or count < 1:
            return False
        end = start + count
    return end <= len(prompt.ids)


def compute_difference_warning(receipt: Receipt, model: ReplayModel) -> str:
    """ "" if nothing that may change bits differs."""
    recorded, current = msgspec.structs.asdict(receipt.computed), msgspec.structs.asdict(model.computed)
    differ = [
        f"{name} was {recorded[name]}, is {current[name]}" for name in recorded if recorded[name] != current[name]
    ]
    notes = [] if receipt.computed.deterministic else ["its tokens may have depended on other requests"]
    return "; ".join([*differ, *notes])


def select_segments_of_weights(receipt: Receipt, weights: str | None) -> tuple[list[ReplaySegment], int]:
    """Return the segments, and the number of tokens that other weights computed."""
    segments, num_other_tokens = [], 0
    for choice in receipt.choices:
        begin = 0
        for version, count in choice.versions:
            if receipt.hashes.weights.get(version) == weights:
                segments.append(ReplaySegment(choice, begin, begin + count))
            else:
                num_other_tokens += count
            begin += count
    return segments, num_other_tokens


async def _replay_and_compare_segment(
    receipt: Receipt, segment: ReplaySegment, model: ReplayModel, client: EngineClient
) -> str | None:
    """Return the first difference. Raises InvalidRequest."""
    choice, expected_ids = segment.choice, segment.choice.token_ids[segment.begin : segment.end]
    request = _make_replay_request(receipt, segment, model)
    stream = client.submit([request], request.id)
    ids: list[int] = []
    logprobs: list[float | None] = []
    prompt_logprobs: list[float | None] | None = None
    try:
        async for outputs in stream:
            for output in outputs:
                if output.error is not None:
                    raise InvalidRequest(output.error) if output.cause == "grammar" else EngineError(output.error)
                ids += output.new_ids
                logprobs += logprob_values(output.logprobs or [])
                if output.prompt_logprobs is not None:
                    prompt_logprobs = logprob_values(output.prompt_logprobs[1:])
            if len(ids) >= len(expected_ids):
                break
    finally:
        stream.close()
    where = f"choice {choice.index}, " if len(receipt.choices) > 1 else ""
    if (index := _first_difference(expected_ids, ids[: len(expected_ids)])) is not None:
        descriptions = [
            _describe_token(each[index] if index < len(each) else None, model.tokenizer) for each in (expected_ids, ids)
        ]
        return f"{where}token {segment.begin + index}: expected {descriptions[0]}, got {descriptions[1]}"
    expected = (choice.logprobs or [])[segment.begin : segment.end]
    if (index := _first_difference(expected, logprobs[: len(expected)])) is not None:
        return (
            f"{where}log probability of token {segment.begin + index}: "
            f"expected {expected[index]!r}, got {logprobs[index]!r}"
        )
    expected = choice.prompt_logprobs or [] if prompt_logprobs is not None else []
    if (index := _first_difference(expected, prompt_logprobs or [])) is not None:
        return f"{where}log probability of the prompt's token {index + 1}: expected {expected[index]!r}"
    return None


def _make_replay_request(receipt: Receipt, segment: ReplaySegment, model: ReplayModel) -> EngineCoreRequest:
    """Starts after the tokens that other weights computed."""
    choice, prompt = segment.choice, receipt.choice_prompt(segment.choice)
    digests = dict.fromkeys(digest for _, _, digest in prompt.images)
    return EngineCoreRequest(
        id=f"replay-{receipt.id}-{choice.index}-{segment.begin}",
        prompt_ids=prompt.ids,
        params=msgspec.structs.replace(receipt.params, n=1),
        seed=choice.seed,
        emitted_ids=choice.token_ids[: segment.begin],
        adapter=None if receipt.adapter is None else model.adapters[receipt.adapter.digest],
        spans=tuple(MediaSpan(start, count, bytes.fromhex(digest)) for start, count, digest in prompt.images),
        images=tuple(model.images[digest] for digest in digests),
    )


def _first_difference(expected: Sequence[object], actual: Sequence[object]) -> int | None:
    """None if equal. If one is a prefix of the other, the length of the shorter one."""
    if list(expected) == list(actual):
        return None
    pairs = zip(expected, actual, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(expected), len(actual)))


def _describe_token(token: int | None, tokenizer: Tokenizer) -> str:
    return "the end" if token is None else f"{tokenizer.token_display_text(token)!r} ({token})"
