"""From questions (of the Decisions API, of TypeSafe's) and from items with labels (SGLang's) to prompts, each of which
one token answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from string import ascii_lowercase, ascii_uppercase

from quire.engine.errors import InvalidRequest
from quire.engine.text.tokenizer import Tokenizer
from quire.engine.types import SamplingParams
from quire.server.config import ServerConfig
from quire.server.generation.answers.answer_writer import WriterFactory
from quire.server.generation.answers.decisions import DecisionsWriter, LabelScoresWriter, SystemOneWriter
from quire.server.generation.request_specs import OptionQuestion, Prompt, QuestionType
from quire.server.generation.vector_generation import VectorSpec
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.chat_translation import TranslatedBody
from quire.server.protocol.completions import CompletionRequest
from quire.server.protocol.field_limits import MAX_PROMPT_ENTRIES
from quire.server.protocol.questions.decisions import AnyQuestion, Choice, DecisionRequest, Score
from quire.server.protocol.questions.label_scores import LabelScoreRequest
from quire.server.protocol.questions.systemone import SystemOneRequest, is_model_alias, to_prompt_text
from quire.server.protocol.request_bodies import ignored_params_header
from quire.server.protocol.response_items import InputItem, Message
from quire.server.resolve.chat import PROMPT_TAIL_TOKENS
from quire.server.resolve.checks import check_json_texts, check_prompt_length
from quire.server.resolve.common import Resolved, resolved
from quire.server.resolve.completions import resolve_completion_request
from quire.server.resolve.parse import parse_body, read_json_object, validate_body
from quire.server.resolve.prompts import build_chat_prompt
from quire.server.resolve.text_pairs import resolve_score
from quire.server.resolve.translated.chat_conversion import (
    FieldPlaces,
    merge_user_turns,
    rename_error_fields,
    rename_request_fields,
)
from quire.server.resolve.translated.input_items import content_texts, turns_from_items
from quire.server.served_model import ServedModel

DECISION_FIELD_NAMES = {"messages": "input"}
QUESTION_PHRASES: Mapping[QuestionType, str] = {
    "predicate": "Is this true?",
    "choice": "Which one applies?",
    "score": "Which level applies?",
}


def resolve_decisions(body_bytes: bytes, model: ServedModel, config: ServerConfig) -> Resolved:
    """Raises ModelNotFound, and InvalidRequest naming the parameter."""
    body = parse_body(body_bytes, DecisionRequest)
    name = model.response_model_name(body.model)
    posed = [
        PromptQuestion(each.type, each.name, content_texts(each.instructions), question_options(each))
        for each in body.questions
    ]
    items: Sequence[InputItem] = (
        body.input if isinstance(body.input, list) else [Message(role="user", content=body.input)]
    )
    call = DecisionApi(DecisionsWriter, "decision_", DECISION_FIELD_NAMES, options_are_distinct=True)
    return call.resolve_questions(body, name, items, posed, model, config)


@dataclass(frozen=True, slots=True)
class PromptQuestion:
    """A question as the model reads it."""

    type: QuestionType
    name: str | None
    instructions: Sequence[str]
    options: Sequence[tuple[str | bool, str]]
    """Each with its description."""

    def question_text(self, labels: Iterable[str]) -> str:
        lines = [
            f"{label}) "
            f"{str(value).lower() if isinstance(value, bool) else value}{': ' if description else ''}{description}"
            for label, (value, description) in zip(labels, self.options, strict=False)
        ]
        end = ["", "Answer with the letter alone."]
        return "\n".join([*self.instructions, "", QUESTION_PHRASES[self.type], *lines, *end]).lstrip("\n")

    def to_option_question(self, tokens: Sequence[int], *, must_be_distinct: bool) -> OptionQuestion:
        """Raises InvalidRequest for an option that is there twice, where options must be `must_be_distinct`."""
        options = [value for value, _ in self.options]
        if must_be_distinct and len({(type(value), value) for value in options}) < len(options):
            raise InvalidRequest("questions: each option must be unique", param="questions")
        return OptionQuestion(self.type, self.name, options, tokens[: len(options)])


@dataclass(frozen=True, slots=True)
class DecisionApi:
    """The differences between the APIs that ask questions."""

    writer: WriterFactory
    id_prefix: str
    field_names: Mapping[str, str]
    """See rename_error_fields."""
    options_are_distinct: bool
    """Whether a question's options must be distinct."""

    def resolve_questions(
        self,
        body: TranslatedBody,
        name: str,
        items: Sequence[InputItem],
        posed: Sequence[PromptQuestion],
        model: ServedModel,
        config: ServerConfig,
    ) -> Resolved:
        """A call that poses questions about these items; `name`: the model's in the answer. Raises InvalidRequest,
        naming the parameter."""
        headers = ignored_params_header(body.find_ignored_params(), config.strict)
        labels = single_token_labels(model.tokenizer, max(len(each.options) for each in posed))
        ids = tuple(labels.values())
        questions = [each.to_option_question(ids, must_be_distinct=self.options_are_distinct) for each in posed]
        check_json_texts([[question.name, *question.options] for question in questions], "questions")
        with rename_error_fields(self.field_names) as places:
            chats = [question_chat_request(body, items, each.question_text(labels), model, places) for each in posed]
            prompts = [build_answer_prompt(chats[0], model)]
            if len(prompts[0].ids) * len(chats) > MAX_PROMPT_ENTRIES:
                raise InvalidRequest("questions: too many about so long an input: ask fewer at once", param="questions")
            prompts += [build_answer_prompt(chat, model) for chat in chats[1:]]
            params = SamplingParams(
                max_tokens=1, temperature=0.0, logprobs=0, logprob_token_ids=ids, allowed_token_ids=ids, ignore_eos=True
            )
            call = resolved(
                chats[0],
                writer=self.writer,
                id_prefix=self.id_prefix,
                model=name,
                prompts=prompts,
                params=params,
                logprobs=True,
                headers=headers,
                config=config,
            )
        return replace(call, spec=replace(call.spec, questions=questions))


