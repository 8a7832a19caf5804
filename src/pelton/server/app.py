"""The HTTP application: what all dialects offer, behind one guard."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pelton.config import ServerConfig
from pelton.errors import InternalError, NotFound, PeltonError
from pelton.pool import Pool
from pelton.server import anthropic, batches, files, llamacpp, ollama, openai, openapi, prefix_cache, residents, tgi
from pelton.server.batch_runner import BatchRunner
from pelton.server.batch_store import BatchStore
from pelton.server.body import Bounds
from pelton.server.file_store import FileStore
from pelton.server.guard import Guard
from pelton.server.inside import Inside
from pelton.server.keys import KeyRing, KeyStore, given_keys
from pelton.server.ledger import Ledger
from pelton.server.meter import Meter
from pelton.server.metrics import Metrics
from pelton.server.models import Models
from pelton.server.openai_reply import error_body
from pelton.server.openai_reply_types import ErrorAnswer
from pelton.server.operation import Dialect, ErrorForms, get, route
from pelton.server.responses import Responses
from pelton.server.responses_store import ResponseStore
from pelton.server.store import Store
from pelton.server.store_opening import open_store
from pelton.server.tracing import Tracer
from pelton.server.wire import JSON

log = logging.getLogger("pelton.server")


class App:
    """The whole application: `guard` answers, with one of `operations`."""

    def __init__(self, pool: Pool, config: ServerConfig) -> None:
        """Raises `ConfigError` for keys, a store or a certificate that cannot be used."""
        self._store = open_store(config.store)
        made = None if self._store is None else KeyStore(self._store)
        self.keys = KeyRing(given_keys(config.api_key, config.api_key_file), made)
        self._ledger = None if self._store is None else Ledger(self._store)
        bounds = Bounds(config.max_body, config.body_timeout)
        self._metrics = Metrics(pool.services)
        self._tracer = Tracer() if config.otel else None
        meter = Meter(self._ledger, self._metrics, self._tracer, logs_prompts=config.log_prompts)
        models = Models(pool, meter)
        self._stored = ResponseStore(self._store, config)
        self._responses = Responses(models, self._stored)
        self._runner: BatchRunner | None = None
        kept = None if self._store is None else BatchStore(self._store, FileStore(self._store, config))
        dialects = (
            self._own(models),
            openai.dialect(
                models, *files.operations(None if kept is None else kept.files), *batches.operations(kept, self._wake)
            ),
            self._responses.dialect(),
            anthropic.dialect(models),
            llamacpp.dialect(models),
            ollama.dialect(models),
            tgi.dialect(models),
        )
        self._dialects = dialects
        self._openapi: dict[str, Any] | None = None
        """Made when it is first asked for."""
        self._errors = ErrorForms(dialects, default=dialects[0])
        self.operations = tuple(operation for dialect in dialects for operation in dialect.operations)
        inner = Starlette(
            routes=[route(operation, bounds) for operation in self.operations],
            exception_handlers={PeltonError: self._on_error, HTTPException: self._on_http, Exception: self._on_bug},
            lifespan=self._running,
        )
        self.guard = self._guarded(inner, bounds, config)
        if self._store is not None and kept is not None:
            self._runner = self._open_runner(self._store, kept, inner, models, config)

    def _guarded(self, inner: Starlette, bounds: Bounds, config: ServerConfig) -> Guard:
        return Guard(
            inner,
            keys=self.keys,
            store=self._store,
            bounds=bounds,
            write_error=self._write_error,
            open_paths=frozenset(operation.path for operation in self.operations if operation.is_open),
            origins=config.cors_origin,
            hosts=config.allowed_host,
            count=lambda route, method, status: self._metrics.http.labels(route, method, status).inc(),
            max_headers=config.max_headers,
            is_strict=config.strict_params,
        )

    def _open_runner(
        self, store: Store, kept: BatchStore, inner: Starlette, models: Models, config: ServerConfig
    ) -> BatchRunner:
        self._metrics.count_batches = kept.counts
        return BatchRunner(
            store,
            kept,
            inside=Inside(inner),
            keys=self.keys,
            models=models,
            config=config,
            is_draining=lambda: self.guard.is_draining,
            count=self._metrics.count_batch_request,
        )

    def _wake(self) -> None:
        if self._runner is not None:
            self._runner.wake()

    @asynccontextmanager
    async def _running(self, _: Starlette) -> AsyncIterator[None]:
        """What runs beside the answers, as long as the application does."""
        running = None if self._runner is None else asyncio.create_task(self._runner.run(), name="batches")
        try:
            yield
        finally:
            await self._responses.background.close()
            if running is not None:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

    @property
    def num_active(self) -> int:
        """Answers under way, also those that nobody waits for."""
        return self.guard.num_active + self._responses.background.num_running

    def _own(self, models: Models) -> Dialect:
        """What is no dialect's."""

        async def health(_: Request) -> Response:
            if self.guard.is_draining:
                return JSON(Health(status="draining"), status_code=503)
            return JSON(Health(status="ok"))

        check = get("/health", health, "Is the server up?", Health, is_open=True)

        async def metrics(request: Request) -> Response:
            text, media_type = self._metrics.expose(request.headers.get("accept", ""), models.sees)
            return Response(text, media_type=media_type)

        scrape = get(
            "/metrics",
            metrics,
            "Show Prometheus metrics",
            scope="metrics",
            streams=("text/plain", "application/openmetrics-text"),
        )

        async def describe(_: Request) -> Response:
            self._openapi = self._openapi or openapi.document(self._dialects)
            return JSON(self._openapi)

        describing = get("/openapi.json", describe, "Describe this API", dict[str, Any])
        return Dialect(
            operations=(check, scrape, describing, *prefix_cache.operations(models), *residents.operations(models)),
            prefixes=(),
            error_body=error_body,
            error=ErrorAnswer,
        )

    def close(self) -> None:
        """Write down what is left to be written."""
        if self._ledger is not None:
            self._ledger.close()
        self._stored.close()
        if self._store is not None:
            self._store.close()
        if self._tracer is not None:
            self._tracer.close()

    def _response(self, path: str, error: PeltonError) -> Response:
        headers = {} if error.retry_after is None else {"retry-after": str(max(1, math.ceil(error.retry_after)))}
        if error.status == 401:
            headers["www-authenticate"] = "Bearer"
        status, body = self._errors.write(path, error)
        return JSON(body, status_code=status, headers=headers)

    async def _on_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, PeltonError)
        return self._response(request.scope["path"], error)

    async def _on_http(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.scope["path"]
        response = self._response(path, NotFound(f"{request.method} {path[:200]} is not offered here"))
        response.status_code = error.status_code
        response.headers.update(error.headers or {})
        return response

    async def _on_bug(self, request: Request, error: Exception) -> Response:
        log.error("a request failed inside the server", exc_info=error)
        return self._response(request.scope["path"], InternalError("the server failed; its log says why"))

    async def _write_error(self, error: PeltonError, scope: Scope, receive: Receive, send: Send) -> None:
        await self._response(scope["path"], error)(scope, receive, send)


class Health(msgspec.Struct, frozen=True):
    """GET /health."""

    status: str
