from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire.server.config import ServerConfig
from quire.server.generation.resolved_request import QuestionType
from quire.server.generation.response_writers.decisions import DecisionsWriter, SystemOneApiWriter
from quire.server.protocol.questions.decisions import AnyQuestion, Choice, DecisionRequest, Score
from quire.server.protocol.questions.systemone import SystemOneRequest, is_model_alias, to_prompt_text
from quire.server.protocol.response_items import InputItem, Message
from quire.server.resolve.other_apis.input_items import content_texts
from quire.server.resolve.other_apis.option_questions import DecisionApiVariant, PromptQuestion
from quire.server.resolve.parse import parse_body
from quire.server.resolve.resolved_generation import AnswerForm, ResolvedGeneration
from quire.server.served_model import ServedModel

DECISIONS_API = DecisionApiVariant(
    AnswerForm(DecisionsWriter, "decision_", {"messages": "input"}), options_are_distinct=True
)
SYSTEMONE_API = DecisionApiVariant(
    AnswerForm(SystemOneApiWriter, "systemone_", {"messages": "state"}), options_are_distinct=False
)
SYSTEMONE_QUESTION_TYPES: Mapping[str, QuestionType] = {"noul": "predicate", "choice": "choice", "score": "score"}


def resolve_decisions(body_bytes: bytes, model: ServedModel, config: ServerConfig) -> ResolvedGeneration:
    body = parse_body(body_bytes, DecisionRequest)
    name = model.resolve_model_name(body.model)
    posed = [
        PromptQuestion(each.type, each.name, content_texts(each.instructions), question_options(each))
        for each in body.questions
    ]
    items: Sequence[InputItem] = (
        body.input if isinstance(body.input, list) else [Message(role="user", content=body.input)]
    )
    return DECISIONS_API.resolve_questions(body, name, items, posed, model, config)


def question_options(question: AnyQuestion) -> list[tuple[str | bool, str]]:
    if isinstance(question, Choice):
        return [(option.value, option.description) for option in question.choices]
    if isinstance(question, Score):
        return [(level.label, level.description) for level in question.levels]
    return [("yes", ""), ("no", "")]


def resolve_systemone_request(body_bytes: bytes, model: ServedModel, config: ServerConfig) -> ResolvedGeneration:
    body = parse_body(body_bytes, SystemOneRequest)
    served_name = is_model_alias(body.model, (*model.names, *model.adapters))
    name = model.resolve_model_name(None if served_name else body.model)
    posed = [
        PromptQuestion(
            SYSTEMONE_QUESTION_TYPES[question.type], id, [to_prompt_text(question.instructions)], question.options
        )
        for id, question in body.questions.items()
    ]
    state = [Message(role="user", content=to_prompt_text(body.state))]
    return SYSTEMONE_API.resolve_questions(body, name, state, posed, model, config)
