"""A receipt: the prompts, parameters, seeds and hashes that decided an answer's tokens, and these tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from quire.engine.client.output_source import Versions, add_tokens
from quire.engine.common.errors import InvalidRequest
from quire.engine.common.request_params import SamplingParams
from quire.engine.common.types import Adapter, EngineCoreOutput, MediaSpan, TokenLogprob


class ComputeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What computed an answer, beside its weights. Where all of it is equal, bits are."""

    quire: str
    """The version."""
    kernels: str
    """Hash of the installed code of kernels, layers and models."""
    backend: str
    """The kernels that were chosen, with their instruction set."""
    device: str
    dtype: str
    quantization: str | None = None
    quantize_embedding: bool | None = None
    kv_cache_dtype: str = "auto"
    activation_bits: str = "auto"
    rope_context: int | None = None
    tensor_parallel_size: int = 1
    deterministic: bool = True
    """Whether tokens depend on nothing else that ran; where they may, a replay may differ."""


class ReceiptHashes(msgspec.Struct, frozen=True, kw_only=True):
    """Of what a model is made of; of 16 bytes each, in hexadecimal."""

    config: str
    """Of config.json's content, or of what a GGUF file says instead."""
    tokenizer: str
    template: str
    """Of the model's chat template, which made the prompts of chats."""
    weights: dict[str, str | None]
    """Of the content of the weights' files, by version; None where they were given as tensors, or where the files were
    changed or deleted before they were read for this."""


class PromptReceipt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    ids: list[int]
    images: list[tuple[int, int, str]] = []
    """Spans of ids that stand for images: start, count, and the hash of the resized pixels, in hexadecimal."""

    @classmethod
    def from_prompt(cls, ids: Sequence[int], spans: Sequence[MediaSpan]) -> PromptReceipt:
        return cls(ids=list(ids), images=[(each.start, each.count, each.digest.hex()) for each in spans])


class AdapterReceipt(msgspec.Struct, frozen=True):
    name: str
    digest: str
    """Of its files' content."""

    @classmethod
    def from_adapter(cls, adapter: Adapter | None) -> AdapterReceipt | None:
        return None if adapter is None else cls(adapter.name, adapter.digest)


class ChoiceReceipt(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One choice, which grows as its tokens come; choice i of prompt p has index p * n + i."""

    index: int
    seed: int
    """The one that its random numbers are made of, also where the request had none."""
    token_ids: list[int] = []
    """All that it consists of, with the one that ended it."""
    versions: Versions = []
    logprobs: list[float | None] | None = None
    """Of these tokens, if log probabilities were asked for; None stands for minus infinity."""
    prompt_logprobs: list[float | None] | None = None
    """Of the prompt's tokens from the second on, likewise."""
    finish_reason: str = ""

    def add_output(self, output: EngineCoreOutput) -> None:
        self.token_ids += output.new_ids
        if output.logprobs is not None:
            self.logprobs = (self.logprobs or []) + logprob_values(output.logprobs)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = logprob_values(output.prompt_logprobs[1:])

    def truncated(self, count: int, finish_reason: str) -> ChoiceReceipt:
        """A copy with the first `count` tokens: those after a stop string are not part of the answer."""
        return msgspec.structs.replace(
            self,
            token_ids=self.token_ids[:count],
            versions=truncate_weight_versions(self.versions, count),
            logprobs=None if self.logprobs is None else self.logprobs[:count],
            finish_reason=finish_reason,
        )


class Receipt(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="receipt"):
    id: str
    """The answer's."""
    created: int
    """Seconds of the Unix clock."""
    model: str
    """As the request named it."""
    hashes: ReceiptHashes
    computed: ComputeInfo
    adapter: AdapterReceipt | None
    params: SamplingParams
    """As resolved: with the model's defaults and the grammar of tools or formats. Fields with their default are left
    out."""
    prompts: list[PromptReceipt]
    choices: list[ChoiceReceipt]
    irreproducible: str = ""
    """Why it cannot be replayed, if it cannot."""

    def choice_prompt(self, choice: ChoiceReceipt) -> PromptReceipt:
        return self.prompts[choice.index // self.params.n]


encode_receipt = msgspec.json.Encoder().encode
_decode_json = msgspec.json.Decoder(Receipt).decode


def parse_receipt_json(content: bytes) -> Receipt:
    """Of a receipt, or of a whole answer that has one as its field `receipt`. Raises InvalidRequest for other JSON."""
    try:
        parsed = msgspec.json.decode(content)
        receipt_object = _find_receipt(parsed)
        receipt = msgspec.convert(receipt_object, Receipt, strict=True, str_keys=True)
    except (msgspec.DecodeError, UnicodeDecodeError, InvalidRequest) as error:
        raise InvalidRequest(f"this is no receipt: {error}") from None
    bad_choices = [
        each.index for each in receipt.choices if not 0 <= each.index // receipt.params.n < len(receipt.prompts)
    ]
    if bad_choices or not all(map(_is_consistent_choice, receipt.choices)):
        raise InvalidRequest(
            "this is no receipt: its choices do not fit its prompts, or versions and log probabilities their tokens"
        )
    return receipt


def _is_consistent_choice(choice: ChoiceReceipt) -> bool:
    """Whether a choice has a version and, if any, a log probability of each of its tokens."""
    counts = [count for _, count in choice.versions]
    if min(counts, default=0) < 0 or sum(counts) != len(choice.token_ids):
        return False
    return choice.logprobs is None or len(choice.logprobs) == len(choice.token_ids)


def _find_receipt(parsed: Any) -> Any:
    """The receipt of an answer, of an event that ends a stream, or of a line of a batch's output."""
    for path in ((), ("receipt",), ("x_receipt",), ("response", "receipt"), ("response", "body", "receipt")):
        candidate = parsed
        for name in path:
            candidate = candidate.get(name) if isinstance(candidate, dict) else None
        if isinstance(candidate, dict) and candidate.get("object") == "receipt":
            return candidate
    raise InvalidRequest("it has no `receipt`")


def logprob_values(logprobs: Iterable[TokenLogprob | None]) -> list[float | None]:
    """The log probabilities alone, as JSON can have them."""
    return [None if each is None or each.logprob == -float("inf") else each.logprob for each in logprobs]


def truncate_weight_versions(versions: Versions, count: int) -> Versions:
    """Of the first `count` tokens."""
    truncated: Versions = []
    for version, tokens in versions:
        add_tokens(truncated, version, min(tokens, count - sum(each for _, each in truncated)))
    return truncated
