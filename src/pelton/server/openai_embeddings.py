"""OpenAI's /v1/embeddings."""

from __future__ import annotations

import secrets
from base64 import b64encode

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from pelton.errors import InvalidRequest
from pelton.request import EmbeddingParams, Request, Truncation
from pelton.server import openai_reply_types as replies
from pelton.server import openai_types as wire
from pelton.server.answer import ignored_params, using
from pelton.server.embedding import embed_all, floats, inputs_of
from pelton.server.models import Models
from pelton.server.operation import Operation, post
from pelton.server.wire import JSON, read


def operation(models: Models) -> Operation:
    """The operation over these models."""

    async def embeddings(http: HTTPRequest) -> Response:
        body, extras = await read(http, wire.EmbeddingRequest)
        ignored = ignored_params(extras, wire.NOT_OFFERED)
        inputs = inputs_of(body.input, "input")
        base = Request(
            id=f"embd-{secrets.token_hex(12)}",
            model=body.model,
            embedding=EmbeddingParams(
                pooling=body.pooling,
                dimensions=body.dimensions,
                is_normalized=body.normalize is not False,
                truncation=_truncation(body),
            ),
            priority=body.priority or 0,
            timeout=body.timeout,
            queue_timeout=body.queue_timeout,
            cache_salt=body.cache_salt or "",
            user=body.user,
        )
        async with using(models, http, body.model) as service:
            embedded = await embed_all(models, http, service, base, inputs)
        is_base64 = body.encoding_format == "base64"
        return JSON(
            replies.EmbeddingList(
                data=[
                    replies.Embedding(index=i, embedding=b64encode(each).decode() if is_base64 else floats(each))
                    for i, each in enumerate(embedded.vectors)
                ],
                model=body.model,
                usage=replies.EmbeddingUsage(
                    prompt_tokens=embedded.usage.prompt_tokens, total_tokens=embedded.usage.prompt_tokens
                ),
                ignored_params=ignored or msgspec.UNSET,
                warnings=embedded.warnings or msgspec.UNSET,
            )
        )

    return post("/v1/embeddings", embeddings, "Embed texts", wire.EmbeddingRequest, replies.EmbeddingList)


def _truncation(body: wire.EmbeddingRequest) -> Truncation | None:
    """vLLM's: -1 is as many tokens as the context has."""
    limit = body.truncate_prompt_tokens
    if limit is None:
        if body.truncation_side is not None:
            raise InvalidRequest("truncation_side needs truncate_prompt_tokens", param="truncation_side")
        return None
    if limit != -1 and limit < 1:
        message = f"truncate_prompt_tokens is {limit}, must be -1 or at least 1"
        raise InvalidRequest(message, param="truncate_prompt_tokens")
    return Truncation(limit=None if limit == -1 else limit, keeps="start" if body.truncation_side == "right" else "end")
