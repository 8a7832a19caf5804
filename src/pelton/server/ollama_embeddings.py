"""Ollama's /api/embed and /api/embeddings."""

from __future__ import annotations

import secrets
import time
from typing import Any, NamedTuple

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from pelton import options
from pelton.request import EmbeddingParams, Request, Truncation
from pelton.server import ollama_types as wire
from pelton.server.answer import ignored_params, using
from pelton.server.context import current
from pelton.server.embedding import Vectors, embed_all, floats, inputs_of
from pelton.server.models import Models
from pelton.server.ollama_prompt import check_context, ignored_keep_alive, keep_alive
from pelton.server.ollama_reply import nanoseconds
from pelton.server.operation import Operation, post
from pelton.server.wire import JSON, read


def operations(models: Models) -> tuple[Operation, ...]:
    """The operations over these models."""

    async def embed(http: HTTPRequest) -> Response:
        body, extras = await read(http, wire.OllamaEmbedRequest)
        truncation = None if body.truncate is False else Truncation()
        params = EmbeddingParams(dimensions=body.dimensions or None, truncation=truncation)
        made = await _embedded(models, http, body, extras, body.input, params)
        return JSON(
            wire.OllamaEmbeddings(
                model=body.model,
                embeddings=[floats(each) for each in made.answer.vectors],
                total_duration=nanoseconds(time.perf_counter() - current().began),
                load_duration=nanoseconds(made.load_seconds),
                prompt_eval_count=made.answer.usage.prompt_tokens,
                ignored_params=made.ignored or None,
                warnings=[*made.answer.warnings, *made.warnings] or None,
            )
        )

    async def embeddings(http: HTTPRequest) -> Response:
        body, extras = await read(http, wire.OllamaEmbeddingsRequest)
        params = EmbeddingParams(is_normalized=False, truncation=Truncation())
        made = await _embedded(models, http, body, extras, body.prompt or "", params)
        return JSON(
            wire.OllamaEmbedding(
                embedding=floats(b"".join(made.answer.vectors)),
                ignored_params=made.ignored or None,
                warnings=[*made.answer.warnings, *made.warnings] or None,
            )
        )

    return (
        post("/api/embed", embed, "Embed texts, in Ollama's form", wire.OllamaEmbedRequest, wire.OllamaEmbeddings),
        post(
            "/api/embeddings",
            embeddings,
            "Embed a text, in Ollama's older form",
            wire.OllamaEmbeddingsRequest,
            wire.OllamaEmbedding,
        ),
    )


class _Made(NamedTuple):
    answer: Vectors
    load_seconds: float
    ignored: list[str]
    warnings: tuple[str, ...]


async def _embedded(
    models: Models,
    http: HTTPRequest,
    body: wire.OllamaEmbedRequest | wire.OllamaEmbeddingsRequest,
    extras: dict[str, Any],
    given: str | list[str],
    params: EmbeddingParams,
) -> _Made:
    """The answer. Without a text a request loads its model."""
    meant = options.meaning(body.options or {})
    without_meaning = {f"options.{name}": True for name in body.options or {} if name != "num_ctx"}
    ignored = ignored_params(extras | without_meaning | ignored_keep_alive(body.keep_alive), {})
    base = Request(
        id=f"ollama-{secrets.token_hex(12)}",
        model=body.model,
        embedding=params,
        priority=body.priority or 0,
        timeout=body.timeout,
        queue_timeout=body.queue_timeout,
        cache_salt=body.cache_salt or "",
    )
    inputs = inputs_of([given] if isinstance(given, str) else [*given], "input") if given else ()
    asked_at = time.perf_counter()
    async with using(models, http, body.model, keep_alive=keep_alive(body.keep_alive)) as service:
        load_seconds = time.perf_counter() - asked_at
        answer = await embed_all(models, http, service, base, inputs)
        return _Made(answer, load_seconds, ignored, check_context(meant.context, service.context))
