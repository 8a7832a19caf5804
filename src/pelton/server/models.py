"""The pool as one caller sees it: the models that its key may use, and no others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

from pelton.errors import InvalidRequest, ModelNotFound
from pelton.pool import Memory, ModelCard, Pool, Resident, StoredModel
from pelton.server.context import current
from pelton.server.meter import Meter

if TYPE_CHECKING:
    from pelton.service import Service

MAX_LISTED = 20
"""Names that an error tells at most."""


class Models:
    """What dialects know of the pool. A model that the caller's key may not use is one that there is not."""

    def __init__(self, pool: Pool, meter: Meter) -> None:
        self._pool = pool
        self.meter = meter
        """Starts requests of the services that `use` gives."""

    @asynccontextmanager
    async def use(self, name: str, *, keep_alive: float | None = None) -> AsyncIterator[Service]:
        """`Pool.use`. Only whoever may change which models there are says how long one stays: others use it, too."""
        using = self.pool_for(name).use(
            name,
            keep_alive=keep_alive if self.can_keep else None,
            is_idle_priority=current().is_idle_priority,
        )
        async with AsyncExitStack() as stack:
            try:
                service = await stack.enter_async_context(using)
            except ModelNotFound as error:
                raise await self._with_names(error) from None
            yield service

    @property
    def can_keep(self) -> bool:
        """May the caller say how long a model stays loaded?"""
        return current().key.may("models")

    async def until_leaving(self, name: str) -> None:
        """`Pool.until_leaving`."""
        await self._pool.until_leaving(name)

    async def models(self) -> list[ModelCard]:
        """All that the caller can use, loaded or not, by name."""
        return [card for card in await self._pool.models() if self.sees(card.id)]

    async def model(self, name: str) -> ModelCard:
        """One of them. Raises `ModelNotFound`."""
        try:
            return await self.pool_for(name).model(name)
        except ModelNotFound as error:
            raise await self._with_names(error) from None

    async def _with_names(self, error: ModelNotFound) -> ModelNotFound:
        """The error with the names that the caller could have meant."""
        return ModelNotFound(f"{error.message}; there are: {_names(await self.models())}", param="model")

    async def look_at(self, name: str) -> Service | StoredModel:
        """A model's service where it is loaded, else what its file says: nothing is loaded. Raises `ModelNotFound`."""
        card = await self.model(name)
        loaded = next((service for service in self.services() if service.name == card.id), None)
        return loaded or await self._pool.details(card.id)

    async def metadata(self, name: str) -> Mapping[str, Any]:
        """`Pool.metadata`."""
        return await self.pool_for(name).metadata(name)

    async def named(self, name: str | None) -> str:
        """The model that is meant where a request need not say which: the only one there is, or the only one that is
        loaded. Raises `InvalidRequest` where there are several."""
        if name:
            return name
        cards = await self.models()
        names = [service.name for service in self.services()] if len(cards) > 1 else [card.id for card in cards]
        if len(names) == 1:
            return names[0]
        message = f"model is missing, and there is not just one; there are: {_names(cards)}"
        raise InvalidRequest(message, param="model")

    def services(self) -> list[Service]:
        """Those of the models that are loaded, by name: to look at, not to send requests to."""
        return [service for service in self._pool.services() if self.sees(service.name)]

    def loaded(self) -> list[Resident]:
        """Those that take memory or are about to, by name."""
        return [resident for resident in self._pool.loaded() if self.sees(resident.name)]

    def memory(self) -> Memory:
        """What all loaded models share."""
        return self._pool.memory()

    async def available(self) -> list[StoredModel]:
        """Those of the store, by name."""
        return [model for model in await self._pool.available() if self.sees(model.name)]

    def max_sequences(self, name: str) -> int:
        """How many requests fill the batch of the model's engine; 0 while it is not loaded."""
        services = (service for service in self._pool.services() if name in self._pool.names(service.name))
        return next((service.engine.info.max_sequences for service in services), 0)

    def sees(self, name: str) -> bool:
        """May the caller use the model by one of its names?"""
        return any(map(current().key.may_use, self._pool.names(name)))

    def pool_for(self, *names: str) -> Pool:
        """The pool, for what is done to the models of these names. Raises `ModelNotFound`."""
        key = current().key
        for name in names:
            if not self.sees(name):
                message = f"there is no model {name[:200]!r} that the key {key.name!r} may use"
                raise ModelNotFound(message, param="model")
        return self._pool


def _names(cards: Sequence[ModelCard]) -> str:
    return ", ".join(card.id for card in cards[:MAX_LISTED]) or "none"
