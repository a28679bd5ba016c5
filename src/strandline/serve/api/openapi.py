"""The OpenAPI document of the state and its actions, made of the routes."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from strandline.serve.api.routes import ROUTES, StateRoute
from strandline.serve.api.state import NAME


def openapi(version: str) -> dict[str, Any]:
    """The document, of OpenAPI 3.1.

    >>> sorted(openapi("1.0")["paths"]["/v1/logs/{log}/trim"])
    ['post']
    """
    bodies = [route.body for route in ROUTES if route.body is not None]
    _, schemas = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    problem = {
        "type": "object",
        "required": ["type", "title", "status", "detail"],
        "properties": {name: {"type": "string"} for name in ("type", "title", "detail")}
        | {"status": {"type": "integer"}},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Strandline", "version": version},
        "paths": paths,
        "components": {
            "schemas": {**schemas, "Problem": problem},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}, {}],
    }


def _operation(route: StateRoute) -> dict[str, Any]:
    names = re.findall(r"\{(\w+)\}", route.path)
    failed = {
        "description": "What is wrong, and what to do.",
        "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
    found: dict[str, Any] = {
        "summary": route.summary,
        "description": f"Takes the role {route.access}.",
        "parameters": [{"name": name, "in": "path", "required": True, "schema": _of_name(name)} for name in names],
        "responses": {
            "200": {"description": "The answer.", "content": {"application/json": {"schema": {"type": "object"}}}},
            "default": failed,
        },
    }
    if route.body is not None:
        schema = {"$ref": f"#/components/schemas/{route.body.__name__}"}
        found["requestBody"] = {
            "required": any(field.required for field in msgspec.structs.fields(route.body)),
            "content": {"application/json": {"schema": schema}},
        }
    return found


def _of_name(name: str) -> dict[str, Any]:
    return {"type": "string", **({"enum": ["pause", "resume"]} if name == "verb" else {"pattern": NAME})}
