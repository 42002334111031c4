from __future__ import annotations

from hashlib import blake2b
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from quire.engine.common import random_source
from quire.engine.common.errors import InvalidRequest
from quire.engine.common.sampling_field import MAX_TOKENS, NamedSamplingField, SamplingField

MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 4096
"""Limit for all stop strings together, because each is compared with the text that is not yet sent."""
MAX_SEQUENCE_BREAKERS, MAX_SEQUENCE_BREAKER_LENGTH = 64, 40
"""Maximum number and length of DRY's sequence breakers, as in llama.cpp."""


class Grammar(msgspec.Struct, frozen=True):
    kind: Literal["json", "regex", "lark"]
    text: str
    """JSON schema, Rust regular expression, or llguidance's Lark or GBNF grammar, depending on `kind`."""


class ThinkingBudget(msgspec.Struct, frozen=True):
    tokens: int
    end_id: int
    begin_id: int | None
    """Token that begins the thinking; None if answers start inside it."""


_MIN_TEMPERATURE = 1e-5
"""Lower temperatures mean greedy sampling, as in vLLM, because division by them may make logits infinite."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="sampling"):
    """How to sample an answer, and when it ends. Raises InvalidRequest that names the wrong field."""

    n: Annotated[int, SamplingField(text="Number of answers per prompt.", minimum=1, maximum=128, is_copied=False)] = 1
    temperature: Annotated[
        float,
        SamplingField(
            text="Divides the logits; 0 and values below 1e-5 choose the most likely token.",
            minimum=0.0,
            maximum=2.0,
            has_model_default=True,
            setting_label="Temperature",
            setting_step=0.1,
        ),
    ] = 1.0
    top_p: Annotated[
        float,
        SamplingField(
            text="Keeps the most likely tokens whose probabilities add up to this.",
            minimum=0.0,
            maximum=1.0,
            excludes_minimum=True,
            has_model_default=True,
            setting_label="Top p",
            setting_step=0.05,
        ),
    ] = 1.0
    top_k: Annotated[
        int,
        SamplingField(
            text="Keeps that many most likely tokens; 0 and -1 keep the whole vocabulary.",
            minimum=-1,
            maximum=MAX_TOKENS,
            has_model_default=True,
            setting_label="Top k",
        ),
    ] = 0
    min_p: Annotated[
        float,
        SamplingField(
            text="Keeps tokens with at least this share of the most likely one's probability.",
            minimum=0.0,
            maximum=1.0,
            has_model_default=True,
            setting_label="Min p",
            setting_step=0.01,
        ),
    ] = 0.0
    top_n_sigma: Annotated[
        float,
        SamplingField(
            text=(
                "Keeps tokens whose logit is at most this many standard deviations (of all logits) below the largest "
                "(Tang et al., 2024); 0 and -1 keep all."
            ),
            minimum=-1.0,
            maximum=100.0,
            has_model_default=True,
            setting_label="Top n sigma",
            setting_step=0.1,
        ),
    ] = -1.0
    typical_p: Annotated[
        float,
        SamplingField(
            text=(
                "Locally typical sampling (Meister et al., 2022): keeps the tokens whose information is nearest to the "
                "entropy until their probabilities add up to this."
            ),
            minimum=0.0,
            maximum=1.0,
            excludes_minimum=True,
            has_model_default=True,
            setting_label="Typical p",
            setting_step=0.05,
        ),
    ] = 1.0
    xtc_probability: Annotated[
        float,
        SamplingField(
            text="Probability that a token is sampled with XTC, which excludes top choices.",
            minimum=0.0,
            maximum=1.0,
            has_model_default=True,
            setting_label="XTC probability",
            setting_step=0.05,
        ),
    ] = 0.0
    xtc_threshold: Annotated[
        float,
        SamplingField(
            text="XTC drops the tokens with at least this probability, except the least likely of them.",
            minimum=0.0,
            maximum=1.0,
            has_model_default=True,
            setting_label="XTC threshold",
            setting_step=0.05,
        ),
    ] = 0.1
    repetition_penalty: Annotated[
        float,
        SamplingField(
            text=(
                "Above 1, every token seen becomes less likely, the prompt's included (Keskar et al., 2019): positive "
                "logits are divided by it, negative ones multiplied."
            ),
            minimum=1e-6,
            maximum=1e6,
            has_model_default=True,
            setting_label="Repetition penalty",
            setting_step=0.05,
        ),
    ] = 1.0
    presence_penalty: Annotated[
        float,
        SamplingField(
            text="Subtracted from the logits of tokens that are already in the answer.",
            minimum=-2.0,
            maximum=2.0,
            setting_label="Presence penalty",
            setting_step=0.1,
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        SamplingField(
            text="Subtracted from a token's logit once for each time that the token is in the answer.",
            minimum=-2.0,
            maximum=2.0,
            setting_label="Frequency penalty",
            setting_step=0.1,
        ),
    ] = 0.0
    dry_multiplier: Annotated[
        float,
        SamplingField(
            text=(
                "DRY subtracts dry_multiplier * dry_base ** (length - dry_allowed_length) from the logit of a token "
                "that would extend a repetition of that length, the prompt's tokens included; 0: no DRY."
            ),
            minimum=0.0,
            maximum=100.0,
            has_model_default=True,
            setting_label="DRY multiplier",
            setting_step=0.1,
        ),
    ] = 0.0
    dry_base: Annotated[
        float,
        SamplingField(
            text="Base of DRY's penalty.",
            minimum=1.0,
            maximum=100.0,
            has_model_default=True,
            setting_label="DRY base",
            setting_step=0.05,
        ),
    ] = 1.75
    dry_allowed_length: Annotated[
        int,
        SamplingField(
            text="DRY does not penalize repetitions of fewer tokens.",
            minimum=1,
            maximum=1024,
            has_model_default=True,
            setting_label="DRY allowed length",
        ),
    ] = 2
    dry_penalty_last_n: Annotated[
        int,
        SamplingField(
            text="DRY looks for repetitions in this many of the last tokens; -1: all, 0: no DRY.",
            minimum=-1,
            maximum=MAX_TOKENS,
            has_model_default=True,
            setting_label="DRY last n",
        ),
    ] = -1
    dry_sequence_breaker_ids: tuple[tuple[int, ...], ...] = ()
    """Token sequences at which DRY stops matching: only repetitions that contain none of them are penalized."""
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    """None allows all tokens."""
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    max_tokens: Annotated[
        int | None,
        SamplingField(
            text="Maximum number of tokens of an answer; null: as many as the context holds.",
            minimum=1,
            maximum=MAX_TOKENS,
            is_copied=False,
            setting_label="Max tokens",
        ),
    ] = 16
    min_tokens: Annotated[
        int,
        SamplingField(
            text="Minimum number of tokens before an answer may end by itself.", minimum=0, maximum=MAX_TOKENS
        ),
    ] = 0
    grammar: Grammar | None = None
    """The answer ends when it completes the grammar, despite min_tokens and ignore_eos."""
    thinking: ThinkingBudget | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: Annotated[bool, SamplingField(text="The model's end tokens do not end the answer.")] = False
    seed: Annotated[
        int | None,
        SamplingField(
            text="The same seed gives the same answer; -1 and null: random.",
            minimum=-(2**63),
            maximum=2**63 - 1,
            is_copied=False,
            setting_label="Seed",
        ),
    ] = None
    logprobs: Annotated[
        int | None,
        SamplingField(
            text="Number of most likely tokens to report with each sampled token; 0 reports only the sampled token.",
            minimum=0,
            maximum=MAX_TOKENS,
            is_copied=False,
        ),
    ] = None
    logprob_token_ids: tuple[int, ...] | None = None
    """Tokens to report with each sampled token, instead of the `logprobs` most likely ones. Empty means None."""
    prompt_logprobs: Annotated[
        int | None,
        SamplingField(text="The same for the prompt's tokens.", minimum=0, maximum=MAX_TOKENS, is_copied=False),
    ] = None
    skip_special_tokens: Annotated[bool, SamplingField(text="Leaves special tokens out of the answer's text.")] = True
    include_stop_str_in_output: Annotated[
        bool, SamplingField(text="Includes the stop string in the answer's text.")
    ] = False

    def __post_init__(self) -> None:
        if not isinstance(self.stop, tuple):
            stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
            msgspec.structs.force_setattr(self, "stop", stop)
        if self.seed == -1:  # -1 means no seed in vLLM and Ollama
            msgspec.structs.force_setattr(self, "seed", None)
        for row in BOUNDED_SAMPLING_FIELDS:
            field = row.field
            _check_bounds(row.name, getattr(self, row.name), field.minimum, field.maximum, field.excludes_minimum)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens must not exceed max_tokens ({self.max_tokens}), got {self.min_tokens}", param="min_tokens"
            )
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}", param="stop")
        if any(not text for text in self.stop):
            raise InvalidRequest("stop must not contain an empty string", param="stop")
        if sum(map(len, self.stop)) > MAX_STOP_CHARACTERS:
            message = f"stop must not contain more than {MAX_STOP_CHARACTERS} characters in all"
            raise InvalidRequest(message, param="stop")
        for bias in (self.logit_bias or {}).values():
            _check_bounds("logit_bias", bias, -100.0, 100.0)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids must not be empty", param="allowed_token_ids")
        if not all(self.bad_words_ids):
            raise InvalidRequest("bad_words must not contain an empty word", param="bad_words")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < _MIN_TEMPERATURE

    @property
    def has_dry(self) -> bool:
        return self.dry_multiplier > 0 and self.dry_penalty_last_n != 0

    def choice_seed(self, choice: int) -> int:
        """A choice's seed of 63 bits, random if `seed` is None. Choice 0 gets the low 63 bits of `seed`."""
        if self.seed is None:
            return random_source.randbits(63)
        if choice == 0:
            return self.seed & (2**63 - 1)
        return int.from_bytes(blake2b(f"{self.seed}:{choice}".encode(), digest_size=8).digest(), "big") >> 1


