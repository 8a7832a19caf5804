"""Anthropic's dialect: /v1/messages and /v1/messages/count_tokens, to `Request`. `anthropic_prompt` has what the model
is shown, `anthropic_cache` what is kept of it, `anthropic_reply` writes the answers."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from pelton import structured
from pelton.errors import InvalidRequest
from pelton.request import Grammar, Request, SamplingParams
from pelton.server import anthropic_types as wire
from pelton.server.answer import answer, ignored_params, left_open, using
from pelton.server.anthropic_cache import Keeper, kept, marked
from pelton.server.anthropic_prompt import prompt
from pelton.server.anthropic_reply import MessageReply, error_body, error_status
from pelton.server.models import Models
from pelton.server.operation import Dialect, post
from pelton.server.wire import JSON, read, unless_gone


class ThreadsNotOffered(InvalidRequest):
    """The request is about a chat that the server holds. By this code the client knows that it must send all of it."""

    code = "thread_unsupported_request"


def dialect(models: Models) -> Dialect:
    """The dialect over these models."""
    keeper = Keeper()

    async def create(http: HTTPRequest) -> ASGIApp:
        body, extras = await read(http, wire.MessagesRequest)
        request = _request(body)
        reply = MessageReply(request.id, body, extras | _unreadable(body))
        async with using(models, http, body.model) as service:
            if reply.is_stream or marked(body):
                reply.kept = await unless_gone(http, kept(service, body, request))

            async def keep() -> None:
                if reply.is_done:
                    await keeper.keep(service, reply.kept, request.cache_salt)

            return await answer(models, http, reply, [request], keep)

    async def count(http: HTTPRequest) -> Response:
        body, extras = await read(http, wire.CountRequest)
        ignored_params(extras | _unreadable(body), wire.NOT_OFFERED)
        async with using(models, http, body.model) as service:
            return JSON(wire.Count(input_tokens=len(await unless_gone(http, service.encode(prompt(body))))))

    operations = (
        post(
            "/v1/messages",
            create,
            "Answer a chat, in Anthropic's form",
            wire.MessagesRequest,
            wire.MessageAnswer,
            streams=("text/event-stream",),
        ),
        post(
            "/v1/messages/count_tokens",
            count,
            "Count the tokens of a chat, in Anthropic's form",
            wire.CountRequest,
            wire.Count,
        ),
    )
    return Dialect(
        operations=operations,
        prefixes=("/v1/messages",),
        error_body=error_body,
        error=wire.MessagesError,
        error_status=error_status,
    )


_SAMPLING = ("temperature", "top_p", "top_k", "seed")


def _request(body: wire.MessagesRequest) -> Request:
    if body.thread:
        raise ThreadsNotOffered("this server holds no chats: send all messages, without thread", param="thread")
    if body.max_tokens < 1:
        raise InvalidRequest(f"max_tokens is {body.max_tokens}, must be at least 1", param="max_tokens")
    return msgspec.structs.replace(
        prompt(body),
        id=f"msg_{secrets.token_hex(12)}",
        sampling=_sampling(body),
        left_open=_left_open(body),
        grammar=_grammar(body),
        user=None if body.metadata is None else body.metadata.user_id,
        priority=body.priority or 0,
        timeout=body.timeout,
        queue_timeout=body.queue_timeout,
        cache_salt=body.cache_salt or "",
    )


def _sampling(body: wire.MessagesRequest) -> SamplingParams:
    given: dict[str, Any] = {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
    return SamplingParams(max_tokens=body.max_tokens, stop=tuple(body.stop_sequences or ()), **given)


def _left_open(body: wire.MessagesRequest) -> tuple[str, ...]:
    given = {"max_tokens", *(name for name in _SAMPLING if getattr(body, name) is not None)}
    return left_open(given | {"stop"} if body.stop_sequences is not None else given)


def _grammar(body: wire.CountRequest) -> Grammar | None:
    param, given = "output_config.format.schema", None if body.output_config is None else body.output_config.format
    if given is None:
        param, given = "output_format.schema", body.output_format
    if given is None:
        return None
    return structured.json_schema(given.schema, param)


def _unreadable(body: wire.CountRequest) -> dict[str, Any]:
    """Blocks of thoughts that other servers have made unreadable, by their paths."""
    return {
        f"messages[{i}].content[{j}]": block.data
        for i, message in enumerate(body.messages)
        for j, block in enumerate(message.content if isinstance(message.content, list) else ())
        if isinstance(block, wire.RedactedThinkingBlock)
    }
