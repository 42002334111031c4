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
from quire.server.generation.answers.decisions import DecisionsWriter, LabelScoresWriter, SystemOneWriter
from quire.server.generation.answers.writer import MakesWriter
from quire.server.generation.spec import Prompt, Question, QuestionType
from quire.server.generation.vectors import VectorSpec
from quire.server.protocol.bounds import MAX_ENTRIES
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.common import ignored_header
from quire.server.protocol.completions import CompletionRequest
from quire.server.protocol.items import Item, Message
from quire.server.protocol.questions.decisions import Asked, Choice, DecisionRequest, Score
from quire.server.protocol.questions.label_scores import LabelScoreRequest
from quire.server.protocol.questions.systemone import SystemOneRequest, alias_of_own, shown
from quire.server.protocol.translated import TranslatedBody
from quire.server.resolve.chat import PROMPT_END
from quire.server.resolve.checks import check_length, check_texts
from quire.server.resolve.common import Resolved, resolved
from quire.server.resolve.completions import completion_call
from quire.server.resolve.pairs import resolve_score
from quire.server.resolve.parse import parse, read_object, validated
from quire.server.resolve.prompts import chat_prompt
from quire.server.resolve.translated.as_chat import Places, in_own_words, named_by_caller, placed
from quire.server.resolve.translated.items import texts_of, turns_of
from quire.server.served_model import ServedModel

NAMES = {"messages": "input"}
ASKS: Mapping[QuestionType, str] = {
    "predicate": "Is this true?",
    "choice": "Which one applies?",
    "score": "Which level applies?",
}


def resolve_decisions(given: bytes, model: ServedModel, config: ServerConfig) -> Resolved:
    """Raises ModelNotFound, and InvalidRequest naming the parameter."""
    body = parse(given, DecisionRequest)
    name = model.answer_name(body.model)
    posed = [Posed(each.type, each.name, texts_of(each.instructions), options_of(each)) for each in body.questions]
    items: Sequence[Item] = body.input if isinstance(body.input, list) else [Message(role="user", content=body.input)]
    call = Asking(DecisionsWriter, "decision_", NAMES, distinct=True)
    return call.resolved(body, name, items, posed, model, config)


@dataclass(frozen=True, slots=True)
class Posed:
    """A question as the model reads it."""

    type: QuestionType
    name: str | None
    instructions: Sequence[str]
    options: Sequence[tuple[str | bool, str]]
    """Each with its description."""

    def text(self, labels: Iterable[str]) -> str:
        lines = [
            f"{label}) {str(value).lower() if isinstance(value, bool) else value}{': ' if told else ''}{told}"
            for label, (value, told) in zip(labels, self.options, strict=False)
        ]
        end = ["", "Answer with the letter alone."]
        return "\n".join([*self.instructions, "", ASKS[self.type], *lines, *end]).lstrip("\n")

    def question(self, tokens: Sequence[int], *, distinct: bool) -> Question:
        """Raises InvalidRequest for an option that is there twice, where options must be `distinct`."""
        options = [value for value, _ in self.options]
        if distinct and len({(type(value), value) for value in options}) < len(options):
            raise InvalidRequest("questions: each option must be unique", param="questions")
        return Question(self.type, self.name, options, tokens[: len(options)])


@dataclass(frozen=True, slots=True)
class Asking:
    """The differences between the APIs that ask questions."""

    writer: MakesWriter
    id_prefix: str
    names: Mapping[str, str]
    """See named_by_caller."""
    distinct: bool
    """Whether a question's options must be distinct."""

    def resolved(
        self,
        body: TranslatedBody,
        name: str,
        items: Sequence[Item],
        posed: Sequence[Posed],
        model: ServedModel,
        config: ServerConfig,
    ) -> Resolved:
        """A call that poses questions about these items; `name`: the model's in the answer. Raises InvalidRequest,
        naming the parameter."""
        headers = ignored_header(body.ignored_params(), config.strict)
        labels = labels_of(model.tokenizer, max(len(each.options) for each in posed))
        ids = tuple(labels.values())
        questions = [each.question(ids, distinct=self.distinct) for each in posed]
        check_texts([[question.name, *question.options] for question in questions], "questions")
        with named_by_caller(self.names) as places:
            chats = [as_chat(body, items, each.text(labels), model, places) for each in posed]
            prompts = [answerable(chats[0], model)]
            if len(prompts[0].ids) * len(chats) > MAX_ENTRIES:
                raise InvalidRequest("questions: too many about so long an input: ask fewer at once", param="questions")
            prompts += [answerable(chat, model) for chat in chats[1:]]
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


