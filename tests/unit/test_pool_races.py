"""Uses, unloads, failures, clients that go away and the end of the server, all at once, on a simulated clock."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pelton import config
from pelton.config import EngineConfig, HubConfig
from pelton.engine import machine
from pelton.engine.link import Opening
from pelton.engine.protocol import Needs
from pelton.errors import FormatError, InsufficientMemory, PeltonError
from pelton.pool import ModelSpec, Pool, loading
from pelton.pool.space import OVERHEAD
from pelton.service import Service
from tests.unit.simulated_clock import simulate

MIB = 1 << 20
SIZES = {"a": 100 * MIB, "b": 200 * MIB, "c": 300 * MIB, "huge": 5000 * MIB}
BUDGET = 800 * MIB


@dataclass
class World:
    """What the engines take and do, and what must hold of it at any time."""

    fails: list[bool]
    taken: Counter[str] = field(default_factory=Counter)
    num_inside: Counter[str] = field(default_factory=Counter)
    is_disturbed: bool = False
    """Are there failures and unloads, which requests hear of?"""
    is_ending: bool = False

    async def open_model(
        self, spec: ModelSpec, found: loading.Found, hub: HubConfig, opening: Opening, **options: Any
    ) -> Service:
        usual = SIZES[spec.name]
        try:
            await asyncio.sleep(0.5)
            memory = await opening.admit(Needs(usual // 2, usual))
        except asyncio.CancelledError:
            await loading.to_its_end(asyncio.sleep(0.3))  # a process ends
            raise
        assert memory >= usual // 2
        assert spec.name not in self.taken
        self.taken[spec.name] = min(memory, usual) + OVERHEAD
        assert self.taken.total() <= BUDGET
        opening.settle(min(memory, usual), None)
        try:
            await asyncio.sleep(2)
            opening.progress(0.5)
            await asyncio.sleep(2)
            if self.fails and self.fails.pop():
                raise FormatError("it is broken")
        except BaseException:
            await loading.to_its_end(asyncio.sleep(0.3))
            del self.taken[spec.name]
            raise
        return Fake(spec.name, self)


class Fake(Service):
    """A service that only counts."""

    def __init__(self, name: str, world: World) -> None:
        self.name = name
        self._world = world
        self.engine = SimpleNamespace(  # type: ignore[assignment]
            pid=None, trouble=None, info=SimpleNamespace(context=1, weight_bytes=1, kv_bytes=1, arena_bytes=1, files=())
        )

    async def close(self) -> None:
        assert self._world.is_ending or not self._world.num_inside[self.name]
        await asyncio.sleep(0.3)
        del self._world.taken[self.name]


async def find(*_: object, **__: object) -> loading.Found:
    await asyncio.sleep(0.1)
    return loading.Found(Path("x"), ())


@dataclass(frozen=True)
class Use:
    """A request: at what time, for which model, for how long, and when its client gives up."""

    at: float
    name: str
    seconds: float
    keep_alive: float | None
    patience: float


TIMES = st.sampled_from([0.0, 0.1, 0.5, 0.6, 1.0, 2.6, 3.0, 4.6, 5.0, 5.1, 7.0, 10.0, 12.0, 20.0])
USES = st.builds(
    Use,
    at=TIMES,
    name=st.sampled_from(sorted(SIZES)),
    seconds=st.sampled_from([0.0, 0.0, 1.0, 4.0, 30.0]),
    keep_alive=st.sampled_from([None, None, 0.0, 3.0]),
    patience=st.sampled_from([0.05, 0.3, 0.7, 3.0, 1000.0, 1000.0, 1000.0]),
)


async def request(pool: Pool, world: World, use: Use) -> None:
    await asyncio.sleep(use.at)
    try:
        async with asyncio.timeout(use.patience), pool.use(use.name, keep_alive=use.keep_alive) as service:
            world.num_inside[use.name] += 1
            try:
                assert service.name == use.name
                assert use.name in world.taken
                await asyncio.sleep(use.seconds)
                assert world.is_ending or use.name in world.taken
            finally:
                world.num_inside[use.name] -= 1
    except TimeoutError:
        assert use.patience < 1000
    except InsufficientMemory:
        assert use.name == "huge"
    except PeltonError:
        assert world.is_disturbed


async def unload(pool: Pool, at: float, name: str) -> None:
    await asyncio.sleep(at)
    try:
        await pool.unload(name)
    except PeltonError:
        return


async def close(pool: Pool, world: World, at: float) -> None:
    await asyncio.sleep(at)
    world.is_ending = True
    await pool.close()
    assert not world.taken


COMES_BACK = [Use(0.0, "a", 0.0, None, 0.3), Use(0.5, "a", 0.0, None, 1000.0)]
"""The second one comes while the load that the first one has left is given up."""


@example(COMES_BACK, [], [], 0, None)
@settings(max_examples=120, deadline=None)
@given(
    st.lists(USES, min_size=1, max_size=14),
    st.lists(st.tuples(TIMES, st.sampled_from(sorted(SIZES))), max_size=4),
    st.lists(st.booleans(), max_size=4),
    st.sampled_from([0, 0, 1, 2]),
    st.none() | TIMES,
)
def test_whatever_comes_at_once(uses, unloads, fails, max_loaded_models, end):
    world = World(list(fails), is_disturbed=any(fails) or bool(unloads) or end is not None)

    async def run() -> None:
        specs = [ModelSpec(name=name, model=name, engine=EngineConfig(), keep_alive=8.0) for name in SIZES]
        pool = Pool(config.load(memory_budget=BUDGET, max_loaded_models=max_loaded_models), specs)
        work = [request(pool, world, use) for use in uses] + [unload(pool, *each) for each in unloads]
        if end is not None:
            work.append(close(pool, world, end))
        await asyncio.gather(*work)
        if end is None:
            await asyncio.sleep(20)  # past every keep-alive, and a load that nobody waits for any more
            assert pool.loaded() == []
            assert not world.taken
        assert not pool._turn.locked()
        assert pool._num_queued == 0
        await pool.close()

    with (
        patch.object(loading, "open_model", world.open_model),
        patch.object(loading, "find", find),
        patch.object(machine, "free_memory", lambda: 1 << 40),
    ):
        simulate(run())


def with_pool(work: Callable[[Pool, World], Coroutine[Any, Any, None]], *, max_loaded_models: int = 0) -> None:
    """Run `work` with a pool of models that stay until others need their memory."""
    world = World([])
    specs = [ModelSpec(name=name, model=name, engine=EngineConfig()) for name in SIZES]
    settings = config.load(memory_budget=BUDGET, max_loaded_models=max_loaded_models, max_load_queue=10_000)

    async def run() -> None:
        pool = Pool(settings, specs)
        await work(pool, world)
        assert not pool._turn.locked()
        await pool.close()

    with (
        patch.object(loading, "open_model", world.open_model),
        patch.object(loading, "find", find),
        patch.object(machine, "free_memory", lambda: 1 << 40),
    ):
        simulate(run())


@pytest.mark.parametrize("max_loaded_models", [0, 1, 2])
def test_nobody_starves_where_all_are_asked_for_all_the_time(max_loaded_models):
    async def work(pool: Pool, world: World) -> None:
        waits: list[float] = []

        async def ask(name: str, at: float) -> None:
            await asyncio.sleep(at)
            began = asyncio.get_running_loop().time()
            async with pool.use(name):
                waits.append(asyncio.get_running_loop().time() - began)
                await asyncio.sleep(4)

        await asyncio.gather(*(ask(name, i / 2) for name in "abc" for i in range(120)))
        assert len(waits) == 360
        assert max(waits) < 40  # three loads of 5 s, and between them the 4 s of those that came before

    with_pool(work, max_loaded_models=max_loaded_models)


def test_a_busy_model_that_leaves_is_enough_whatever_happens_to_it_meanwhile():
    async def work(pool: Pool, world: World) -> None:
        async def ask(name: str, at: float, seconds: float) -> None:
            await asyncio.sleep(at)
            async with pool.use(name):
                await asyncio.sleep(seconds)

        async def look(at: float) -> None:
            await asyncio.sleep(at)
            assert {each.name: each.state for each in pool.loaded()} == {"a": "ready", "b": "leaving", "c": "waiting"}

        async def give_up(at: float) -> None:  # after which all is looked at again
            await asyncio.sleep(at)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1), pool.use("huge"):
                    pass

        uses = [
            ask("b", 0, 10),
            ask("b", 0, 30),
            ask("a", 6, 60),
            ask("c", 12, 1),
            look(14),
            give_up(16),
            look(20),
            look(30),
        ]
        await asyncio.gather(*uses)

    with patch.dict(SIZES, dict.fromkeys("abc", 100 * MIB)):
        with_pool(work, max_loaded_models=2)
