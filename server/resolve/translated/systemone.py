"""From the questions of the System One API to prompts that each end where one token answers."""

from __future__ import annotations

from collections.abc import Mapping

from quire.server.config import ServerConfig
from quire.server.generation.answers.decisions import SystemOneWriter
from quire.server.generation.spec import QuestionType
from quire.server.protocol.items import Message
from quire.server.protocol.questions.systemone import SystemOneRequest, alias_of_own, shown
from quire.server.resolve.common import Resolved
from quire.server.resolve.parse import parse
from quire.server.resolve.translated.decisions import Asking, Posed
from quire.server.served_model import ServedModel

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
