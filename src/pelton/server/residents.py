"""Pelton's own routes of the models in memory: which are loaded, load one, unload one.

GET  /pelton/models                                 what is loaded or about to be, and the memory that is shared
POST /pelton/models/load    {model, keep_alive?}    a model of the store, or one with a name here: nothing is fetched
POST /pelton/models/unload  {model}                 its requests in flight end first
GET  /pelton/models/store                           the store's models
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from pelton.errors import InvalidRequest
from pelton.pool import Memory, Resident, StoredModel
from pelton.server.models import Models
from pelton.server.operation import Operation, get, post
from pelton.server.wire import JSON, read, unless_gone


class ResidentList(msgspec.Struct, frozen=True, kw_only=True):
    """What is loaded. Sizes are bytes, times seconds since 1970."""

    data: list[Resident]
    memory: Memory
    object: str = "list"


class StoredList(msgspec.Struct, frozen=True, kw_only=True):
    """The store's models."""

    data: list[StoredModel]
    object: str = "list"


class LoadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A model to be loaded now. `keep_alive`: seconds that it stays unused, -1: for ever."""

    model: str
    keep_alive: Annotated[float, msgspec.Meta(ge=-1)] | None = None


class UnloadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A model to be unloaded."""

    model: str


class Unloaded(msgspec.Struct, frozen=True, kw_only=True):
    """The model has gone, and its memory is free."""

    model: str
    unloaded: bool = True


def operations(models: Models) -> tuple[Operation, ...]:
    """The operations."""

    async def listing(_: HTTPRequest) -> Response:
        return JSON(ResidentList(data=models.loaded(), memory=models.memory()))

    async def store(_: HTTPRequest) -> Response:
        return JSON(StoredList(data=await models.available()))

    async def load(http: HTTPRequest) -> Response:
        body, unknown = await read(http, LoadRequest)
        _refuse(unknown)
        return JSON(await unless_gone(http, loaded(body.model, body.keep_alive)))

    async def loaded(name: str, keep_alive: float | None) -> Resident:
        async with models.use(name, keep_alive=keep_alive) as service:
            return next(each for each in models.loaded() if each.name == service.name)

    async def unload(http: HTTPRequest) -> Response:
        body, unknown = await read(http, UnloadRequest)
        _refuse(unknown)
        await unless_gone(http, models.pool_for(body.model).unload(body.model))
        return JSON(Unloaded(model=body.model))

    path = "/pelton/models"
    return (
        get(path, listing, "List the loaded models", ResidentList, scope="models"),
        get(f"{path}/store", store, "List the models of the store", StoredList, scope="models"),
        post(f"{path}/load", load, "Load a model", LoadRequest, Resident, scope="models"),
        post(f"{path}/unload", unload, "Unload a model", UnloadRequest, Unloaded, scope="models"),
    )


def _refuse(unknown: dict[str, object]) -> None:
    if unknown:
        raise InvalidRequest(f"unknown fields: {', '.join(sorted(unknown))}"[:300], param=min(unknown)[:100])
