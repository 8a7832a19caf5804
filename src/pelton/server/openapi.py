"""/openapi.json (OpenAPI 3.1), made of what the dialects declare."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from pelton import __version__
from pelton.server.operation import Dialect, Operation

_PARAMETER = re.compile(r"{(\w+)(?::\w+)?}")
_STREAMED = {
    "text/event-stream": {
        "type": "object",
        "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
        "required": ["data"],
    }
}
"""By media type: each event of a stream; the others are texts."""
_REF = "#/components/schemas/{name}"


def document(dialects: Iterable[Dialect]) -> dict[str, Any]:
    """The whole document."""
    dialects = tuple(dialects)
    operations = [
        (operation, dialect.error) for dialect in dialects for operation in dialect.operations if operation.is_offered
    ]
    types = {
        each
        for operation, error in operations
        for each in (operation.body, operation.form, operation.answer, error)
        if each is not None
    }
    ordered = sorted(types, key=str)
    schemas, components = msgspec.json.schema_components(ordered, ref_template=_REF)
    known = dict(zip(ordered, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for operation, error in operations:
        path = _PARAMETER.sub(r"{\1}", operation.path)
        paths.setdefault(path, {})[operation.method.lower()] = _operation(operation, error, known)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Pelton", "version": __version__},
        "paths": paths,
        "security": [{"bearer": []}, {"key": []}],
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(operation: Operation, error: Any, known: dict[Any, Any]) -> dict[str, Any]:
    answers = {"application/json": {"schema": known[operation.answer]}} if operation.answer is not None else {}
    answers |= {
        media_type: {"schema": _STREAMED.get(media_type, {"type": "string"})} for media_type in operation.streams
    }
    failed = {"description": "What is wrong.", "content": {"application/json": {"schema": known[error]}}}
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": re.sub(r"\W+", "_", f"{operation.method.lower()}{operation.path}").strip("_"),
        "responses": {"200": {"description": "The answer.", "content": answers}, "4XX": failed, "5XX": failed},
    }
    if parameters := [*_path_parameters(operation), *_query_parameters(operation)]:
        described["parameters"] = parameters
    for media_type, kind in (("application/json", operation.body), ("multipart/form-data", operation.form)):
        if kind is not None:
            described["requestBody"] = {"required": True, "content": {media_type: {"schema": known[kind]}}}
    if operation.is_open:
        described["security"] = []
        described["responses"]["503"] = {"description": "It drains.", "content": answers}
    return described


def _path_parameters(operation: Operation) -> list[dict[str, Any]]:
    schema = {"type": "string", "minLength": 1}
    return [
        {"name": name, "in": "path", "required": True, "schema": schema} for name in _PARAMETER.findall(operation.path)
    ]


def _query_parameters(operation: Operation) -> list[dict[str, Any]]:
    if operation.query is None:
        return []
    return [
        {
            "name": field.encode_name,
            "in": "query",
            "required": field.required,
            "schema": msgspec.json.schema(field.type),
        }
        for field in msgspec.structs.fields(operation.query)
    ]
