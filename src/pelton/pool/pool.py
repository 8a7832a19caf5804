"""The pool: models are loaded when they are first asked for, stay while they are used and for a time after that, and
leave when others need their memory."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import Context
from typing import TYPE_CHECKING

import msgspec

from pelton.config import Config
from pelton.engine.link import Opening
from pelton.engine.protocol import Needs
from pelton.errors import ModelNotFound, Overloaded, QueueTimeout, Unavailable
from pelton.formats.digest import is_changed
from pelton.pool import loading
from pelton.pool.cards import Loading, Memory, ModelCard, Report, Resident
from pelton.pool.hold import Hold
from pelton.pool.shelf import Shelf
from pelton.pool.space import OVERHEAD, NoRoomNow, Space
from pelton.pool.spec import ModelSpec, Names, key
from pelton.pool.store_verbs import StoreVerbs, nobody

if TYPE_CHECKING:
    from pelton.engine.child import Child
    from pelton.service import Service

log = logging.getLogger("pelton.server")


class Pool(StoreVerbs):
    """The models by the names that clients use. All methods belong to one event loop.

    `specs` are the models that have a name here. `is_open`: those of the store can be had, too. Either way a request
    makes nothing be fetched: only `load` and `pull` fetch.
    """

    def __init__(
        self,
        config: Config,
        specs: Iterable[ModelSpec] = (),
        *,
        is_open: bool = False,
        in_process: bool = False,
        child: Child | None = None,
    ) -> None:
        """`in_process`: engines run in this process, in the event loop's thread. `child`: a process for the first one
        that is loaded; the caller closes it."""
        super().__init__(Shelf(config.hub), Names(specs))
        self._config = config
        self._is_open = is_open
        self._in_process = in_process
        self._child = child
        self._space = Space(config.pool, self._retire, in_process=in_process)
        self._holds = self._space.holds
        self._turn = asyncio.Lock()
        self._num_queued = 0
        self._is_closed = self._loads_nothing = False

    # what requests do

    @asynccontextmanager
    async def use(
        self, name: str, *, keep_alive: float | None = None, is_idle_priority: bool = False
    ) -> AsyncIterator[Service]:
        """The service of a model, loaded if it is not; it stays for as long as it is used so. `keep_alive`: seconds
        that it stays after that (0: it leaves at once, less than 0 or inf: for ever); None: as configured.
        `is_idle_priority`: no other model leaves for it, and this one leaves for others as if it were not used.

        Raises `ModelNotFound`, `InsufficientMemory` with the numbers, `Overloaded` where too many wait for loads,
        `QueueTimeout` where the load takes too long, `Unavailable` where others would have to leave, or what the load
        ended in.
        """
        hold = await self._enter(await self._spec(name), is_idle_priority=is_idle_priority)
        assert hold.service is not None
        try:
            yield hold.service
        finally:
            self._leave(hold, keep_alive, is_idle_priority=is_idle_priority)

    async def until_leaving(self, name: str) -> None:
        """Wait until a model leaves, or is to leave, for others."""
        while (hold := self._find(name)) is None or not hold.is_leaving:
            await self._space.change()

    async def models(self) -> list[ModelCard]:
        """All that can be used, loaded or not, by name."""
        return await asyncio.to_thread(self._cards)

    async def model(self, name: str) -> ModelCard:
        """One of them. Raises `ModelNotFound`."""
        spec = await self._spec(name)
        return await asyncio.to_thread(self._card, spec)

    def names(self, name: str) -> tuple[str, ...]:
        """All names of the model of that name."""
        spec = self._names.find(name)
        return (name,) if spec is None else (spec.name, *spec.aliases)

    def loaded(self) -> list[Resident]:
        """Those that take memory or are about to, by name."""
        now = asyncio.get_running_loop().time()
        return [self._holds[name].card(now) for name in sorted(self._holds)]

    def services(self) -> list[Service]:
        """Of the models that are loaded, by name: to look at, not to send requests to."""
        return [hold.service for _, hold in sorted(self._holds.items()) if hold.service is not None]

    def memory(self) -> Memory:
        """What all loaded models share."""
        return self._space.memory

    # what administrators do

    async def load(self, model: str, report: Report = nobody, *, name: str | None = None) -> Service:
        """Fetch `model` (a catalogue's name, a hub's name, or a path) if it is not here, and load it, to stay. `name`:
        what clients call it; without it, `model`. No other model leaves for it.

        Two loads of one name are one. Raises what went wrong; a later load tries again.
        """
        name = name or model
        spec = self._names.find(name)
        if spec is None:
            spec = ModelSpec(name=name, model=model, engine=self._config.engine, text=self._config.text)
            self._names.add(spec)
        hold = await self._join(spec, report, is_preload=True)
        self._leave(hold)
        assert hold.service is not None
        return hold.service

    async def unload(self, name: str) -> None:
        """Unload a model: its requests in flight end first, new ones load it again. One that is being loaded is given
        up. Raises `ModelNotFound` for one that is not loaded."""
        hold = self._find(name)
        if hold is None:
            raise ModelNotFound(f"the model {name[:200]!r} is not loaded", param="model")
        hold.leaves_for = None
        self._retire(hold)
        while self._holds.get(hold.name) is hold:
            await self._space.change()

    def give_up_loads(self) -> None:
        """Load nothing from now on: who waits for a load gets `Unavailable`. What is loaded stays."""
        self._loads_nothing = True
        for hold in list(self._holds.values()):
            if hold.service is None:
                self._retire(hold)
        self._space.notify()

    async def close(self) -> None:
        """End all engines; loads under way are given up. May be called twice."""
        self._is_closed = True
        holds = list(self._holds.values())
        self._holds.clear()
        self._space.notify()
        for hold in holds:
            _stop_timer(hold)
            hold.task.cancel()
        loads = await asyncio.gather(*(hold.task for hold in holds), return_exceptions=True)
        closing = [each.close() for each in loads if not isinstance(each, BaseException)]
        leaving = [hold.closing for hold in holds if hold.closing is not None]
        for error in await asyncio.gather(*closing, *leaving, return_exceptions=True):
            if isinstance(error, Exception):  # of one model, while others are to end as well
                log.error("a model did not end well", exc_info=error)

    # names

    async def _spec(self, name: str) -> ModelSpec:
        if hold := self._find(name):
            return hold.spec
        if spec := self._names.find(name):
            return spec
        if not self._is_open:
            raise ModelNotFound(f"the model {name[:200]!r} is not served here", param="model")
        try:
            return self._stored((await asyncio.to_thread(self._shelf.find, name)).name)
        except ModelNotFound:
            message = f"the model {name[:200]!r} is not in this server's store"
            raise ModelNotFound(message, param="model") from None

    def _stored(self, name: str) -> ModelSpec:
        return ModelSpec(
            name=name,
            model=name,
            engine=msgspec.structs.replace(self._config.engine, draft_model=""),  # which is for those that were named
            text=self._config.text,
            keep_alive=self._config.pool.keep_alive,
        )

    def _find(self, name: str) -> Hold | None:
        spec = self._names.find(name)
        return self._holds.get(spec.name if spec is not None else key(name))

    def _cards(self) -> list[ModelCard]:
        specs = {spec.name: spec for spec in self._names.all() if spec.name in self._holds or self._is_here(spec)}
        if self._is_open:
            specs = {entry.name: self._stored(entry.name) for entry in self._shelf.entries()} | specs
        return [self._card(specs[name]) for name in sorted(specs)]

    def _is_here(self, spec: ModelSpec) -> bool:
        return self._shelf.created(spec.model) > 0

    def _card(self, spec: ModelSpec) -> ModelCard:
        hold = self._holds.get(spec.name)
        service = hold.service if hold is not None else None
        return ModelCard(
            id=spec.name,
            created=self._shelf.created(spec.model),
            context=None if service is None else service.context,
            weight_bytes=None if service is None else service.weight_bytes,
            aliases=spec.aliases,
        )

    # the life of a model

    async def _enter(self, spec: ModelSpec, *, is_idle_priority: bool) -> Hold:
        seconds = self._config.pool.load_timeout
        try:
            async with asyncio.timeout(None if seconds == math.inf else seconds):
                return await self._join(spec, is_idle_priority=is_idle_priority)
        except TimeoutError:
            hold = self._holds.get(spec.name)
            state = "is not loaded yet" if hold is None else f"is {hold.state} still, {hold.share:.0%} of it is loaded"
            raise QueueTimeout(f"after {seconds:g} s the model {spec.name} {state}", retry_after=10.0) from None

    async def _join(
        self, spec: ModelSpec, report: Report = nobody, *, is_preload: bool = False, is_idle_priority: bool = False
    ) -> Hold:
        """Become a user of a model that is loaded by then."""
        while True:
            hold = await self._joined(spec, report, is_preload=is_preload, is_idle_priority=is_idle_priority)
            if hold is not None:
                return hold

    async def _joined(
        self, spec: ModelSpec, report: Report, *, is_preload: bool, is_idle_priority: bool
    ) -> Hold | None:
        """`_join`, tried once. None: it was being loaded at idle priority, and found no room as such."""
        while True:
            if self._is_closed:
                raise Unavailable("the pool is closed")
            hold = self._holds.get(spec.name)
            if hold is None:
                if self._loads_nothing:
                    raise Unavailable("the server is shutting down: no model is loaded any more")
                hold = self._begin(spec, report, is_preload=is_preload)
            if _is_stale(hold):
                log.warning("the file of %s was changed: it is loaded anew", hold.name)
                self._retire(hold)
            if not hold.is_leaving:
                break
            with self._queued():
                await self._space.change()
        hold.num_users += 1
        hold.num_idle_users += is_idle_priority
        _stop_timer(hold)
        _mark(hold, is_idle_priority)
        if hold.service is None:
            try:
                with self._queued():
                    await asyncio.wait([hold.task])  # unlike the task itself, this is cancelled for nobody else
                _result(hold)
            except BaseException as error:
                self._leave(hold, is_idle_priority=is_idle_priority)
                if isinstance(error, NoRoomNow) and not is_idle_priority:
                    return None
                raise
        return hold

    @contextmanager
    def _queued(self) -> Iterator[None]:
        limit = self._config.pool.max_load_queue
        if self._num_queued >= limit:
            raise Overloaded(f"{limit} requests wait for models that are being loaded: no more may wait")
        self._num_queued += 1
        try:
            yield
        finally:
            self._num_queued -= 1

    def _leave(self, hold: Hold, keep_alive: float | None = None, *, is_idle_priority: bool = False) -> None:
        hold.num_users -= 1
        hold.num_idle_users -= is_idle_priority
        _mark(hold, is_idle_priority)
        if keep_alive is not None:
            hold.keep_alive = math.inf if keep_alive < 0 else keep_alive
        if hold.num_users == 0:
            self._rest(hold)

    def _rest(self, hold: Hold) -> None:
        """Nobody uses it now: it leaves, at once or in a while."""
        if self._holds.get(hold.name) is not hold:
            return
        if hold.service is None:
            if hold.is_waiting and not hold.is_preload:
                self._retire(hold)  # nobody is left who would have others leave for it
        elif hold.is_leaving or hold.keep_alive <= 0:
            self._retire(hold)
        elif hold.keep_alive < math.inf:
            later = asyncio.get_running_loop().call_later
            hold.timer = later(hold.keep_alive, self._retire, hold, context=hold.context)
        self._space.notify()

    def _begin(self, spec: ModelSpec, report: Report, *, is_preload: bool) -> Hold:
        hold = self._holds[spec.name] = Hold(spec, asyncio.get_running_loop().time())
        hold.is_preload = is_preload
        # A context of its own, as all that happens to a model has: it is not done for one request alone.
        hold.context = Context()
        hold.task = asyncio.create_task(self._load(hold, report), name=f"load {spec.name}", context=hold.context)
        hold.task.add_done_callback(lambda _: self._on_loaded(hold), context=hold.context)
        return hold

    async def _load(self, hold: Hold, report: Report) -> Service:
        """One model at a time is prepared and looks for room, in the order in which they came."""

        def settle(memory: int, pid: int | None) -> None:
            hold.memory, hold.loading_pid = memory + OVERHEAD, pid
            self._end_turn(hold)

        def progress(share: float) -> None:
            hold.share = share
            report(Loading(hold.name, share))

        async def admit(needs: Needs) -> int:
            return await self._space.find_room(hold, needs) - OVERHEAD

        found = await loading.find(hold.spec, self._config.hub, report, may_fetch=hold.is_preload)
        progress(0.0)
        await self._turn.acquire()
        hold.has_turn = True
        child, self._child = self._child, None
        try:
            service = await loading.open_model(
                hold.spec,
                found,
                self._config.hub,
                Opening(admit, settle, progress, child),
                is_shared=self._is_shared,
                in_process=self._in_process,
            )
        finally:
            self._end_turn(hold)
        progress(1.0)
        return service

    @property
    def _is_shared(self) -> bool:
        """May there be several models at once?"""
        return self._config.pool.max_loaded_models != 1 and (self._is_open or len(self._names.all()) > 1)

    def _end_turn(self, hold: Hold) -> None:
        if hold.has_turn:
            hold.has_turn = False
            self._turn.release()

    def _on_loaded(self, hold: Hold) -> None:
        if self._holds.get(hold.name) is not hold:  # the pool is closed
            return
        if hold.task.cancelled() or hold.task.exception() is not None:
            del self._holds[hold.name]
        else:
            hold.service = hold.task.result()
            if hold.num_users == 0:
                self._rest(hold)
        self._space.notify()

    def _retire(self, hold: Hold) -> None:
        """Let it go as soon as nobody uses it."""
        _stop_timer(hold)
        hold.is_leaving = True
        if hold.service is None:
            hold.task.cancel()
        elif hold.num_users == 0 and hold.closing is None:
            closing = self._close(hold, hold.service)
            hold.closing = asyncio.create_task(closing, name=f"unload {hold.name}", context=hold.context)
        self._space.notify()

    async def _close(self, hold: Hold, service: Service) -> None:
        try:
            await service.close()
        finally:
            if self._holds.get(hold.name) is hold:
                del self._holds[hold.name]
            self._space.notify()

    def _replaced(self, name: str) -> None:
        for hold in list(self._holds.values()):
            if hold.service is not None and key(hold.spec.model) == key(name):
                self._retire(hold)

    def _forget(self, name: str) -> None:
        """What that name meant in the store is not what it means now."""
        hold = self._holds.get(key(name))
        if hold is not None and self._names.find(name) is None:
            self._retire(hold)


def _mark(hold: Hold, is_idle_priority: bool) -> None:
    """A request begins or ends."""
    hold.used_at = asyncio.get_running_loop().time()
    if not is_idle_priority:
        hold.wanted_at = hold.used_at


def _stop_timer(hold: Hold) -> None:
    if hold.timer is not None:
        hold.timer.cancel()
        hold.timer = None


def _is_stale(hold: Hold) -> bool:
    """Does nothing run, and does the model's file hold something else by now?"""
    service = hold.service
    if service is None or hold.is_leaving or (hold.num_users and service.engine.trouble is None):
        return False
    return is_changed(service.engine.info.files)


def _result(hold: Hold) -> Service:
    if hold.task.cancelled():
        raise Unavailable(f"the load of {hold.name} was given up")
    return hold.task.result()
