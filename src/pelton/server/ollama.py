"""Ollama's dialect: /api/generate and /api/chat, to `Request`. `ollama_prompt` has what is asked, `ollama_reply` writes
the answers, `ollama_embeddings` and `ollama_models` have the other operations."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.types import ASGIApp

from pelton.errors import InvalidRequest, ModelNotFound
from pelton.request import Request
from pelton.server import ollama_embeddings, ollama_models
from pelton.server import ollama_types as wire
from pelton.server.answer import answer, ignored_params, using
from pelton.server.context import current
from pelton.server.models import Models
from pelton.server.ollama_prompt import asked, chat, check_context, keep_alive, refuse_images, single
from pelton.server.ollama_reply import ChatReply, GenerateReply, error_body
from pelton.server.operation import Dialect, post
from pelton.server.wire import JSON, LINES, read, unless_gone

if TYPE_CHECKING:
    from pelton.service import Service

Reply = ChatReply | GenerateReply
NOT_OFFERED: dict[str, tuple[Any, ...]] = dict.fromkeys(("width", "height", "steps"), (None, 0))
"""Of models that make images."""


def dialect(models: Models) -> Dialect:
    """The dialect over these models."""
    here = _Operations(models)
    operations = (
        post(
            "/api/generate",
            here.generate,
            "Answer a prompt, in Ollama's form",
            wire.OllamaGenerateRequest,
            wire.OllamaGeneration,
            streams=(LINES,),
        ),
        post(
            "/api/chat",
            here.chat,
            "Answer a chat, in Ollama's form",
            wire.OllamaChatRequest,
            wire.OllamaChatAnswer,
            streams=(LINES,),
        ),
        *ollama_embeddings.operations(models),
        *ollama_models.operations(models),
    )
    return Dialect(operations=operations, prefixes=("/api",), error_body=error_body, error=wire.OllamaError)


class _Operations:
    """What each operation does: gets the request, gives the answer."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def chat(self, http: HTTPRequest) -> ASGIApp:
        """Answer a chat."""
        body, extras = await read(http, wire.OllamaChatRequest)
        base = asked(body)
        reply = ChatReply(body, ignored_params(extras | base.ignored, NOT_OFFERED))
        if not body.messages:
            return await self._idle(http, body, reply)
        request = chat(base.request, body)

        async def prepare(service: Service) -> Request:
            return request

        return await self._run(http, body, base.context, reply, prepare)

    async def generate(self, http: HTTPRequest) -> ASGIApp:
        """Answer a prompt."""
        body, extras = await read(http, wire.OllamaGenerateRequest)
        refuse_images(body.images, "images")
        _check(body)
        base = asked(body)
        ignored = base.ignored | ({"system": True} if body.context and body.system else {})
        reply = GenerateReply(body, ignored_params(extras | ignored, NOT_OFFERED))
        if not body.prompt and not body.suffix:
            return await self._idle(http, body, reply)

        async def prepare(service: Service) -> Request:
            request, ids = await prompted(service, base.request, body)
            reply.prompt_ids = None if body.raw or body.suffix else ids
            return request

        return await self._run(http, body, base.context, reply, prepare)

    async def _run(
        self,
        http: HTTPRequest,
        body: wire.Common,
        context: int | None,
        reply: Reply,
        prepare: Callable[[Service], Awaitable[Request]],
    ) -> ASGIApp:
        asked_at = time.perf_counter()
        async with using(self._models, http, body.model, keep_alive=keep_alive(body.keep_alive)) as service:
            reply.loaded_at = time.perf_counter()
            reply.load_seconds = reply.loaded_at - asked_at
            reply.warnings = check_context(context, service.context)
            request = await unless_gone(http, prepare(service))
            return await answer(self._models, http, reply, [request], media_type=LINES)

    async def _idle(self, http: HTTPRequest, body: wire.Common, reply: Reply) -> ASGIApp:
        """Without a prompt a request loads its model, or unloads it where it is to stay for no time."""
        if keep_alive(body.keep_alive) == 0:
            current().require("models")
            await self._models.model(body.model)
            with suppress(ModelNotFound):  # it is not loaded
                await unless_gone(http, self._models.pool_for(body.model).unload(body.model))
            return JSON(reply.idle("unload"))
        async with using(self._models, http, body.model, keep_alive=keep_alive(body.keep_alive)):
            return JSON(reply.idle("load"))


def _check(body: wire.OllamaGenerateRequest) -> None:
    for first in ("raw", "suffix"):
        for second in ("system", "template", "context"):
            if getattr(body, first) and getattr(body, second):
                raise InvalidRequest(f"{first} and {second} exclude each other", param=second)


async def prompted(service: Service, base: Request, body: wire.OllamaGenerateRequest) -> tuple[Request, list[int]]:
    """The request with its prompt, and the prompt's ids where the answer's `context` may hold them."""
    if body.suffix:
        return msgspec.structs.replace(base, prompt=body.prompt or "", suffix=body.suffix), []
    if body.raw:
        ids = await service.encode_text(body.prompt or "", add_special=True, is_marked=True)
    elif body.context:
        ids = [*body.context, *await _next_turn(service, single(base, body))]
    else:
        request = single(base, body)
        return request, await service.encode(request)
    return msgspec.structs.replace(base, prompt_ids=tuple(ids)), ids


async def _next_turn(service: Service, request: Request) -> list[int]:
    """What follows an answer where the user goes on: the end of its turn, and the new ones. It is what a chat has
    more than the same chat cut behind an answer."""
    user = [each for each in request.messages or () if each.role == "user"]
    said = (user[0], msgspec.structs.replace(user[0], role="assistant", content="x"))
    cut = msgspec.structs.replace(request, messages=said, add_generation_prompt=False, continue_final_message=True)
    before = await service.encode(cut)
    whole = await service.encode(msgspec.structs.replace(request, messages=(*said, *user)))
    if whole[: len(before)] != before:
        raise InvalidRequest(
            "context: this model's chat template does not let a chat go on behind an answer; use /api/chat",
            param="context",
        )
    return whole[len(before) :]
