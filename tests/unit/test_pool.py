from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pelton import config, logs
from pelton.errors import FormatError, HubError, InsufficientMemory, ModelNotFound, Unavailable, UnsupportedModel
from pelton.formats import gguf
from pelton.pool import Loading, Pool, Progress
from pelton.request import Request
from tests.unit.scripted_engine import Client
from tests.unit.vocabularies import write_model


@pytest.fixture(autouse=True)
def client(monkeypatch: pytest.MonkeyPatch) -> None:
    Client.stand_in(monkeypatch)


@pytest.fixture
def model(tmp_path: Path) -> str:
    return write_model(tmp_path / "m.gguf")


def make(tmp_path: Path, **options: Any) -> Pool:
    return Pool(config.load(home=tmp_path, offline=True, threads=3), **options)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 20))


def test_load_get_and_close(tmp_path: Path, model: str) -> None:
    seen: list[Progress | Loading] = []

    async def use() -> None:
        models = make(tmp_path, in_process=True)
        with pytest.raises(ModelNotFound, match="is not served here") as caught:
            await models.model("small")
        assert caught.value.param == "model"
        service = await models.load(model, seen.append, name="small")
        async with models.use("small") as used:
            assert used is service
        assert [card.id for card in await models.models()] == ["small"]
        assert (await models.model("small")).context == service.context
        assert (await models.model("small")).weight_bytes == 4000
        with pytest.raises(ModelNotFound, match="is not served here"):
            await models.model(model)
        with pytest.raises(ModelNotFound):
            async with models.use("other"):
                pass
        events = await service.generate(Request(id="r", model="small", prompt="Hello"))
        assert [event async for event in events]
        await models.close()
        await models.close()
        assert models.loaded() == []
        with pytest.raises(Unavailable):
            await models.load(model)

    run(use())
    assert [event for event in seen if isinstance(event, Loading)] == [
        Loading("small", 0.0),
        Loading("small", 0.5),
        Loading("small", 1.0),
    ]
    (only,) = Client.made
    assert only.is_closed
    assert (str(only.arguments[0]), only.arguments[1].threads, only.arguments[2]) == (model, 3, True)


def test_a_model_that_does_not_end_well_keeps_no_other_from_it(
    tmp_path: Path, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def failing() -> None:
        raise OSError("no more")

    async def use() -> None:
        models = make(tmp_path)
        for name in ("a", "b"):
            await models.load(model, name=name)
        Client.made[0].close = failing  # type: ignore[method-assign]
        await models.close()

    run(use())
    assert Client.made[1].is_closed
    assert [record.message for record in caplog.records] == ["a model did not end well"]


def test_two_loads_at_once_are_one(tmp_path: Path, model: str) -> None:
    async def use() -> None:
        models = make(tmp_path)
        first = asyncio.create_task(models.load(model))
        await asyncio.sleep(0)
        services = await asyncio.gather(first, models.load(model), models.load(model))
        assert len({id(service) for service in services}) == 1
        assert len(Client.made) == 1
        other = await models.load(model, name="other")
        assert other is not services[0]
        assert [card.id for card in await models.models()] == sorted([model, "other"])
        await models.close()
        assert all(client.is_closed for client in Client.made)

    run(use())


def test_a_load_that_fails_tells_all_and_can_be_tried_again(tmp_path: Path, model: str) -> None:
    Client.failures.append(InsufficientMemory("too big"))

    async def use() -> None:
        models = make(tmp_path)
        results = await asyncio.gather(models.load(model), models.load(model), return_exceptions=True)
        assert [type(result) for result in results] == [InsufficientMemory, InsufficientMemory]
        assert Client.made[0].is_closed
        assert models.loaded() == []
        await models.load(model)
        await models.close()

    run(use())


def test_an_engine_does_not_go_on_loading_for_a_vocabulary_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Client, "loading", 10.0)
    no_vocabulary = tmp_path / "none.gguf"
    gguf.write(no_vocabulary, {"general.architecture": "llama"}, [])

    async def use() -> None:
        models = make(tmp_path)
        with pytest.raises(UnsupportedModel, match="tokenizer"):
            await models.load(str(no_vocabulary))
        (client,) = Client.made
        assert not client.is_loading
        assert client.is_closed

    run(use())


