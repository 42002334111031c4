"""From the questions of the System One API to prompts that each end where one token answers."""

from __future__ import annotations

from quire.server.config import ServerConfig
from quire.server.generation.questions import Question
from quire.server.protocol.common import ignored_header
from quire.server.protocol.items import Message
from quire.server.protocol.questions.systemone import Asked, Noul, Score, SystemOneRequest, alias_of_own, shown
from quire.server.resolve.checks import check_texts
from quire.server.resolve.common import Resolved
from quire.server.resolve.parse import parse
from quire.server.resolve.translated.decisions import Posed, labels_of, posed_call
from quire.server.served_model import ServedModel

NAMES = {"messages": "state"}
ASKS = {"noul": "Is this true?", "choice": "Which one applies?", "score": "Which level applies?"}


def resolve_systemone(given: bytes, model: ServedModel, config: ServerConfig) -> Resolved:
    """Raises ModelNotFound, and InvalidRequest naming the parameter."""
    body = parse(given, SystemOneRequest)
    own = alias_of_own(body.model, (*model.names, *model.adapters))
    name = model.answer_name(None if own else body.model)
    headers = ignored_header(body.ignored_params(), config.strict)
    labels = labels_of(model.tokenizer, max(len(asked.options) for asked in body.questions.values()))
    questions = [question_of(id, asked, list(labels.values())) for id, asked in body.questions.items()]
    check_texts([[id, *question.options] for id, question in zip(body.questions, questions, strict=True)], "questions")
    posed = [Posed([shown(asked.instructions)], ASKS[asked.type], asked.options) for asked in body.questions.values()]
    state = [Message(role="user", content=shown(body.state))]
    told = (name, headers, model, config)
    return posed_call(body, state, posed, questions, labels, *told, names=NAMES, id_prefix="systemone_")


def question_of(id: str, asked: Asked, tokens: list[int]) -> Question:
    kind = "predicate" if isinstance(asked, Noul) else "score" if isinstance(asked, Score) else "choice"
    options = [value for value, _ in asked.options]
    return Question(kind, id, options, tokens[: len(options)])  # type: ignore[arg-type]
