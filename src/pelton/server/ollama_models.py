"""Ollama's operations on models: list, show, pull, make, copy, delete, send a file."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from pelton import __version__, options
from pelton.errors import ClientGone, InvalidRequest
from pelton.pool import (
    Preset,
    PresetMessage,
    StoredModel,
    jinja,
)
from pelton.server import ollama_types as wire
from pelton.server.answer import ignored_params
from pelton.server.context import current
from pelton.server.models import Models
from pelton.server.ollama_model_reply import details_of, model_of, shown, tagged
from pelton.server.ollama_progress import Teller, told
from pelton.server.ollama_reply import timestamp
from pelton.server.operation import Operation, get, post
from pelton.server.wire import JSON, LINES, read

FOREVER = 253402300799.0
"""The last second of the year 9999: until when a model stays that is never unloaded."""
MAX_SENT = 1024
"""Files of which it is kept who has sent them."""
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")


class NotHere(InvalidRequest):
    """There is no such thing."""

    status = 404


def operations(models: Models) -> tuple[Operation, ...]:
    """The operations."""
    here = _Administration(models)
    blob = "/api/blobs/{digest}"
    return (
        get("/api/tags", here.tags, "List the models, in Ollama's form", wire.OllamaModels),
        get("/api/ps", here.ps, "List the loaded models, in Ollama's form", wire.OllamaProcesses),
        get("/api/version", here.version, "Tell which of Ollama's APIs this is", wire.OllamaVersion),
        post("/api/show", here.show, "Show a model, in Ollama's form", wire.Named, wire.OllamaShow),
        post("/api/pull", here.pull, "Fetch a model", wire.Named, wire.OllamaStatus, scope="models", streams=(LINES,)),
        post(
            "/api/push",
            here.push,
            "Say that models are not pushed",
            wire.Named,
            wire.OllamaStatus,
            scope="models",
            streams=(LINES,),
        ),
        post(
            "/api/create",
            here.create,
            "Make a model of another",
            wire.OllamaCreateRequest,
            wire.OllamaStatus,
            scope="models",
            streams=(LINES,),
        ),
        post("/api/copy", here.copy, "Give a model one more name", wire.OllamaCopyRequest, scope="models"),
        Operation(
            method="DELETE",
            path="/api/delete",
            run=here.delete,
            summary="Remove a model",
            scope="models",
            body=wire.Named,
        ),
        Operation(method="HEAD", path=blob, run=here.has_blob, summary="Is a file here?", scope="models"),
        post(blob, here.send_blob, "Send a file", scope="models", is_file=True),
    )


class _Administration:
    """What each operation does: gets the request, gives the answer."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._sent: OrderedDict[tuple[str, str], None] = OrderedDict()
        """(key's id, digest) of the last files that came."""

    async def tags(self, _: HTTPRequest) -> Response:
        """The models there are."""
        found = [await self._stored(card.id) for card in await self._models.models()]
        return JSON(wire.OllamaModels(models=[model_of(each) for each in found]))

    async def _stored(self, name: str) -> StoredModel:
        return await self._models.pool_for(name).details(name)

    async def ps(self, _: HTTPRequest) -> Response:
        """The loaded ones."""
        running = []
        for each in self._models.loaded():
            found = await self._stored(each.name)
            until = FOREVER if each.expires_at is None else each.expires_at
            running.append(
                wire.OllamaRunning(
                    name=tagged(each.name),
                    model=tagged(each.name),
                    size=each.memory,
                    digest=found.digest,
                    details=details_of(found),
                    expires_at=timestamp(until),
                    size_vram=0,
                    context_length=each.context or 0,
                )
            )
        return JSON(wire.OllamaProcesses(models=running))

    async def show(self, http: HTTPRequest) -> Response:
        """All about one."""
        body, extras = await read(http, wire.Named)
        ignored_params(extras, {})
        name = _name(body)
        found = await self._stored(name)
        if found.problem is not None:
            raise InvalidRequest(f"{found.name}: {found.problem}", param="model")
        metadata = await self._models.pool_for(name).metadata(name)
        return JSON(await asyncio.to_thread(shown, found, metadata, is_verbose=bool(body.verbose)))

    async def pull(self, http: HTTPRequest) -> ASGIApp:
        """Fetch one."""
        body, extras = await read(http, wire.Named)
        ignored = ignored_params(extras | ({"insecure": True} if body.insecure else {}), {})
        name = _name(body)
        return await told(http, body.stream, ignored, lambda tell: self._models.pool_for(name).pull(name, Teller(tell)))

    async def push(self, http: HTTPRequest) -> ASGIApp:
        """Refused: models are sent nowhere."""
        body, _ = await read(http, wire.Named)
        raise NotHere(f"{_name(body)[:200]} cannot be pushed: this server sends models nowhere", param="model")

    async def create(self, http: HTTPRequest) -> ASGIApp:
        """Make one of another, or of files that were sent."""
        body, extras = await read(http, wire.OllamaCreateRequest)
        unused = {f"parameters.{name}": True for name in options.NO_EFFECT & (body.parameters or {}).keys()}
        ignored = ignored_params(extras | unused, {})
        _refuse(body)

        async def work(tell: Callable[[wire.OllamaStatus], None]) -> None:
            preset = _preset(body)
            if body.files:
                pool, ((file, sha256),) = self._models.pool_for(body.model), _files(body.files)
                if not await self._sees_blob(sha256):
                    raise InvalidRequest(f"files: there is no blob sha256:{sha256}: send it first", param="files")
                await pool.create_of_blob(body.model, file, sha256, preset)
            else:
                assert body.base is not None
                await self._models.pool_for(body.model, body.base).create(body.model, body.base, preset)
            tell(wire.OllamaStatus(status="writing manifest"))

        return await told(http, body.stream, ignored, work)

    async def copy(self, http: HTTPRequest) -> Response:
        """One more name for one."""
        body, extras = await read(http, wire.OllamaCopyRequest)
        ignored_params(extras, {})
        await self._models.pool_for(body.source, body.destination).copy(body.source, body.destination)
        return Response()

    async def delete(self, http: HTTPRequest) -> Response:
        """Remove one."""
        body, extras = await read(http, wire.Named)
        ignored_params(extras, {})
        name = _name(body)
        await self._models.pool_for(name).delete(name)
        return Response()

    async def version(self, _: HTTPRequest) -> Response:
        """Which of Ollama's APIs this is."""
        return JSON(wire.OllamaVersion(version=wire.API_VERSION, pelton=__version__))

    async def has_blob(self, http: HTTPRequest) -> Response:
        """Was this file sent?"""
        sha256 = _digest(http.path_params["digest"])
        if not await self._models.pool_for().has_blob(sha256) or not await self._sees_blob(sha256):
            raise NotHere(f"there is no blob {http.path_params['digest']}", param="digest")
        return Response()

    async def send_blob(self, http: HTTPRequest) -> Response:
        """Take a file."""
        sha256 = _digest(http.path_params["digest"])
        told = http.headers.get("content-length", "")
        size = int(told[:20]) if told.isdigit() else None
        try:
            await self._models.pool_for().take_blob(sha256, http.stream(), size)
        except ClientDisconnect:
            raise ClientGone("the client went away before its file had arrived") from None
        self._sent[current().key.id, sha256] = None
        if len(self._sent) > MAX_SENT:
            self._sent.popitem(last=False)
        return Response(status_code=201)

    async def _sees_blob(self, sha256: str) -> bool:
        """May the caller know of this file? One whose key is for some models knows theirs, and what it has sent."""
        key = current().key
        if key.models is None or (key.id, sha256) in self._sent:
            return True
        return any(model.digest == sha256 for model in await self._models.available())


