"""A pool over a store: models come when they are asked for, stay for a while, and leave for others."""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pelton import config
from pelton.engine import machine
from pelton.errors import InsufficientMemory, ModelNotFound, Overloaded, QueueTimeout, Unavailable
from pelton.hub.store import Store
from pelton.pool import Pool, StoredModel
from pelton.pool.space import OVERHEAD
from tests.unit.scripted_engine import Client
from tests.unit.test_pool import run
from tests.unit.vocabularies import write_model


@pytest.fixture(autouse=True)
def client(monkeypatch: pytest.MonkeyPatch) -> None:
    Client.stand_in(monkeypatch)


def put(home: Path, name: str) -> None:
    """A model in the store."""
    path = home / "made.gguf"
    write_model(path, ggml__comment=name)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    store = Store(config.load(home=home).hub)
    store.blob(sha256).parent.mkdir(parents=True, exist_ok=True)
    path.rename(store.blob(sha256))
    with store.lock([sha256]):
        store.add(name, "a test", [("m.gguf", sha256)])


@asynccontextmanager
async def serving(home: Path, *names: str, **settings: Any) -> AsyncIterator[Pool]:
    for name in names:
        put(home, name)
    pool = Pool(config.load(home=home, offline=True, **settings), is_open=True)
    try:
        yield pool
    finally:
        await pool.close()
        assert all(client.is_closed for client in Client.made)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def loaded(pool: Pool) -> dict[str, str]:
    return {each.name: each.state for each in pool.loaded()}


@pytest.mark.parametrize(
    ("stored", "asked"),
    [
        ("smollm2", "smollm2:135M"),
        ("smollm2", "smollm2:latest"),
        ("owner/repo:Q4_K_M", "hf.co/owner/repo:q4_k_m"),
        ("owner/repo:Q4_K_M", "Owner/Repo"),
        ("owner/repo", "owner/repo:latest"),
        ("my-model", "my-model:latest"),
        ("my-model:small", "My-Model:small"),
    ],
)
def test_names_as_clients_write_them(tmp_path: Path, stored: str, asked: str) -> None:
    async def go() -> None:
        async with serving(tmp_path, stored) as pool:
            for _ in range(2):
                async with pool.use(asked) as service:
                    assert service.name == stored
                assert (await pool.model(asked)).id == stored
            assert len(Client.made) == 1

    run(go())


def test_a_request_loads_nothing_but_what_is_in_the_store(tmp_path: Path) -> None:
    outside = write_model(tmp_path / "outside.gguf")

    async def go() -> None:
        async with serving(tmp_path, "a") as pool:
            for name in (outside, "smollm2", "b", "../a", "owner/repo", "", "a" * 1000, "a\0"):
                with pytest.raises(ModelNotFound) as caught:
                    async with pool.use(name):
                        pass
                assert caught.value.param == "model"
            assert not Client.made

    run(go())


def test_a_closed_pool_serves_its_own_models_alone(tmp_path: Path) -> None:
    async def go() -> None:
        put(tmp_path, "a")
        put(tmp_path, "b")
        pool = Pool(config.load(home=tmp_path, offline=True))
        await pool.load("a")
        assert [card.id for card in await pool.models()] == ["a"]
        with pytest.raises(ModelNotFound, match="is not served here"):
            async with pool.use("b"):
                pass
        await pool.close()

    run(go())


def test_it_stays_for_as_long_as_the_last_request_says(tmp_path: Path) -> None:
    async def go() -> None:
        async with serving(tmp_path, "a", keep_alive="50ms") as pool:
            async with pool.use("a"):
                assert pool.loaded()[0].expires_at is None
                await asyncio.sleep(0.1)
                assert loaded(pool) == {"a": "ready"}
            async with pool.use("a", keep_alive=-1):
                pass
            await asyncio.sleep(0.1)
            assert loaded(pool) == {"a": "ready"}
            async with pool.use("a", keep_alive=0.02):
                pass
            assert pool.loaded()[0].expires_at is not None
            async with pool.use("a"):
                await asyncio.sleep(0.05)
                assert loaded(pool) == {"a": "ready"}
            await until(lambda: loaded(pool) == {})
            async with pool.use("a", keep_alive=0):
                pass
            assert loaded(pool) == {"a": "leaving"}
            await until(lambda: loaded(pool) == {})
            async with pool.use("a", keep_alive=math.inf):
                pass

    run(go())


