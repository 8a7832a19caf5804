"""Pelton's own routes of the prefix cache: pin a prompt's beginning for a time, list what is pinned, let go of it.

POST   /v1/prefix_cache/pins        {model, prompt | messages, ttl, cache_salt?} -> a pin
GET    /v1/prefix_cache/pins        all pins
DELETE /v1/prefix_cache/pins/{id}
"""

from __future__ import annotations

import secrets

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from pelton.errors import InvalidRequest
from pelton.request import Request
from pelton.server import openai_types as openai
from pelton.server.models import Models
from pelton.server.openai import message
from pelton.server.operation import Operation, get, post
from pelton.server.wire import JSON, read, unless_gone


class PinRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to pin, and for how many seconds."""

    model: str
    ttl: float
    prompt: str | list[int] | None = None
    messages: list[openai.WireMessage] | None = None
    cache_salt: str | None = None


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """A pin. Times are seconds since 1970; the first `num_tokens` of the prompt are pinned."""

    id: str
    object: str = "prefix_cache.pin"
    model: str
    num_tokens: int
    created_at: float
    expires_at: float


class PinList(msgspec.Struct, frozen=True, kw_only=True):
    """All pins."""

    object: str = "list"
    data: list[Pin]


class Unpinned(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to DELETE."""

    id: str
    object: str = "prefix_cache.pin"
    deleted: bool = True


class PinNotFound(InvalidRequest):
    """There is no such pin, or not any more."""

    status = 404
    code = "pin_not_found"


def operations(models: Models) -> tuple[Operation, ...]:
    """The operations. All that is pinned is seen and let go by whoever may change what models there are."""
    path, here = "/v1/prefix_cache/pins", _Pins(models)
    return (
        post(path, here.create, "Pin a prompt", PinRequest, Pin, scope="models"),
        get(path, here.listing, "List the pins", PinList, scope="models"),
        Operation(
            method="DELETE",
            path="/v1/prefix_cache/pins/{id}",
            run=here.delete,
            summary="Let go of a pin",
            scope="models",
            answer=Unpinned,
        ),
    )


class _Pins:
    """What each operation does: gets the request, gives the answer."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def create(self, http: HTTPRequest) -> Response:
        """Pin a prompt."""
        body, unknown = await read(http, PinRequest)
        if unknown:
            raise InvalidRequest(f"unknown fields: {', '.join(sorted(unknown))}", param=min(unknown))
        request = _request(body)
        await unless_gone(http, self._pin(request, body.ttl))
        return JSON(next(pin for pin in self._all() if pin.id == request.id))

    async def _pin(self, request: Request, ttl: float) -> None:
        async with self._models.use(request.model) as service:
            await service.pin(request, ttl)

    async def listing(self, _: HTTPRequest) -> Response:
        """All pins."""
        return JSON(PinList(data=self._all()))

    async def delete(self, http: HTTPRequest) -> Response:
        """Let go of one."""
        id = http.path_params["id"]
        for service in self._models.services():
            if any(pin.id == id for pin in service.pins):
                service.unpin(id)
                return JSON(Unpinned(id=id))
        raise PinNotFound(f"there is no pin {id[:200]!r}, or not any more")

    def _all(self) -> list[Pin]:
        return [
            Pin(
                id=pin.id,
                model=service.name,
                num_tokens=pin.num_tokens,
                created_at=pin.created_at,
                expires_at=pin.expires_at,
            )
            for service in self._models.services()
            for pin in service.pins
        ]


def _request(body: PinRequest) -> Request:
    return Request(
        id=f"pin-{secrets.token_hex(12)}",
        model=body.model,
        messages=None if body.messages is None else tuple(message(i, each) for i, each in enumerate(body.messages)),
        prompt=body.prompt if isinstance(body.prompt, str) else None,
        prompt_ids=tuple(body.prompt) if isinstance(body.prompt, list) else None,
        add_generation_prompt=False,
        cache_salt=body.cache_salt or "",
    )