def single_token_labels(tokenizer: Tokenizer, count: int) -> dict[str, int]:
    """So many short texts that are one token each: letters first, then pairs and triples of letters. Raises
    InvalidRequest."""
    labels = dict(islice(_iterate_single_tokens(tokenizer), count))
    if len(labels) < count:
        raise InvalidRequest(
            f"questions: this model's vocabulary can tell {len(labels)} options apart, got {count}", param="questions"
        )
    return labels


def _iterate_single_tokens(tokenizer: Tokenizer) -> Iterator[tuple[str, int]]:
    """The most readable ones first. All are different tokens."""
    capitals, small = list(ascii_uppercase), list(ascii_lowercase)
    kinds = [capitals], [capitals] * 2, [capitals, small], [small] * 2, [small] * 3
    seen: set[int] = set()
    for letters in kinds:
        texts = ["".join(each) for each in product(*letters)]
        for text, ids in zip(texts, tokenizer.encode_batch(texts, add_special_tokens=False), strict=True):
            if len(ids) == 1 and ids[0] not in seen:
                seen.add(ids[0])
                yield text, ids[0]


def question_options(question: AnyQuestion) -> list[tuple[str | bool, str]]:
    """What may be answered, each with its description."""
    if isinstance(question, Choice):
        return [(option.value, option.description) for option in question.choices]
    if isinstance(question, Score):
        return [(level.label, level.description) for level in question.levels]
    return [("yes", ""), ("no", "")]


def question_chat_request(
    body: TranslatedBody, items: Sequence[InputItem], question: str, model: ServedModel, places: FieldPlaces
) -> ChatRequest:
    """The conversation with the question as its last message, which one of the labels answers."""
    question_message = Message(role="user", content=question)
    turns = turns_from_items([*items, question_message], "", developer="developer" in model.chat_formats.template_text)
    turns = merge_user_turns(turns, places)
    fields = body.pick_extensions()
    if model.chat_formats.thinking_switch.off_variables:
        template_kwargs = fields.get("chat_template_kwargs", {})
        fields["chat_template_kwargs"] = (
            {**model.chat_formats.thinking_switch.off_variables, **template_kwargs}
            if isinstance(template_kwargs, dict)
            else template_kwargs
        )
    return validate_body({**fields, "messages": turns}, ChatRequest)


