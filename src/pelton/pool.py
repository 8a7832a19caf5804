"""Which models are loaded. What dialects and the library know of everything below is here."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from pelton.config import Config, HubConfig
from pelton.engine.client import EngineClient
from pelton.errors import FormatError, ModelNotFound, Unavailable
from pelton.formats.digest import FileDigest
from pelton.hub import digests
from pelton.hub.pull import pull
from pelton.hub.source import Progress
from pelton.hub.store import Store
from pelton.service import Service

if TYPE_CHECKING:
    from pelton.formats.checkpoint import Checkpoint
    from pelton.text.tokenizer import Tokenizer

__all__ = ["Loading", "ModelCard", "Pool", "Progress", "Report"]


class Loading(msgspec.Struct, frozen=True):
    """A model is being loaded; `share` of it is, 0 to 1."""

    name: str
    share: float


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A loaded model, for listings."""

    id: str
    created: int
    """Seconds since 1970: when its file was written."""
    context: int
    weight_bytes: int
    """Of the weights in memory."""


T = TypeVar("T")
Report = Callable[[Progress | Loading], None]
"""Hears of a pull and then of a load. Called from other threads too."""


class Pool:
    """The loaded models by the names that clients use. All methods belong to one event loop.

    A model that is loaded under a name is found by that name only. `load` fetches and loads; `get` and the listings
    see what is loaded, so that a client's request cannot make a server load anything.
    """

    def __init__(self, config: Config, *, in_process: bool = False) -> None:
        """`in_process`: engines run in this process, in the event loop's thread."""
        self._config = config
        self._in_process = in_process
        self._loads: dict[str, asyncio.Task[Service]] = {}
        self._is_closed = False

    async def load(self, model: str, report: Report = lambda event: None, *, name: str | None = None) -> Service:
        """Fetch `model` (a catalogue's name, a hub's name, or a path) if it is not here, and load it. `name`: what
        clients call it; without it, `model`.

        Two loads of one name are one. Raises what went wrong; a later load tries again.
        """
        name = name or model
        if self._is_closed:
            raise Unavailable("the pool is closed")
        task = self._loads.get(name)
        if task is None:
            task = self._loads[name] = asyncio.create_task(self._load(name, model, report), name=f"load {name}")
            task.add_done_callback(lambda task: self._forget_failed(name, task))
        return await asyncio.shield(task)

    async def get(self, name: str) -> Service:
        """The service of a loaded model; waits for one that is being loaded. Raises `ModelNotFound`."""
        task = self._loads.get(name)
        if task is None:
            loaded = ", ".join(sorted(self._loads)) or "none"
            raise ModelNotFound(f"the model {name[:200]!r} is not loaded here; loaded: {loaded}", param="model")
        return await asyncio.shield(task)

    def models(self) -> list[ModelCard]:
        """The loaded models, by name."""
        return [_card(service) for service in sorted(self._services(), key=lambda service: service.name)]

    def model(self, name: str) -> ModelCard:
        """One loaded model. Raises `ModelNotFound`."""
        for service in self._services():
            if service.name == name:
                return _card(service)
        raise ModelNotFound(f"the model {name[:200]!r} is not loaded here", param="model")

    async def close(self) -> None:
        """End all engines; loads under way are given up. May be called twice."""
        self._is_closed = True
        tasks, self._loads = list(self._loads.values()), {}
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Service):
                await result.close()

    def _forget_failed(self, name: str, task: asyncio.Task[Service]) -> None:
        if (task.cancelled() or task.exception() is not None) and self._loads.get(name) is task:
            del self._loads[name]

    def _services(self) -> list[Service]:
        done = [task for task in self._loads.values() if task.done() and not task.cancelled()]
        return [task.result() for task in done if task.exception() is None]

    async def _load(self, name: str, model: str, report: Report) -> Service:
        hub = self._config.hub
        path, known = await _in_daemon_thread(lambda: _find(model, hub, report))
        store = Store(hub)
        report(Loading(name, 0.0))
        client = EngineClient(
            path,
            self._config.engine,
            in_process=self._in_process,
            known=known,
            packed=store.packed if hub.packed_cache_size > 0 else None,
            prefixes=store.prefixes if hub.prefix_cache_size > 0 else None,
            remember=lambda files: _remember(files, hub),
        )
        # The engine loads in its own process while the vocabulary is built here.
        text = asyncio.create_task(asyncio.to_thread(_open_text, path))
        start = asyncio.create_task(client.start(lambda share: report(Loading(name, share))))
        try:
            await asyncio.gather(start, text)
            opened, tokenizer = text.result()
            if opened.files != client.info.files:
                raise FormatError(f"{path}: the file was changed while it was being loaded")
        except BaseException:
            start.cancel()  # it may still be loading where the vocabulary was at fault
            await asyncio.gather(start, return_exceptions=True)
            await client.close()
            raise
        report(Loading(name, 1.0))
        return Service(name, path, tokenizer, opened.metadata, client)


async def _in_daemon_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread that does not keep the program alive: whoever interrupts a pull does not wait for its
    end, as with a thread of the event loop's own executor."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        elif result is not None:
            future.set_result(result)

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # The loop is closed: nobody waits any more.
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, daemon=True, name="pelton pull").start()
    return await future


def _find(model: str, hub: HubConfig, report: Report) -> tuple[Path, tuple[FileDigest, ...]]:
    path = pull(model, hub, report)
    return path, digests.known(path, hub)


def _remember(files: tuple[FileDigest, ...], hub: HubConfig) -> None:
    threading.Thread(target=digests.remember, args=(files, hub), daemon=True, name="pelton digests").start()


def _open_text(path: Path) -> tuple[Checkpoint, Tokenizer]:
    # Imported here, in the thread, so that NumPy's import does not delay the start of the engine process.
    from pelton.formats import checkpoint
    from pelton.text.tokenizer import Tokenizer

    opened = checkpoint.open(path)
    with _no_collections():
        return opened, Tokenizer(opened.metadata)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Without the collector, which walks all that is there again and again while a vocabulary's hundreds of thousands
    of pairs are made, and finds nothing: a tenth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _card(service: Service) -> ModelCard:
    return ModelCard(
        id=service.name,
        created=int(service.path.stat().st_mtime),
        context=service.context,
        weight_bytes=service.weight_bytes,
    )