def _name(body: wire.Named) -> str:
    name = body.model or body.name
    if not name:
        raise InvalidRequest("model is missing", param="model")
    return name


def _digest(text: str) -> str:
    found = _DIGEST.fullmatch(text)
    if found is None:
        raise InvalidRequest(f"{text[:100]!r} is no digest: sha256: and 64 digits are wanted", param="digest")
    return found[1]


def _refuse(body: wire.OllamaCreateRequest) -> None:
    if body.modelfile:
        raise InvalidRequest("modelfile is not read here: send from, parameters, system, ...", param="modelfile")
    if body.adapters:
        raise InvalidRequest("adapters cannot be run yet: merge them into the model's weights", param="adapters")
    if body.quantize:
        raise InvalidRequest("this server does not quantize: send a file that is, or name one", param="quantize")
    if not body.base and not body.files:
        raise InvalidRequest("neither from nor files is given", param="from")
    if body.base and body.files:
        raise InvalidRequest("from and files exclude each other", param="files")


def _files(files: Mapping[str, str]) -> list[tuple[str, str]]:
    if len(files) != 1:
        raise InvalidRequest(f"{len(files)} files are given: a model is one .gguf file here", param="files")
    ((name, digest),) = files.items()
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,195}", name):
        raise InvalidRequest(f"files: {name[:60]!r} is not the name of a file", param="files")
    return [(name, _digest(digest))]


def _preset(body: wire.OllamaCreateRequest) -> Preset:
    license = (body.license,) if isinstance(body.license, str) else tuple(body.license or ())
    return Preset(
        system=body.system,
        template=None if not body.template else jinja(body.template),
        parameters={name: value for name, value in (body.parameters or {}).items() if value is not None},
        messages=tuple(PresetMessage(role=each.role, content=each.content) for each in body.messages or ()),
        license=license,
    )