def test_a_caller_that_gives_up_does_not_spoil_the_load(tmp_path: Path, model: str) -> None:
    async def use() -> None:
        models = make(tmp_path)
        caller = asyncio.create_task(models.load(model))
        await asyncio.sleep(0)
        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)
        async with models.use(model) as service:
            assert service.name == model
        assert len(Client.made) == 1
        await models.close()

    run(use())


def test_closing_gives_up_a_load(tmp_path: Path, model: str) -> None:
    async def use() -> None:
        models = make(tmp_path)
        loading = asyncio.create_task(models.load(model))
        while not Client.made:
            await asyncio.sleep(0.001)
        await models.close()
        with pytest.raises(Unavailable, match="given up"):
            await loading
        assert Client.made[0].is_closed

    run(use())


def test_an_interrupted_pull_is_not_waited_for(tmp_path: Path) -> None:
    code = """
import asyncio, sys, time
from pelton import config, logs
from pelton.pool import Pool, loading
loading.pull = lambda *_: time.sleep(60)
async def main():
    models = Pool(config.load(home=sys.argv[1]))
    try:
        await asyncio.wait_for(models.load("smollm2"), 0.1)
    except TimeoutError:
        await models.close()
        print("left")
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=30)
    assert done.stdout == "left\n"


def test_errors_of_names_and_files(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUX" + bytes(20))
    no_vocabulary = tmp_path / "none.gguf"
    gguf.write(no_vocabulary, {"general.architecture": "llama", "x": np.float32(1)}, [])

    async def use() -> None:
        models = make(tmp_path)
        for name, error in (
            ("no-such-model", ModelNotFound),
            (str(tmp_path / "absent.gguf"), ModelNotFound),
            ("owner/repo", HubError),
            (str(broken), FormatError),
        ):
            with pytest.raises(error):
                await models.load(name)
        with pytest.raises(Exception, match="tokenizer"):
            await models.load(str(no_vocabulary))
        assert models.loaded() == []
        assert all(client.is_closed for client in Client.made)
        await models.close()

    run(use())


def test_what_happens_to_a_model_is_not_done_for_the_request_that_came_first(tmp_path: Path, model: str) -> None:
    seen: list[str] = []

    async def use() -> None:
        models = make(tmp_path)
        logs.request_id.set("the first")
        await models.load(model, lambda event: seen.append(logs.request_id.get()))
        await models.close()

    run(use())
    assert set(seen) == {""}


def test_a_file_that_was_changed_is_loaded_anew_once_nothing_runs(tmp_path: Path, model: str) -> None:
    async def use() -> None:
        models = make(tmp_path)
        first = await models.load(model)
        async with models.use(model) as busy:
            Path(model).write_bytes(Path(model).read_bytes() + b" ")
            async with models.use(model) as beside:
                assert beside is busy is first
            Client.made[0].trouble = FormatError("its file is not what it was")  # its engine has died, too
            later = asyncio.create_task(models.load(model))
            await asyncio.sleep(0.05)
            assert not later.done()
        second = await later
        assert second is not first
        assert Client.made[0].is_closed
        Path(model).write_bytes(Path(model).read_bytes()[:-1])
        async with models.use(model) as third:
            assert third is not second
        Path(model).unlink()
        async with models.use(model) as fourth:
            assert fourth is third  # what was read of it stands
        assert len(Client.made) == 3
        await models.close()

    run(use())


def test_a_load_that_is_given_up_is_begun_by_nobody_else(tmp_path: Path, model: str, monkeypatch) -> None:
    async def use() -> None:
        models = make(tmp_path)
        loaded = await models.load(model, name="loaded")
        monkeypatch.setattr(Client, "loading", 100.0)
        waiting = [asyncio.create_task(models.load(model, name="slow")) for _ in range(3)]
        await asyncio.sleep(0.05)
        models.give_up_loads()
        for result in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(result, Unavailable)
        async with models.use("loaded") as service:
            assert service is loaded
        with pytest.raises(Unavailable, match="shutting down"):
            await models.load(model, name="another")
        await models.close()

    run(use())