def labels_of(tokenizer: Tokenizer, count: int) -> dict[str, int]:
    """So many short texts that are one token each: letters first, then pairs and triples of letters. Raises
    InvalidRequest."""
    found = dict(islice(_single_tokens(tokenizer), count))
    if len(found) < count:
        raise InvalidRequest(
            f"questions: this model's vocabulary can tell {len(found)} options apart, got {count}", param="questions"
        )
    return found


def _single_tokens(tokenizer: Tokenizer) -> Iterator[tuple[str, int]]:
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


def options_of(asked: Asked) -> list[tuple[str | bool, str]]:
    """What may be answered, each with its description."""
    if isinstance(asked, Choice):
        return [(option.value, option.description) for option in asked.choices]
    if isinstance(asked, Score):
        return [(level.label, level.description) for level in asked.levels]
    return [("yes", ""), ("no", "")]


def as_chat(
    body: TranslatedBody, items: Sequence[Item], question: str, model: ServedModel, places: Places
) -> ChatRequest:
    """The conversation with the question as its last message, which one of the labels answers."""
    asked = Message(role="user", content=question)
    turns = turns_of([*items, asked], "", developer="developer" in model.formats.template)
    turns = placed(turns, places)
    fields = body.extensions()
    if model.formats.thinking.off:
        given = fields.get("chat_template_kwargs", {})
        fields["chat_template_kwargs"] = {**model.formats.thinking.off, **given} if isinstance(given, dict) else given
    return validated({**fields, "messages": turns}, ChatRequest)


def answerable(chat: ChatRequest, model: ServedModel) -> Prompt:
    """The prompt; one that the template begins to think in ends behind the thinking. Raises InvalidRequest."""
    prompt, reasoning = chat_prompt(chat, model, None, trusted=False), model.formats.reasoning
    if reasoning is None or not reasoning.begun(
        model.tokenizer.decode(prompt.ids[-PROMPT_END:], skip_special_tokens=False)
    ):
        return prompt
    closing = model.tokenizer.encode(f"{reasoning.end}\n\n", add_special_tokens=False)
    ended = replace(prompt, ids=[*prompt.ids, *closing])
    check_length(ended.ids, model.context_length, "input")
    return ended


TYPES: Mapping[str, QuestionType] = {"noul": "predicate", "choice": "choice", "score": "score"}


def resolve_systemone(given: bytes, model: ServedModel, config: ServerConfig) -> Resolved:
    """Raises ModelNotFound, and InvalidRequest naming the parameter."""
    body = parse(given, SystemOneRequest)
    own = alias_of_own(body.model, (*model.names, *model.adapters))
    name = model.answer_name(None if own else body.model)
    posed = [
        Posed(TYPES[asked.type], id, [shown(asked.instructions)], asked.options) for id, asked in body.questions.items()
    ]
    state = [Message(role="user", content=shown(body.state))]
    call = Asking(SystemOneWriter, "systemone_", {"messages": "state"}, distinct=False)
    return call.resolved(body, name, state, posed, model, config)


LABEL_NAMES = {"prompt": "items", "logprob_token_ids": "label_token_ids"}


def resolve_scores(given: bytes, model: ServedModel, config: ServerConfig) -> VectorSpec | Resolved:
    """A body with label_token_ids is SGLang's, all others are vLLM's. Raises ModelNotFound, and InvalidRequest naming
    the parameter."""
    body = read_object(given)
    if body.get("label_token_ids") is None:
        return resolve_score(given, model, config)
    return label_scores(validated(body, LabelScoreRequest), model, config)


def label_scores(body: LabelScoreRequest, model: ServedModel, config: ServerConfig) -> Resolved:
    """Raises as above."""
    items = [body.items] if isinstance(body.items, str) else body.items
    if len(items) * len(body.query) + sum(map(len, items)) > MAX_ENTRIES:
        raise InvalidRequest("items: too many behind so long a query: ask for fewer at once", param="items")
    prompts: list[str | list[int]] = []
    for item in items:
        if isinstance(item, str) and isinstance(body.query, str):
            prompts.append(item + body.query if body.item_first else body.query + item)
        elif isinstance(item, list) and isinstance(body.query, list):
            prompts.append([*item, *body.query] if body.item_first else [*body.query, *item])
        else:
            raise InvalidRequest("items must be texts where the query is one, and else token ids", param="items")
    asked = {"prompt": prompts, "logprob_token_ids": body.label_token_ids, "logprobs": 0}
    asked |= {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
    with named_by_caller(LABEL_NAMES):
        call = completion_call(
            validated({**asked, **body.same}, CompletionRequest),
            model,
            config,
            writer=LabelScoresWriter,
            ignored=body.ignored_params(),
        )
    question = Question("shares" if body.apply_softmax else "labels", None, (), body.label_token_ids)
    spec = replace(call.spec, questions=[question])
    return in_own_words(replace(call, spec=spec, receipts=False), LABEL_NAMES)