def _list_sampling_fields() -> tuple[NamedSamplingField, ...]:
    rows = []
    defaults = {each.name: each.default for each in msgspec.structs.fields(SamplingParams)}
    for name, hint in get_type_hints(SamplingParams, include_extras=True).items():
        if get_origin(hint) is Annotated:
            declared, field = get_args(hint)
            kind = next(iter(get_args(declared)), declared)
            default = defaults[name]
            if kind is float:  # msgspec omits a value that is the default object itself; receipts must write it
                default = float(repr(default))
            rows.append(NamedSamplingField(name, kind, default, field))
    return tuple(rows)


SAMPLING_FIELDS = _list_sampling_fields()
BOUNDED_SAMPLING_FIELDS = tuple(each for each in SAMPLING_FIELDS if each.field.minimum is not None)
MODEL_DEFAULT_FIELDS = tuple(each for each in SAMPLING_FIELDS if each.field.has_model_default)
SETTING_FIELDS = tuple(each for each in SAMPLING_FIELDS if each.field.setting_label)
COPIED_SAMPLING_FIELDS = tuple(each for each in SAMPLING_FIELDS if each.field.is_copied)


def find_sampling_field(name: str) -> NamedSamplingField | None:
    return next((each for each in SAMPLING_FIELDS if each.name == name), None)


PoolingTask = Literal["embed", "classify"]


Task = Literal["generate", "embed", "classify"]


PoolingType = Literal["last", "mean", "cls", "none"]
"""What a vector is: the last token's hidden state, the mean, the first token's ("cls"), or one per token ("none")."""


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="pooling"):
    task: PoolingTask = "embed"
    dimensions: int | None = None
    """Keep only this many first elements of an embedding (Kusupati et al., 2022)."""
    activation: bool | None = None
    """Whether to normalize embeddings, or to turn scores into probabilities; None is the model's default."""
    second_segment: int | None = None

    def __post_init__(self) -> None:
        _check_bounds("dimensions", self.dimensions, 1, MAX_TOKENS)


def _check_bounds(name: str, value: float | None, low: Any, high: Any, is_exclusive: bool = False) -> None:
    """Raise InvalidRequest for a value out of bounds or NaN."""
    if value is None:
        return
    if not ((value > low if is_exclusive else value >= low) and value <= high):
        if isinstance(low, int):
            bounds = f"at least {low} and at most {high}"
        else:
            bounds = f"in {'(' if is_exclusive else '['}{low:g}, {high:g}]"  # programs look for vLLM's wording
        raise InvalidRequest(f"{name} must be {bounds}, got {value}", param=name)
