"""What administrators do with the models of the store."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from pelton.errors import HubError, InvalidRequest, ModelNotFound
from pelton.hub.preset import Preset
from pelton.hub.source import Progress
from pelton.pool import loading, uploads
from pelton.pool.cards import Loading, Report, StoredModel
from pelton.pool.shelf import Shelf
from pelton.pool.spec import Names


def nobody(event: Progress | Loading) -> None:
    """Hears of what nobody watches."""


class StoreVerbs(ABC):
    """The part of the pool that changes what there is to be loaded."""

    def __init__(self, shelf: Shelf, names: Names) -> None:
        self._shelf = shelf
        self._names = names

    @abstractmethod
    def _forget(self, name: str) -> None:
        """A name of the store means something else now, or nothing: what was loaded under it leaves."""

    @abstractmethod
    def _replaced(self, name: str) -> None:
        """The model of that name is another now: what was loaded of it leaves."""

    async def available(self) -> list[StoredModel]:
        """The store's models, by name."""
        return await asyncio.to_thread(self._shelf.models)

    async def details(self, name: str) -> StoredModel:
        """One of the store's models, or one that has a name here. Raises `ModelNotFound`."""
        if spec := self._names.find(name):
            found = await asyncio.to_thread(self._shelf.source, spec.model)
            return msgspec.structs.replace(found, name=spec.name)
        return await asyncio.to_thread(self._shelf.model, name)

    async def metadata(self, name: str) -> Mapping[str, Any]:
        """All that such a model's file says of it, with the template that its name brings along. Raises
        `ModelNotFound`."""
        if spec := self._names.find(name):
            return await asyncio.to_thread(self._shelf.source_metadata, spec.model)
        return await asyncio.to_thread(self._shelf.metadata, name)

    async def pull(self, name: str, report: Report = nobody) -> StoredModel:
        """Fetch a model of a catalogue's or a hub's name into the store. Raises `ModelNotFound` or `HubError`.
        `report` is called from another thread. What was loaded under that name, and is another one now, leaves."""
        before: StoredModel | None = None
        with suppress(ModelNotFound):
            before = await self.details(name)
        await loading.in_daemon_thread(lambda: self._shelf.pull(name, report))
        found = await self.details(name)
        if before is not None and before.digest != found.digest:
            self._replaced(name)
        return found

    async def copy(self, source: str, destination: str) -> None:
        """Give a model of the store one more name. What had that name before loses it. Raises `ModelNotFound`."""
        await asyncio.to_thread(self._shelf.copy, source, destination)
        self._forget(destination)

    async def delete(self, name: str) -> None:
        """Remove a name from the store, and its files where nothing else means them. Requests in flight go on.
        Raises `ModelNotFound`."""
        removed = await asyncio.to_thread(self._shelf.remove, name)
        self._forget(removed)

    async def create(self, name: str, base: str, preset: Preset) -> None:
        """Give a model of the store one more name, which brings along a preset over what the model's own does. What had
        that name before loses it. Raises `ModelNotFound`, or `InvalidRequest` for the preset."""
        await asyncio.to_thread(self._shelf.create, name, base, preset)
        self._forget(name)

    async def create_of_blob(self, name: str, file: str, sha256: str, preset: Preset) -> None:
        """Give a file that was sent a name. Raises `InvalidRequest` where there is none of that digest, or
        `FormatError`."""
        await asyncio.to_thread(self._shelf.create_of_blob, name, file, sha256, preset)
        self._forget(name)

    async def has_blob(self, sha256: str) -> bool:
        """Is a file of that digest in the store?"""
        return await asyncio.to_thread(self._shelf.has_blob, sha256)

    async def take_blob(self, sha256: str, chunks: AsyncIterable[bytes], size: int | None) -> None:
        """Bring a file to the store. `size`: bytes that it will have, where that is known. Raises `InvalidRequest`
        where the digest is another, or the disk too full."""
        path = await asyncio.to_thread(self._shelf.new_blob)
        try:
            await uploads.gather(path, chunks, size)
            await asyncio.to_thread(self._shelf.take_blob, path, sha256)
        except HubError as error:
            raise InvalidRequest(error.message, param="digest") from None
        finally:
            path.unlink(missing_ok=True)
