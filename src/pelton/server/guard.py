"""What stands before every route, as pure ASGI: request ids, CORS, keys, the bound on headers, and no new work while
draining."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from time import perf_counter

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pelton.errors import ClientGone, HeadersTooLarge, InvalidRequest, PeltonError, Unavailable
from pelton.logs import fields
from pelton.server.body import Bounds
from pelton.server.context import Context, current, enter
from pelton.server.keys import ANYONE, KeyRing
from pelton.server.limits import Limits
from pelton.server.store import Store
from pelton.server.web_pages import WebPages

access = logging.getLogger("pelton.access")
UNLOGGED = ("/health", "/metrics")
"""Routes that are asked every few seconds and whose answers nobody looks up."""
_GOOD_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
ErrorWriter = Callable[[PeltonError, Scope, Receive, Send], Awaitable[None]]

STRICT_HEADER = "x-pelton-strict-params"
EXPOSED = (
    "x-request-id",
    "request-id",
    "retry-after",
    *(f"x-ratelimit-{name}-{kind}" for kind in ("requests", "tokens") for name in ("limit", "remaining", "reset")),
)
"""Headers of answers that scripts of other origins may read."""
PREFLIGHT_SECONDS = 600
"""How long a browser may remember what it was allowed."""
MAX_HEADERS = 200
"""How many a request may have."""


class Guard:
    """The outermost layer. After `drain` new work is refused with 503, and so is a request whose body has not all
    come. `num_active` counts answers under way."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: KeyRing,
        store: Store | None,
        bounds: Bounds,
        write_error: ErrorWriter,
        open_paths: frozenset[str],
        origins: Sequence[str] = (),
        hosts: Sequence[str] = (),
        count: Callable[[str, str, str], None],
        max_headers: int,
        is_strict: bool,
    ) -> None:
        """`open_paths` need no key and are answered while draining; `origins` are those of CORS, `hosts` further names
        of the server; `count` hears of each request's route, method and status."""
        self._app = app
        self._keys = keys
        self._store = store
        self._bounds = bounds
        self._write_error = write_error
        self._open_paths = open_paths
        self._count = count
        self._max_headers = max_headers
        self._is_strict = is_strict
        self._pages = WebPages(origins, hosts)
        self._door: ASGIApp = self._checked
        if origins:
            self._door = CORSMiddleware(
                self._checked,
                allow_origins=origins,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=EXPOSED,
                max_age=PREFLIGHT_SECONDS,
            )
        self.num_active = 0

    @property
    def is_draining(self) -> bool:
        """Is new work refused?"""
        return self._bounds.is_draining

    def drain(self) -> None:
        """Refuse new work from now on."""
        self._bounds.drain()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run one request (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        context = Context(
            id=given if _GOOD_ID.fullmatch(given) else secrets.token_hex(12),
            is_strict=_is_on(headers.get(STRICT_HEADER), self._is_strict),
        )
        context.trace = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        enter(context)

        status = ClientGone.status  # before it was told one

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                told = MutableHeaders(scope=message)
                told["x-request-id"] = context.id
                told["request-id"] = context.id  # as Anthropic's clients read it
                told.raw.extend(context.limits.headers())
            await send(message)

        self.num_active += 1
        try:
            await self._door(scope, receive, send_with_headers)
        finally:
            self.num_active -= 1
            self._count(context.route or "none", scope["method"], str(status))
            if context.route not in UNLOGGED:
                _log(context, scope, status)

    async def _checked(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Behind CORS, so that a script may read what is refused here, too."""
        try:
            self._check(scope)
        except PeltonError as error:
            await self._write_error(error, scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        sizes = [len(name) + len(value) for name, value in scope["headers"]]
        if len(sizes) > MAX_HEADERS or sum(sizes) > self._max_headers:
            raise HeadersTooLarge(f"a request may have {MAX_HEADERS} headers of {self._max_headers} bytes in all")
        headers = Headers(scope=scope)
        if headers.get("upgrade", "").lower() == "websocket":
            raise InvalidRequest("there are no WebSockets here: POST the request, with stream: true for a stream")
        if scope["path"] in self._open_paths:
            return
        if self.is_draining:
            raise Unavailable("the server is shutting down")
        context = current()
        context.key = self._keys.authenticate(_texts(headers))
        if context.key is ANYONE:
            self._pages.check(scope["method"], headers)
        context.limits = Limits(self._store, context.key)


def _log(context: Context, scope: Scope, status: int) -> None:
    """One line for each request; its path as it came, without what could break a line, and without its query."""
    usage = context.usage
    access.info(
        "%s %s %d",
        scope["method"],
        scope["raw_path"].decode("ascii", "replace")[:200],
        status,
        extra=fields(
            seconds=round(perf_counter() - context.began, 4),
            key=context.key.name or None,
            model=context.model,
            prompt_tokens=None if usage is None else usage.prompt_tokens,
            cached_tokens=None if usage is None else usage.cached_tokens,
            completion_tokens=None if usage is None else usage.completion_tokens,
        ),
    )


def _is_on(header: str | None, default: bool) -> bool:
    return default if header is None else header.strip().lower() in {"1", "true", "yes", "on"}


def _texts(headers: Headers) -> list[str]:
    """What a request offers as its key."""
    kind, _, text = headers.get("authorization", "").partition(" ")
    texts = [text.strip()] if kind.lower() == "bearer" else []
    return [each for each in (*texts, headers.get("x-api-key", "")) if each]
