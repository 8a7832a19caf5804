"""What a dialect offers: its operations, and how it writes errors.

Whoever adds an operation gets keys, scopes, rate limits, bounds on bodies, request ids, CORS, metrics and the entry in
/openapi.json with it. Whoever adds a dialect gets all errors in its own form, also those from before a route was found.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from starlette.requests import Request as HTTPRequest
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pelton.errors import PeltonError
from pelton.server import body, keys
from pelton.server.context import current

Method = Literal["GET", "POST", "PUT", "DELETE", "HEAD"]
Run = Callable[[HTTPRequest], Awaitable[ASGIApp]]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One method of one path."""

    method: Method
    path: str
    """As Starlette writes them: /v1/models/{name:path}."""
    run: Run
    """Gives the answer. What is wrong with the request is raised."""
    summary: str
    scope: keys.Scope = "inference"
    """What the caller's key must be for."""
    body: Any = None
    """The type of its JSON body."""
    form: Any = None
    """The type of its body, where that is a form (multipart/form-data)."""
    query: Any = None
    """The type of its query."""
    answer: Any = None
    """The type of its JSON answer."""
    streams: tuple[str, ...] = ()
    """Media types that the answer may have besides JSON."""
    is_offered: bool = True
    """False: all that it does is to say why it does nothing. The description leaves it out."""
    is_file: bool = False
    """Is its body a file, of any size?"""
    is_open: bool = False
    """Does it answer whoever asks, without a key and while the server drains?"""

    @property
    def is_limited(self) -> bool:
        """Does it count as one of the requests that a key may make in a minute?"""
        return self.scope == "inference" and self.method == "POST"


def get(path: str, run: Run, summary: str, answer: Any = None, **more: Any) -> Operation:
    """An operation that reads. `more`: fields of `Operation`."""
    return Operation(method="GET", path=path, run=run, summary=summary, answer=answer, **more)


def post(path: str, run: Run, summary: str, body: Any = None, answer: Any = None, **more: Any) -> Operation:
    """An operation that does something, with what its body asks for. `more`: fields of `Operation`."""
    return Operation(method="POST", path=path, run=run, summary=summary, body=body, answer=answer, **more)


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """Operations, and the form of errors of all paths that begin with one of the prefixes; the longest one decides."""

    operations: tuple[Operation, ...]
    prefixes: tuple[str, ...]
    error_body: Callable[[PeltonError], Any]
    error: Any
    """The type that `error_body` gives."""
    error_status: Callable[[PeltonError], int] = lambda error: error.status


class ErrorForms:
    """The form of each path's errors."""

    def __init__(self, dialects: tuple[Dialect, ...], default: Dialect) -> None:
        owners = [(prefix, dialect) for dialect in dialects for prefix in dialect.prefixes]
        self._owners = sorted(owners, key=lambda owner: -len(owner[0]))
        self._default = default

    def write(self, path: str, error: PeltonError) -> tuple[int, Any]:
        """An error's status and what its JSON is."""
        dialect = self._default
        for prefix, owner in self._owners:
            if path == prefix or path.startswith(f"{prefix}/"):
                dialect = owner
                break
        return dialect.error_status(error), dialect.error_body(error)


def route(operation: Operation, bounds: body.Bounds) -> Route:
    """The operation as Starlette's router takes it."""
    return Route(operation.path, _Served(operation, bounds), methods=[operation.method])


class _Served:
    """An operation as an ASGI application."""

    def __init__(self, operation: Operation, bounds: body.Bounds) -> None:
        self._operation = operation
        self._bounds = bounds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request (ASGI)."""
        operation, context = self._operation, current()
        context.route = operation.path
        if not operation.is_open:
            context.require(operation.scope)
            if operation.is_limited:
                await context.limits.take("requests", 1)
        receive = self._bounds.bound(scope, receive, is_file=operation.is_file)
        answer = await operation.run(HTTPRequest(scope, receive, send))
        await answer(scope, receive, send)
