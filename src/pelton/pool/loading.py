"""From a model's name to its service: its file is found or fetched, its engine started, its vocabulary built."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from pelton.config import HubConfig
from pelton.engine.client import EngineClient
from pelton.engine.link import Opening
from pelton.errors import ConfigError, FormatError
from pelton.formats.digest import FileDigest
from pelton.hub import catalogue, digests
from pelton.hub.preset import Preset
from pelton.hub.pull import pull
from pelton.hub.store import Store
from pelton.pool.cards import Report
from pelton.pool.spec import ModelSpec

if TYPE_CHECKING:
    from pelton.formats.checkpoint import Checkpoint
    from pelton.service import Service
    from pelton.text.tokenizer import Tokenizer

T = TypeVar("T")


class Found(NamedTuple):
    """A model's file, that of its draft model, if it has one, the digests that are known of them, and what the model's
    name brings along."""

    path: Path
    known: tuple[FileDigest, ...]
    draft_path: Path | None = None
    preset: Preset | None = None


async def find(spec: ModelSpec, hub: HubConfig, report: Report, *, may_fetch: bool) -> Found:
    """The file of a model, and that of its draft model; what is not here is fetched, if that may be."""
    return await in_daemon_thread(lambda: _find_both(spec, hub, report if may_fetch else None))


async def open_model(
    spec: ModelSpec, found: Found, hub: HubConfig, opening: Opening, *, is_shared: bool, in_process: bool
) -> Service:
    """Load a model. Raises what went wrong; nothing is left of it then."""
    path = found.path
    store = Store(hub)
    preset, settings = found.preset, spec.engine
    if preset is not None and preset.context is not None and not settings.context:
        settings = msgspec.structs.replace(settings, context=preset.context)
    client = EngineClient(
        path,
        settings,
        in_process=in_process,
        draft_path=found.draft_path,
        known=found.known,
        packed=store.packed if hub.packed_cache_size > 0 else None,
        prefixes=store.prefixes if hub.prefix_cache_size > 0 else None,
        remember=lambda files: _remember(files, hub),
        is_shared=is_shared,
    )
    # The engine loads in its own process while the vocabulary is built here.
    text = asyncio.create_task(asyncio.to_thread(_open_text, path))
    start = asyncio.create_task(client.start(opening))
    try:
        await asyncio.gather(start, text)
        opened, tokenizer = text.result()
        if opened.files != client.info.files:
            raise FormatError(f"{path}: the file was changed while it was being loaded")
    except BaseException:
        start.cancel()  # it may still be loading where the vocabulary was at fault
        await to_its_end(_give_back(start, client))
        raise
    from pelton.service import Service
    from pelton.text.chat import with_template

    pooling = None if spec.text.pooling == "auto" else spec.text.pooling
    own = preset.template if preset is not None else None
    metadata = opened.metadata if own is None else with_template(opened.metadata, own)
    return Service(spec.name, path, tokenizer, metadata, client, spec.text.tool_dialect, pooling, preset)


async def _give_back(start: asyncio.Task[None], client: EngineClient) -> None:
    await asyncio.gather(start, return_exceptions=True)
    await client.close()


async def to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Run what must not be left half done, however often this is cancelled; an exception is to follow anyway."""
    task = asyncio.ensure_future(work)
    while not task.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([task])


async def in_daemon_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread that does not keep the program alive: whoever interrupts a pull does not wait for its
    end, as with a thread of the event loop's own executor."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(finish: Callable[[], None]) -> None:
        if not future.cancelled():
            finish()

    def run() -> None:
        finish: Callable[[], None]
        try:
            finish = partial(future.set_result, work())
        except BaseException as error:
            finish = partial(future.set_exception, error)
        with suppress(RuntimeError):  # The loop is closed: nobody waits any more.
            loop.call_soon_threadsafe(settle, finish)

    threading.Thread(target=run, daemon=True, name="pelton pull").start()
    return await future


def _find_both(spec: ModelSpec, hub: HubConfig, report: Report | None) -> Found:
    draft = spec.engine.draft_model
    if draft and spec.engine.speculation == "off":
        raise ConfigError("draft_model is given, but speculation is off", param="draft_model")
    found = _find(spec.model, hub, report)
    if not draft:
        return found
    drafting = _find(draft, hub, report)
    return Found(found.path, (*found.known, *drafting.known), drafting.path, found.preset)


def _find(model: str, hub: HubConfig, report: Report | None) -> Found:
    store = Store(hub)
    path = store.resolve(model) if report is None else pull(model, hub, report)
    preset = None if catalogue.local_file(model) else store.show(model).preset
    return Found(path, digests.known(path, hub), preset=preset)


def _remember(files: tuple[FileDigest, ...], hub: HubConfig) -> None:
    threading.Thread(target=digests.remember, args=(files, hub), daemon=True, name="pelton digests").start()


def _open_text(path: Path) -> tuple[Checkpoint, Tokenizer]:
    # Imported here, in the thread, so that NumPy and all that is made of text do not delay the engine process.
    import pelton.service  # noqa: F401
    from pelton.formats import checkpoint
    from pelton.text.sandbox import sandbox
    from pelton.text.tokenizer import Tokenizer

    opened = checkpoint.open(path)
    tokenizer = Tokenizer(opened.metadata)
    sandbox.start()
    return opened, tokenizer