def test_the_one_that_was_not_used_for_longest_leaves_and_no_busy_one(tmp_path: Path) -> None:
    async def go() -> None:
        async with serving(tmp_path, "a", "b", "c", max_loaded_models=2) as pool:
            for name in ("a", "b", "a"):
                async with pool.use(name):
                    pass
            async with pool.use("c"):
                assert loaded(pool) == {"a": "ready", "c": "ready"}
                async with pool.use("a"):
                    waiting = asyncio.create_task(use(pool, "b"))
                    await until(lambda: loaded(pool) == {"a": "ready", "b": "waiting", "c": "leaving"})
                    again = asyncio.create_task(use(pool, "c"))
                    await asyncio.sleep(0.02)
                    assert not waiting.done()
            assert [await waiting, await again] == ["b", "c"]

    run(go())


async def use(pool: Pool, name: str, seconds: float = 0.0) -> str:
    async with pool.use(name) as service:
        await asyncio.sleep(seconds)
        return service.name


def test_who_gives_up_waiting_for_room_makes_nobody_leave(tmp_path: Path) -> None:
    async def go() -> None:
        async with serving(tmp_path, "a", "b", max_loaded_models=1) as pool:
            async with pool.use("a"):
                waiting = asyncio.create_task(use(pool, "b"))
                await until(lambda: loaded(pool) == {"a": "leaving", "b": "waiting"})
                waiting.cancel()
                await until(lambda: loaded(pool) == {"a": "ready"})
                assert await use(pool, "a") == "a"
            assert [client.is_closed for client in Client.made] == [False, True]

    run(go())


def test_waiting_for_a_load_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Client, "loading", 1.0)

    async def go() -> None:
        async with serving(tmp_path, "a", load_timeout=0.3, max_load_queue=2) as pool:
            first = [asyncio.create_task(use(pool, "a")) for _ in range(2)]
            await until(lambda: pool._num_queued == 2)
            with pytest.raises(Overloaded):
                await use(pool, "a")
            for result in await asyncio.gather(*first, return_exceptions=True):
                assert isinstance(result, QueueTimeout)
                assert re.search(r"a is (waiting|loading) still, (0|50)% of it", str(result))
            await until(lambda: loaded(pool) == {"a": "ready"})
            assert await use(pool, "a") == "a"

    run(go())


def test_unloading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        async with serving(tmp_path, "a") as pool:
            with pytest.raises(ModelNotFound, match="is not loaded"):
                await pool.unload("a")
            busy = asyncio.create_task(use(pool, "a", 0.1))
            await until(lambda: loaded(pool) == {"a": "ready"})
            leaving = asyncio.create_task(pool.unload("a"))
            await asyncio.sleep(0)
            again = asyncio.create_task(use(pool, "a"))
            await busy
            await leaving
            assert await again == "a"
            assert [client.is_closed for client in Client.made] == [True, False]
            monkeypatch.setattr(Client, "loading", 10.0)
            await pool.unload("a")
            loading = asyncio.create_task(use(pool, "a"))
            await until(lambda: loaded(pool) == {"a": "loading"})
            await pool.unload("a")
            with pytest.raises(Unavailable, match="given up"):
                await loading

    run(go())


def test_what_is_in_the_store(tmp_path: Path) -> None:
    async def go() -> None:
        async with serving(tmp_path, "smollm2", "b") as pool:
            b, smollm2 = await pool.available()
            assert (b.name, smollm2.name, b.family, b.source) == ("b", "smollm2", "llama", "a test")
            assert (len(b.digest), b.modified_at > 1e9, b.size > 1000, b.problem) == (64, True, True, None)
            assert [card.id for card in await pool.models()] == ["b", "smollm2"]
            assert (await pool.metadata("b"))["general.architecture"] == "llama"
            await pool.copy("b", "mine:latest")
            assert (await pool.details("mine")).digest == b.digest
            await use(pool, "mine")
            await pool.delete("mine")
            await pool.delete("b")
            assert [each.name for each in await pool.available()] == ["smollm2"]
            with pytest.raises(ModelNotFound):
                await use(pool, "mine")
            for gone in ("b", "mine"):
                with pytest.raises(ModelNotFound):
                    await pool.delete(gone)
            with pytest.raises(ModelNotFound):
                await pool.copy("b", "c")
            with pytest.raises(ModelNotFound, match="cannot be"):
                await pool.copy("smollm2", "../x")
            assert (await pool.pull("smollm2")).name == "smollm2"
            with pytest.raises(ModelNotFound):
                await pool.pull(str(tmp_path / "made.gguf"))

    run(go())


def test_a_copy_replaces_what_had_its_name(tmp_path: Path) -> None:
    async def go() -> None:
        async with serving(tmp_path, "a", "b", "c") as pool:
            digest = (await pool.details("a")).digest
            await use(pool, "b")
            await pool.copy("a", "b")
            assert (await pool.details("b")).digest == digest
            assert len(list((tmp_path / "blobs").iterdir())) == 2
            assert await use(pool, "b") == "b"
            assert len(Client.made) == 2

    run(go())