def build_answer_prompt(chat: ChatRequest, model: ServedModel) -> Prompt:
    """The prompt; one that the template begins to think in ends behind the thinking. Raises InvalidRequest."""
    prompt, reasoning = build_chat_prompt(chat, model, None, trusted=False), model.chat_formats.reasoning_format
    if reasoning is None or not reasoning.starts_in_thinking(
        model.tokenizer.decode(prompt.ids[-PROMPT_TAIL_TOKENS:], skip_special_tokens=False)
    ):
        return prompt
    closing = model.tokenizer.encode(f"{reasoning.end}\n\n", add_special_tokens=False)
    ended = replace(prompt, ids=[*prompt.ids, *closing])
    check_prompt_length(ended.ids, model.context_length, "input")
    return ended


SYSTEMONE_QUESTION_TYPES: Mapping[str, QuestionType] = {"noul": "predicate", "choice": "choice", "score": "score"}


def resolve_systemone(body_bytes: bytes, model: ServedModel, config: ServerConfig) -> Resolved:
    """Raises ModelNotFound, and InvalidRequest naming the parameter."""
    body = parse_body(body_bytes, SystemOneRequest)
    served_name = is_model_alias(body.model, (*model.names, *model.adapters))
    name = model.response_model_name(None if served_name else body.model)
    posed = [
        PromptQuestion(
            SYSTEMONE_QUESTION_TYPES[question.type], id, [to_prompt_text(question.instructions)], question.options
        )
        for id, question in body.questions.items()
    ]
    state = [Message(role="user", content=to_prompt_text(body.state))]
    call = DecisionApi(SystemOneWriter, "systemone_", {"messages": "state"}, options_are_distinct=False)
    return call.resolve_questions(body, name, state, posed, model, config)


LABEL_SCORE_FIELD_NAMES = {"prompt": "items", "logprob_token_ids": "label_token_ids"}


def resolve_score_or_label_scores(body_bytes: bytes, model: ServedModel, config: ServerConfig) -> VectorSpec | Resolved:
    """A body with label_token_ids is SGLang's, all others are vLLM's. Raises ModelNotFound, and InvalidRequest naming
    the parameter."""
    body = read_json_object(body_bytes)
    if body.get("label_token_ids") is None:
        return resolve_score(body_bytes, model, config)
    return resolve_label_scores(validate_body(body, LabelScoreRequest), model, config)


def resolve_label_scores(body: LabelScoreRequest, model: ServedModel, config: ServerConfig) -> Resolved:
    """Raises as above."""
    items = [body.items] if isinstance(body.items, str) else body.items
    if len(items) * len(body.query) + sum(map(len, items)) > MAX_PROMPT_ENTRIES:
        raise InvalidRequest("items: too many behind so long a query: ask for fewer at once", param="items")
    prompts: list[str | list[int]] = []
    for item in items:
        if isinstance(item, str) and isinstance(body.query, str):
            prompts.append(item + body.query if body.item_first else body.query + item)
        elif isinstance(item, list) and isinstance(body.query, list):
            prompts.append([*item, *body.query] if body.item_first else [*body.query, *item])
        else:
            raise InvalidRequest("items must be texts where the query is one, and else token ids", param="items")
    fields = {"prompt": prompts, "logprob_token_ids": body.label_token_ids, "logprobs": 0}
    fields |= {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
    with rename_error_fields(LABEL_SCORE_FIELD_NAMES):
        call = resolve_completion_request(
            validate_body({**fields, **body.shared_fields}, CompletionRequest),
            model,
            config,
            writer=LabelScoresWriter,
            ignored=body.find_ignored_params(),
        )
    question = OptionQuestion("shares" if body.apply_softmax else "labels", None, (), body.label_token_ids)
    spec = replace(call.spec, questions=[question])
    return rename_request_fields(replace(call, spec=spec, receipts=False), LABEL_SCORE_FIELD_NAMES)
