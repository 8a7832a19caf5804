"""OpenAI's /v1/responses: `responses_request` reads what is asked, `responses_prompt` has what the model is shown,
`responses_reply` writes the answers, `responses_store` keeps them, `responses_background` runs those that nobody waits
for."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from contextlib import suppress
from typing import TypeVar

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from pelton.errors import InvalidRequest, PeltonError
from pelton.request import Request
from pelton.server import responses_types as wire
from pelton.server.answer import answer, known, using
from pelton.server.context import current
from pelton.server.models import Models
from pelton.server.openai_pages import Page, page
from pelton.server.openai_reply_types import ErrorAnswer
from pelton.server.operation import Dialect, Operation, get, post
from pelton.server.responses_background import Background, Log, Run
from pelton.server.responses_prompt import check_calls, items, prompt, response_id
from pelton.server.responses_reply import ResponseReply, error_body
from pelton.server.responses_request import ignored, request_of, response_of
from pelton.server.responses_store import MAX_THREAD, ResponseNotFound, ResponseStore, not_stored
from pelton.server.wire import JSON, EventStream, read, read_query, sse, unless_gone

_REFERENCES = (None, "item_reference")
MAX_REFERENCES = 256
"""Items of other threads in one input."""
Q = TypeVar("Q", bound=msgspec.Struct)
_EVERYWHERE = ("include", "include_obfuscation")
"""What there is to include was decided when the response was made."""


class Responses:
    """The operations."""

    def __init__(self, models: Models, stored: ResponseStore) -> None:
        self._models = models
        self._stored = stored
        self.background = Background(models, stored)

    async def create(self, http: HTTPRequest) -> ASGIApp:
        """POST /v1/responses."""
        body, extras = await read(http, wire.ResponsesRequest)
        names = ignored(body, extras)
        id = f"resp_{secrets.token_hex(16)}"
        before, own = await self._input(id, body)
        request = request_of(id, body, [*before, *own])
        base = response_of(id, body, names, keeps=self._stored.keeps)
        if body.background:
            return await self._begin(http, base, own, request, is_stream=bool(body.stream))

        async def keep(response: wire.Response) -> wire.Response:
            return await self._kept(response, own)

        reply = ResponseReply(base, num_input=len(own), is_stream=bool(body.stream), keep=keep)
        return await answer(self._models, http, reply, [request])

    async def _begin(
        self, http: HTTPRequest, base: wire.Response, own: list[wire.Item], request: Request, *, is_stream: bool
    ) -> ASGIApp:
        """Start one in the background."""
        if not base.store or self._stored.presence is None:
            raise InvalidRequest("background needs store: true, and a server that stores responses", param="background")
        run = Run(base.id)
        run.reply = ResponseReply(
            base,
            num_input=len(own),
            is_stream=True,
            keep=lambda response: self.background.save(run, response),
            log=run.log.add,
        )
        run.reply.queued()
        queued = run.reply.now()
        await self._stored.add(queued, own, runner=self._stored.presence.name)
        try:
            await unless_gone(http, self.background.start(run, request))
        except BaseException:
            await self._stored.delete(base.id)
            raise
        return _stream(run.log, 0) if is_stream else JSON(queued)

    async def _kept(self, response: wire.Response, own: list[wire.Item]) -> wire.Response:
        """Store it, where that is wanted. Where it cannot be, the answer is none the worse, and says so."""
        if not response.store:
            return response
        try:
            await self._stored.add(response, own)
        except PeltonError as error:
            return not_stored(response, error)
        return response

    async def _input(self, id: str, body: wire.CountRequest) -> tuple[list[wire.Item], list[wire.Item]]:
        """The items of the thread before, and the request's own."""
        previous = body.previous_response_id
        before = [] if previous is None else await self._stored.previous(previous)
        there = {each.id: each for each in before}
        given = body.input if isinstance(body.input, list) else []
        referred = {each.id for each in given if each.id and not each.role and each.type in _REFERENCES} - there.keys()
        there |= await self._beside(referred)

        def find(item: str) -> wire.Item:
            if item not in there:
                raise InvalidRequest(f"input: there is no item {item[:200]!r}, or not any more", param="input")
            return there[item]

        own = items(body.input, id, find)
        seen = {each.id for each in before}
        for item in own:
            if item.id in seen:
                raise InvalidRequest(f"input: the item {item.id!r} is there twice, or in the thread", param="input")
            seen.add(item.id)
        check_calls(before, own)
        return before, own

    async def _beside(self, ids: Collection[str]) -> dict[str, wire.Item]:
        """All items of the responses that these stored ones belong to."""
        if len(ids) > MAX_REFERENCES:
            message = f"input refers to {len(ids)} items, over {MAX_REFERENCES}: go on with previous_response_id"
            raise InvalidRequest(message, param="input")
        found: dict[str, wire.Item] = {}
        num_bytes = 0
        for id in ids:
            if id in found:
                continue
            with suppress(ResponseNotFound):
                stored = await self._stored.get(response_id(id))
                num_bytes += stored.num_bytes
                if num_bytes > MAX_THREAD:
                    raise InvalidRequest(f"input refers to responses of over {MAX_THREAD} bytes", param="input")
                found |= {each.id: each for each in [*stored.input, *stored.response.output]}
        return found

    async def count(self, http: HTTPRequest) -> Response:
        """POST /v1/responses/input_tokens."""
        body, extras = await read(http, wire.CountRequest)
        ignored(body, extras)
        before, own = await self._input("resp_0", body)
        if not before and not own and not body.instructions:
            raise InvalidRequest("input is missing", param="input")
        request = prompt(body, [*before, *own])
        async with using(self._models, http, body.model) as service:
            return JSON(wire.InputTokens(input_tokens=len(await unless_gone(http, service.encode(request)))))

    async def retrieve(self, http: HTTPRequest) -> ASGIApp:
        """GET /v1/responses/{id}."""
        id, query = http.path_params["id"], _query(http, wire.RetrieveQuery)
        if query.starting_after is not None and not query.stream:
            raise InvalidRequest("starting_after needs stream=true", param="starting_after")
        response = await self._response(id)
        if not query.stream:
            return JSON(response)
        if (log := self.background.events(id)) is None:
            raise InvalidRequest(
                f"the events of response {id} are not there any more, or never were: those of background responses can "
                "be read while they are under way and for some minutes after; read it without stream",
                param="stream",
            )
        return _stream(log, 0 if query.starting_after is None else query.starting_after + 1)

    async def _response(self, id: str) -> wire.Response:
        """As it stands now. Raises `ResponseNotFound`."""
        if (run := self.background.running(id)) is not None:
            return run.reply.now()
        return await self.background.unsaved(id) or (await self._stored.get(id)).response

    async def delete(self, http: HTTPRequest) -> Response:
        """DELETE /v1/responses/{id}."""
        id = http.path_params["id"]
        if (run := self.background.running(id)) is not None:
            await self.background.cancel(run)
        await self._stored.delete(id)
        self.background.forget(id)
        return JSON(wire.Deleted(id=id))

    async def cancel(self, http: HTTPRequest) -> Response:
        """POST /v1/responses/{id}/cancel."""
        id = http.path_params["id"]
        if (run := self.background.running(id)) is not None:
            return JSON(await self.background.cancel(run))
        stored = await self._stored.get(id)
        if not stored.response.background:
            raise InvalidRequest(f"response {id} did not run in the background: only such can be cancelled", param="id")
        if stored.runner is not None:
            raise InvalidRequest(f"response {id} is run by another server of this store: cancel it there", param="id")
        return JSON(stored.response)

    async def input_items(self, http: HTTPRequest) -> Response:
        """GET /v1/responses/{id}/input_items."""
        id, query = http.path_params["id"], _query(http, wire.ItemsQuery)
        stored = await self._stored.get(id)
        previous = stored.response.previous_response_id
        found = [*(await self._stored.thread(previous) if previous is not None else ()), *stored.input]
        if query.order == "desc":
            found.reverse()
        if query.after is not None:
            places = [i for i, each in enumerate(found) if each.id == query.after]
            if not places:
                raise InvalidRequest(f"after: there is no item {query.after[:200]!r} among them", param="after")
            found = found[places[0] + 1 :]
        return JSON(page(found, query.limit))

    def dialect(self) -> Dialect:
        """All of them, and how their errors are written."""
        path, one = "/v1/responses", "/v1/responses/{id}"
        operations = (
            post(
                path,
                self.create,
                "Make a response",
                wire.ResponsesRequest,
                wire.Response,
                streams=("text/event-stream",),
            ),
            post(f"{path}/input_tokens", self.count, "Count a prompt's tokens", wire.CountRequest, wire.InputTokens),
            get(
                one,
                self.retrieve,
                "Show a stored response",
                wire.Response,
                query=wire.RetrieveQuery,
                streams=("text/event-stream",),
            ),
            Operation(
                method="DELETE", path=one, run=self.delete, summary="Delete a stored response", answer=wire.Deleted
            ),
            post(f"{one}/cancel", self.cancel, "Cancel a background response", answer=wire.Response),
            get(
                f"{one}/input_items",
                self.input_items,
                "List what a response was made of",
                Page[wire.Item],
                query=wire.ItemsQuery,
            ),
        )
        return Dialect(operations=operations, prefixes=(path,), error_body=error_body, error=ErrorAnswer)


def _query(http: HTTPRequest, kind: type[Q]) -> Q:
    query, unknown = read_query(http, kind)
    current().refuse_ignored([each for each in unknown if each.removesuffix("[]") not in _EVERYWHERE])
    return query


def _stream(log: Log, start: int) -> EventStream:
    async def nothing() -> None:
        pass

    async def failure(error: Exception) -> bytes:
        return sse(error_body(known(error)), "error")

    return EventStream(log.follow(start), failure, nothing)