MIB = 1 << 20


def test_models_share_one_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Client, "needs", (100 * MIB, 200 * MIB))
    each = 200 * MIB + OVERHEAD

    async def go() -> None:
        async with serving(tmp_path, "a", "b", "c", memory_budget=2 * each + 50 * MIB) as pool:
            for name in ("a", "b", "a", "c"):
                await use(pool, name)
                assert sum(model.memory for model in pool.loaded()) <= 2 * each + 50 * MIB
            assert [(model.name, model.memory) for model in pool.loaded()] == [("a", each), ("c", each)]

    run(go())


def test_nobody_leaves_for_idle_priority_and_it_leaves_for_everybody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Client, "needs", (200 * MIB, 200 * MIB))
    each = 200 * MIB + OVERHEAD

    async def idle(pool: Pool, name: str) -> str:
        async with pool.use(name, is_idle_priority=True) as service:
            await pool.until_leaving(name)
            return service.name

    async def go() -> None:
        async with serving(tmp_path, "a", "b", "c", memory_budget=2 * each + 50 * MIB) as pool:
            await use(pool, "b")
            batch = asyncio.create_task(idle(pool, "a"))
            await until(lambda: loaded(pool) == {"a": "ready", "b": "ready"})
            with pytest.raises(Unavailable, match="no room for c beside the models that others use"):
                await idle(pool, "c")
            assert loaded(pool) == {"a": "ready", "b": "ready"}
            assert await use(pool, "c") == "c"
            assert await batch == "a"
            assert loaded(pool) == {"b": "ready", "c": "ready"}
            monkeypatch.setattr(Client, "needs", (900 * MIB, 900 * MIB))
            with pytest.raises(InsufficientMemory):
                await idle(pool, "a")

    run(go())


def test_whoever_joins_a_load_of_idle_priority_has_others_leave_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go() -> None:
        async with serving(tmp_path, "a", "b", max_loaded_models=1) as pool:
            await use(pool, "b")
            both = await asyncio.gather(
                pool.use("a", is_idle_priority=True).__aenter__(), use(pool, "a"), return_exceptions=True
            )
            assert both[1] == "a"
            assert loaded(pool) == {"a": "ready"}

    run(go())


def test_memory_that_is_promised_is_not_free_though_nobody_has_taken_it_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Client, "needs", (100 * MIB, 200 * MIB))
    monkeypatch.setattr(machine, "free_memory", lambda: 600 * MIB)

    async def go() -> None:
        async with serving(tmp_path, "a", "b", memory_budget="8GB") as pool:
            await use(pool, "a")
            await use(pool, "b")
            assert loaded(pool) == {"b": "ready"}

    run(go())


def test_a_model_that_cannot_fit_is_refused_with_numbers_and_nobody_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go() -> None:
        async with serving(tmp_path, "a", "b", memory_budget=500 * MIB) as pool:
            await use(pool, "a")
            monkeypatch.setattr(Client, "needs", (900 * MIB, 900 * MIB))
            with pytest.raises(InsufficientMemory, match=r"b needs at least 1060.0 MiB, but only 500.0 MiB"):
                await use(pool, "b")
            assert loaded(pool) == {"a": "ready"}

    run(go())


def test_what_is_loaded_at_the_start_makes_nobody_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Client, "needs", (100 * MIB, 200 * MIB))

    async def go() -> None:
        async with serving(tmp_path, "a", "b", memory_budget=400 * MIB) as pool:
            await pool.load("a")
            with pytest.raises(InsufficientMemory, match=r"1 that stay beside it have 360.0 MiB"):
                await pool.load("b")
            await use(pool, "b")
            assert loaded(pool) == {"b": "ready"}

    run(go())


def test_what_is_fetched_anew_under_a_name_is_what_is_loaded_next(tmp_path: Path, monkeypatch) -> None:
    async def go() -> None:
        async with serving(tmp_path, "a", "b") as pool:
            async with pool.use("a") as first:
                pass
            found = await pool.details("a")
            changes = iter([found, found, found, msgspec.structs.replace(found, digest="another")])

            async def details(name: str) -> StoredModel:
                return next(changes)

            monkeypatch.setattr(pool._shelf, "pull", lambda name, report: None)
            monkeypatch.setattr(pool, "details", details)
            await pool.pull("a:latest")
            async with pool.use("a") as same:
                assert same is first
            await pool.pull("a")
            async with pool.use("a") as second:
                assert second is not first

    run(go())
