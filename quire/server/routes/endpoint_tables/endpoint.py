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
    description: str
    resolve: Resolver[Resolution]
    body_models: tuple[type[BaseModel], ...]
    """A body must match one of them."""
    route_class: type[RateLimitedRoute] = GenerationRoute
    in_schema: bool = True
    """False for an alias of another path."""
