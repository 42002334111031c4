from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel

REFERENCES = "#/components/schemas/{model}"


class BodySchema(dict[str, Any]):
    """`openapi_extra` of a route that parses its body itself. A body must match one of the models passed to the
    constructor.
    """

    def __init__(self, *models: type[BaseModel]) -> None:
        references = [{"$ref": REFERENCES.format(model=model.__name__)} for model in models]
        schema = references[0] if len(models) == 1 else {"anyOf": references}
        super().__init__(requestBody={"required": True, "content": {"application/json": {"schema": schema}}})
        self.models = models


def describe_bodies(app: FastAPI, routers: Iterable[APIRouter]) -> None:
    describe = app.openapi
    extras = [route.openapi_extra for router in routers for route in router.routes if isinstance(route, APIRoute)]
    models = {model: None for extra in extras if isinstance(extra, BodySchema) for model in extra.models}

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schemas = describe().setdefault("components", {}).setdefault("schemas", {})
            for model in models:
                schema = model.model_json_schema(ref_template=REFERENCES)
                schemas.update(schema.pop("$defs", {}))
                schemas[model.__name__] = schema
        return describe()

    app.openapi = openapi  # type: ignore[method-assign]
