"""A row of a table of endpoints."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel

from quire.server.access.admission import GenerationRoute, RateLimitedRoute
from quire.server.pipeline.answer import Resolution
from quire.server.pipeline.resolve import Resolver


@dataclass(frozen=True, slots=True)
class Endpoint:
    path: str
    name: str
    """The name of the operation in the API's description."""
    description: str
    resolve: Resolver[Resolution]
    """Makes of the body what is to be computed, or the answer itself."""
    body_models: tuple[type[BaseModel], ...]
    """The models, one of which a body must match."""
    route_class: type[RateLimitedRoute] = GenerationRoute
    in_schema: bool = True
    """Whether the API's description has it: not where it is another name of one that is there."""
