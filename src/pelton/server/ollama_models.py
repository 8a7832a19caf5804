"""Ollama's operations on models: list, show, pull, make, copy, delete, send a file."""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from pelton import __version__, options
from pelton.errors import ClientGone, InvalidRequest
from pelton.pool import (
    Loading,
    Preset,
    PresetMessage,
    Progress,
    StoredModel,
    jinja,
    parameter_lines,
    write_modelfile,
)
from pelton.server import ollama_types as wire
from pelton.server.answer import ignored_params, known
from pelton.server.context import current
from pelton.server.models import Models
from pelton.server.ollama_reply import error_body, timestamp
from pelton.server.operation import Operation, get, post
from pelton.server.wire import JSON, LINES, EventStream, json_line, read, unless_gone

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
        return JSON(wire.OllamaModels(models=[_model(each) for each in found]))

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
                    details=_details(found),
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
        return JSON(await asyncio.to_thread(_shown, found, metadata, is_verbose=bool(body.verbose)))

    async def pull(self, http: HTTPRequest) -> ASGIApp:
        """Fetch one."""
        body, extras = await read(http, wire.Named)
        ignored = ignored_params(extras | ({"insecure": True} if body.insecure else {}), {})
        name = _name(body)
        return await _told(
            http, body.stream, ignored, lambda tell: self._models.pool_for(name).pull(name, _Teller(tell))
        )

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

        return await _told(http, body.stream, ignored, work)

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


def tagged(name: str) -> str:
    """A name as Ollama writes it: with a tag."""
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


# progress

Work = Callable[[Callable[[wire.OllamaStatus], None]], Awaitable[Any]]


async def _told(http: HTTPRequest, is_stream: bool | None, ignored: list[str], work: Work) -> ASGIApp:
    """Do `work`, which tells how far it is: as lines, or the end alone, which lists what of the request was ignored.
    What is wrong before it has told anything has a status of its own. Where the client goes away, its work is given
    up."""
    queue: asyncio.Queue[wire.OllamaStatus | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def tell(status: wire.OllamaStatus) -> None:
        loop.call_soon_threadsafe(queue.put_nowait, status)

    task = asyncio.ensure_future(work(tell))
    task.add_done_callback(lambda _: tell_end())

    def tell_end() -> None:
        queue.put_nowait(None)

    success = wire.OllamaStatus(status="success", ignored_params=ignored or None)
    if is_stream is False:
        await unless_gone(http, task)
        return JSON(success)
    try:
        first = await unless_gone(http, queue.get())
        if first is None:
            await task
    except BaseException:
        task.cancel()
        raise

    async def lines() -> AsyncGenerator[bytes, None]:
        status = first
        while status is not None:
            yield json_line(status)
            status = await queue.get()
        await task
        yield json_line(success)

    async def close() -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    return EventStream(lines(), _failure, close, keep_alive=b"", media_type=LINES)


async def _failure(error: Exception) -> bytes:
    return json_line(error_body(known(error)))


TOLD_SECONDS = 0.1
"""Between two lines of one file's progress."""


class _Teller:
    """A pull's progress in Ollama's words."""

    def __init__(self, tell: Callable[[wire.OllamaStatus], None]) -> None:
        self._tell = tell
        self._last = ("", 0.0)
        """What was told, and when."""

    def __call__(self, event: Progress | Loading) -> None:
        """What happened (called from another thread)."""
        if isinstance(event, Loading):
            return
        match event.phase:
            case "connect":
                status = "pulling manifest"
            case "download" | "unpack":
                status = f"pulling {event.file}"
            case "verify":
                status = "verifying sha256 digest"
            case "done":
                status = "writing manifest"
            case _:
                status = f"{event.source}: {event.phase}: {event.detail}"
        told, at = self._last
        if status == told and time.monotonic() < at + TOLD_SECONDS and event.done != event.total:
            return
        self._last = (status, time.monotonic())
        of_file = event.phase in ("download", "unpack", "verify")
        self._tell(
            wire.OllamaStatus(
                status=status,
                digest=f"sha256:{event.sha256}" if of_file and event.sha256 else None,
                total=event.total if of_file else None,
                completed=event.done if of_file else None,
            )
        )


# what is asked


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


# what is answered


def _model(found: StoredModel) -> wire.OllamaModel:
    return wire.OllamaModel(
        name=tagged(found.name),
        model=tagged(found.name),
        modified_at=timestamp(found.modified_at),
        size=found.size,
        digest=found.digest,
        details=_details(found),
    )


def _details(found: StoredModel) -> wire.OllamaDetails:
    return wire.OllamaDetails(
        parent_model="" if found.preset is None else found.preset.parent,
        format=found.format,
        family=found.family,
        families=[found.family],
        parameter_size=_count(found.parameters),
        quantization_level=found.quantization,
    )


def _count(parameters: int) -> str:
    for unit, factor in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if parameters >= factor:
            return f"{parameters / factor:.{1 if parameters < 100 * factor else 0}f}{unit}"
    return str(parameters)


def _shown(found: StoredModel, metadata: Mapping[str, Any], *, is_verbose: bool) -> wire.OllamaShow:
    preset = found.preset or Preset()
    return wire.OllamaShow(
        modelfile=write_modelfile(preset.parent or found.name, preset),
        parameters="\n".join(parameter_lines(preset)),
        template=str(metadata.get("tokenizer.chat_template", "")),
        details=_details(found),
        model_info={
            "general.parameter_count": found.parameters,
            **{key: _plain(value, is_verbose=is_verbose) for key, value in metadata.items()},
        },
        capabilities=list(found.capabilities),
        modified_at=timestamp(found.modified_at),
        system=preset.system,
        license="\n\n".join(preset.license) or found.license,
        messages=[wire.OllamaPresetMessage(role=each.role, content=each.content) for each in preset.messages] or None,
    )


def _plain(value: Any, *, is_verbose: bool) -> Any:
    """Lists, as of a vocabulary's tokens, are long: null stands for them unless they are asked for."""
    if isinstance(value, str | bool | int | float):
        return value
    if not is_verbose:
        return None
    return value.tolist() if hasattr(value, "tolist") else list(value)
