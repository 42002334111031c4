"""Computes a receipt's answers again, and says where the first difference is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import msgspec

from quire.engine.errors import EngineError, InvalidRequest
from quire.engine.link.client import EngineClient
from quire.engine.receipts.receipt import ChoiceReceipt, Computed, Hashes, PromptReceipt, Receipt, values_of
from quire.engine.text.tokenizer import Tokenizer
from quire.engine.types import Adapter, EngineCoreRequest, Image, Span

Outcome = Literal["equal", "different", "refused"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one receipt."""

    id: str
    outcome: Outcome
    what: str
    """The first difference, or why it was refused; of an equal one, what was compared."""
    tokens: int = 0
    """That were computed again and compared."""
    warning: str = ""


@dataclass(frozen=True, slots=True)
class Model:
    """A running model that receipts are replayed on."""

    hashes: Hashes
    """With those of the weights under one version."""
    computed: Computed
    tokenizer: Tokenizer
    max_model_len: int
    vocab_size: int
    adapters: Mapping[str, Adapter]
    """By digest."""
    images: Mapping[str, Image]
    """By digest, in hexadecimal."""

    @property
    def weights(self) -> str | None:
        (found,) = self.hashes.weights.values()
        return found


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of a choice that one version of the weights computed: from `begin` on, up to `end`."""

    choice: ChoiceReceipt
    begin: int
    end: int


async def replay(receipt: Receipt, model: Model, client: EngineClient) -> Verdict:
    """Compute again what the model's weights computed of an answer. It is refused if nothing of it can be compared.
    Raises EngineError when the engine fails."""
    if (why := refusal(receipt, model)) is not None:
        return Verdict(receipt.id, "refused", why)
    pieces, elsewhere = pieces_of(receipt, model.weights)
    warning = warning_of(receipt, model)
    counted = 0
    for piece in pieces:
        try:
            difference = await _compared(receipt, piece, model, client)
        except InvalidRequest as error:
            return Verdict(receipt.id, "refused", error.message, counted, warning)
        if difference is not None:
            return Verdict(receipt.id, "different", difference, counted, warning)
        counted += piece.end - piece.begin
    if not counted:
        return Verdict(receipt.id, "refused", "nothing was compared: its answers have no tokens of these weights")
    kinds = [] if receipt.choices[:1] and receipt.choices[0].logprobs is None else ["log probabilities"]
    what = " and ".join([f"{counted} tokens", *kinds])
    if elsewhere:
        what += f"; {elsewhere} more are of other weights: replay it on those too"
    return Verdict(receipt.id, "equal", what, counted, warning)


def refusal(receipt: Receipt, model: Model) -> str | None:
    """Why the model cannot compute these answers again; None: it can."""
    if receipt.irreproducible:
        return receipt.irreproducible
    differ = [name for name in ("config", "tokenizer") if getattr(receipt.hashes, name) != getattr(model.hashes, name)]
    if differ:
        files = {"config": "config.json", "tokenizer": "the tokenizer"}
        return f"{' and '.join(files[name] for name in differ)} of this model differ from the receipt's"
    known = receipt.hashes.weights
    if model.weights is None or model.weights not in known.values():
        there = ", ".join(each or "some that were in no file" for each in known.values())
        return f"the weights differ: the answer was computed by {there}; this model has {model.weights}"
    if receipt.adapter is not None and receipt.adapter.digest not in model.adapters:
        return f"the adapter {receipt.adapter.name} ({receipt.adapter.digest}) was not given: --adapter FOLDER"
    digests = {digest for prompt in receipt.prompts for _, _, digest in prompt.images}
    if lacking := sorted(digests - model.images.keys()):
        why = f"it has images, of which a receipt keeps hashes alone ({lacking[0]})"
        return f"{why}: --image FILE, or images of LLM.replay, gives their pixels"
    outside = next((id for id in ids_of(receipt) if not 0 <= id < model.vocab_size), None)
    if outside is not None:
        return f"its token id {outside} is outside this model's vocabulary of {model.vocab_size}"
    if any(not 0 <= choice.seed < 2**63 for choice in receipt.choices):
        return "it has a seed of more than 63 bits"
    if any(not _is_within(prompt) for prompt in receipt.prompts):
        return "its images do not stand within its prompts"
    if not all(receipt.prompt_of(each).ids for each in receipt.choices):
        return "it has a prompt without tokens"
    longest = max((len(receipt.prompt_of(each).ids) + len(each.token_ids) for each in receipt.choices), default=0)
    if longest > model.max_model_len:
        return f"max_model_len: it has {longest} tokens, and this model's context {model.max_model_len}"
    return None


def ids_of(receipt: Receipt) -> Iterator[int]:
    """All token ids in a receipt."""
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


def _is_within(prompt: PromptReceipt) -> bool:
    """Whether the images of a prompt stand behind one another in it."""
    end = 0
    for start, count, _ in sorted(prompt.images):
        if start < end or count < 1:
            return False
        end = start + count
    return end <= len(prompt.ids)


def warning_of(receipt: Receipt, model: Model) -> str:
    """What computes here otherwise than there, so that bits may differ; "" where nothing does."""
    there, here = msgspec.structs.asdict(receipt.computed), msgspec.structs.asdict(model.computed)
    differ = [f"{name} was {there[name]}, is {here[name]}" for name in there if there[name] != here[name]]
    told = [] if receipt.computed.deterministic else ["its tokens may have depended on what else ran"]
    return "; ".join([*differ, *told])


def pieces_of(receipt: Receipt, weights: str | None) -> tuple[list[Piece], int]:
    """What these weights computed, and how many tokens others did."""
    pieces, elsewhere = [], 0
    for choice in receipt.choices:
        begin = 0
        for version, count in choice.versions:
            if receipt.hashes.weights.get(version) == weights:
                pieces.append(Piece(choice, begin, begin + count))
            else:
                elsewhere += count
            begin += count
    return pieces, elsewhere


async def _compared(receipt: Receipt, piece: Piece, model: Model, client: EngineClient) -> str | None:
    """The first difference of a piece from what is computed now. Raises InvalidRequest for what the engine refuses."""
    choice, wanted = piece.choice, piece.choice.token_ids[piece.begin : piece.end]
    request = _request(receipt, piece, model)
    stream = client.submit([request], request.id)
    ids: list[int] = []
    logprobs: list[float | None] = []
    prompt: list[float | None] | None = None
    try:
        async for outputs in stream:
            for output in outputs:
                if output.error is not None:
                    raise InvalidRequest(output.error) if output.cause == "grammar" else EngineError(output.error)
                ids += output.new_ids
                logprobs += values_of(output.logprobs or [])
                if output.prompt_logprobs is not None:
                    prompt = values_of(output.prompt_logprobs[1:])
            if len(ids) >= len(wanted):
                break
    finally:
        stream.close()
    where = f"choice {choice.index}, " if len(receipt.choices) > 1 else ""
    if (at := _first(wanted, ids[: len(wanted)])) is not None:
        shown = [_token(each[at] if at < len(each) else None, model.tokenizer) for each in (wanted, ids)]
        return f"{where}token {piece.begin + at}: expected {shown[0]}, got {shown[1]}"
    told = (choice.logprobs or [])[piece.begin : piece.end]
    if (at := _first(told, logprobs[: len(told)])) is not None:
        return f"{where}log probability of token {piece.begin + at}: expected {told[at]!r}, got {logprobs[at]!r}"
    told = choice.prompt_logprobs or [] if prompt is not None else []
    if (at := _first(told, prompt or [])) is not None:
        return f"{where}log probability of the prompt's token {at + 1}: expected {told[at]!r}"
    return None


def _request(receipt: Receipt, piece: Piece, model: Model) -> EngineCoreRequest:
    """What computes a piece: it begins behind the tokens that others have computed."""
    choice, prompt = piece.choice, receipt.prompt_of(piece.choice)
    digests = dict.fromkeys(digest for _, _, digest in prompt.images)
    return EngineCoreRequest(
        id=f"replay-{receipt.id}-{choice.index}-{piece.begin}",
        prompt_ids=prompt.ids,
        params=msgspec.structs.replace(receipt.params, n=1),
        seed=choice.seed,
        emitted_ids=choice.token_ids[: piece.begin],
        adapter=None if receipt.adapter is None else model.adapters[receipt.adapter.digest],
        spans=tuple(Span(start, count, bytes.fromhex(digest)) for start, count, digest in prompt.images),
        images=tuple(model.images[digest] for digest in digests),
    )


def _first(wanted: Sequence[object], found: Sequence[object]) -> int | None:
    """The index of the first difference."""
    if list(wanted) == list(found):
        return None
    pairs = zip(wanted, found, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(wanted), len(found)))


def _token(token: int | None, tokenizer: Tokenizer) -> str:
    return "the end" if token is None else f"{tokenizer.token_text(token)!r} ({token})"
