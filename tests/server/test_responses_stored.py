"""Responses that are kept: threads, owners, bounds, background runs, and what becomes of all that when servers end and
disks are full."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx2 as httpx
import openai
import pytest

from pelton.errors import Unavailable
from pelton.server import responses, responses_background, responses_store
from pelton.server.responses_store import ResponseStore
from pelton.server.responses_types import Response
from tests.server.scripted import ScriptedService, client_of, serving

ASK = {"model": "scripted", "input": "Hi"}


@pytest.fixture
def url(service: ScriptedService, store: Path) -> Iterator[str]:
    with serving(service, store=str(store)) as address:
        yield address


def waited(client: openai.OpenAI, id: str, *, until: tuple[str, ...]) -> openai.types.responses.Response:
    deadline = time.monotonic() + 10
    while (response := client.responses.retrieve(id)).status not in until:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return response


def test_a_thread_goes_on_without_old_instructions_and_survives_a_restart(service, store):
    with serving(service, store=str(store)) as url, client_of(url) as client:
        first = client.responses.create(**ASK, instructions="Be kind.")
    with serving(service, store=str(store)) as url, client_of(url) as client:
        second = client.responses.create(model="scripted", input="More", previous_response_id=first.id)
        said = [(each.role, each.content) for each in service.requests[-1].messages]
        assert said == [("user", "Hi"), ("assistant", "Hello 🦙"), ("user", "More")]
        assert second.previous_response_id == first.id
        listed = [each.id for each in client.responses.input_items.list(second.id, order="asc")]
        assert len(listed) == 3
        assert listed[1] == first.output[0].id
        referred = [{"type": "item_reference", "id": first.output[0].id}, {"role": "user", "content": "Why?"}]
        client.responses.create(model="scripted", input=referred)
        assert [each.content for each in service.requests[-1].messages] == ["Hello 🦙", "Why?"]
        with pytest.raises(openai.BadRequestError, match="twice"):
            client.responses.create(model="scripted", input=referred, previous_response_id=first.id)
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)
        for gone in (first.id, second.id):
            with pytest.raises(openai.BadRequestError) as error:
                client.responses.create(**ASK, previous_response_id=gone)
            assert (error.value.code, error.value.param) == ("previous_response_not_found", "previous_response_id")


def test_a_thread_is_read_beside_the_event_loop(client, monkeypatch):
    first = client.responses.create(**ASK)
    before, threads = responses_store._items, set()
    monkeypatch.setattr(
        responses_store, "_items", lambda rows: threads.add(threading.current_thread().name) or before(rows)
    )
    client.responses.create(**ASK, previous_response_id=first.id)
    assert threads
    assert {name.partition("_")[0] for name in threads} <= {"asyncio", "uvloop"}  # whose executors they are


def test_an_input_refers_to_no_more_than_may_be_read(client, monkeypatch):
    made = [client.responses.create(model="scripted", input="x" * 3000) for _ in range(3)]
    referred = [{"type": "item_reference", "id": each.output[0].id} for each in made]
    monkeypatch.setattr(responses, "MAX_THREAD", 10_000)
    client.responses.create(model="scripted", input=referred[:2])
    with pytest.raises(openai.BadRequestError, match="over 10000 bytes"):
        client.responses.create(model="scripted", input=referred)
    with pytest.raises(openai.BadRequestError, match="refers to 257 items"):
        client.responses.create(model="scripted", input=[{"id": f"msg_{i}"} for i in range(257)])


def test_what_is_deleted_is_gone_from_the_disk(service, store):
    with serving(service, store=str(store)) as url, client_of(url) as client:
        made = client.responses.create(model="scripted", input="a secret of mine " * 50)
        files = [store, Path(f"{store}-wal")]
        assert any(b"a secret of mine" in each.read_bytes() for each in files)
        client.responses.delete(made.id)
        assert not any(b"a secret of mine" in each.read_bytes() for each in files if each.exists())


def test_in_the_background(client, service):
    service.delay = 0.05
    made = client.responses.create(**ASK, background=True)
    assert (made.status, made.background, made.output) == ("queued", True, [])
    done = waited(client, made.id, until=("completed",))
    assert (done.output_text, done.usage.output_tokens) == ("Hello 🦙", 3)
    assert client.responses.cancel(made.id).status == "completed"
    whole = list(client.responses.retrieve(made.id, stream=True))
    assert [each.type for each in whole[:3]] == ["response.created", "response.queued", "response.in_progress"]
    rest = list(client.responses.retrieve(made.id, stream=True, starting_after=4))
    assert [each.sequence_number for each in rest] == list(range(5, len(whole)))
    with pytest.raises(openai.BadRequestError, match="starting_after"):
        client.responses.retrieve(made.id, stream=True, starting_after=-3)
    with client.responses.stream(response_id=made.id) as stream:
        assert stream.get_final_response().output_text == "Hello 🦙"
    streamed = list(client.responses.create(**ASK, background=True, stream=True))
    assert streamed[-1].type == "response.completed"


def test_background_responses_are_cancelled_and_deleted(client, service):
    service.hang_after = 1
    made = client.responses.create(**ASK, background=True)
    waited(client, made.id, until=("in_progress",))
    with pytest.raises(openai.BadRequestError, match="is queued"):
        client.responses.create(**ASK, previous_response_id=made.id)
    cancelled = client.responses.cancel(made.id)
    assert (cancelled.status, cancelled.output_text) == ("cancelled", "Hel")
    assert service.num_open == 0
    other = client.responses.create(**ASK, background=True)
    waited(client, other.id, until=("in_progress",))
    client.responses.delete(other.id)
    assert service.num_open == 0
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(other.id)
    service.hang_after = None
    whole = client.responses.create(**ASK)
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(whole.id)
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.retrieve(whole.id, stream=True)


def test_who_cancels_twice_takes_no_end_away(client, service, monkeypatch):
    service.hang_after = 1
    made = client.responses.create(**ASK, background=True)
    waited(client, made.id, until=("in_progress",))
    begun, may_end = threading.Event(), threading.Event()
    update = ResponseStore.update

    async def slowly(self: ResponseStore, response: Response) -> None:
        begun.set()
        while not may_end.is_set():
            await asyncio.sleep(0.001)
        await update(self, response)

    monkeypatch.setattr(ResponseStore, "update", slowly)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(client.responses.cancel, made.id)
        assert begun.wait(10)
        second = threads.submit(client.with_options(timeout=0.2).responses.cancel, made.id)
        with contextlib.suppress(openai.APITimeoutError):
            second.result()
        may_end.set()
        assert first.result().status == "cancelled"
    assert client.responses.retrieve(made.id).status == "cancelled"
    assert list(client.responses.retrieve(made.id, stream=True))[-1].type == "response.failed"


def test_background_responses_end_with_their_server(service, store):
    service.hang_after = 1
    with serving(service, store=str(store)) as url, client_of(url) as client:
        made = client.responses.create(**ASK, background=True)
        waited(client, made.id, until=("in_progress",))
    with serving(service, store=str(store)) as url, client_of(url) as client:
        failed = client.responses.retrieve(made.id)
        assert (failed.status, failed.output_text) == ("failed", "Hel")
        assert "the server ended" in failed.error.message


def test_a_model_that_takes_long_is_not_waited_for(client, service, monkeypatch):
    monkeypatch.setattr(responses_background, "ACCEPT_SECONDS", 0.0)
    service.refuse = Unavailable("no engine")
    made = client.responses.create(**ASK, background=True)
    failed = waited(client, made.id, until=("failed",))
    assert failed.error.message == "no engine"


def test_a_key_sees_its_own(service, store, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("ada secret-a\nbob secret-b\n")
    with (
        serving(service, store=str(store), api_key_file=str(keys)) as url,
        client_of(url, "secret-a") as ada,
        client_of(url, "secret-b") as bob,
    ):
        made = ada.responses.create(**ASK)
        assert ada.responses.retrieve(made.id).id == made.id
        theirs = bob.responses
        for act in (theirs.retrieve, theirs.delete, theirs.cancel, theirs.input_items.list):
            with pytest.raises(openai.NotFoundError):
                act(made.id)
        with pytest.raises(openai.BadRequestError):
            theirs.create(**ASK, previous_response_id=made.id)
    with serving(service, store=str(store)) as url, client_of(url) as anyone:
        assert anyone.responses.retrieve(made.id).id == made.id


def test_stores_are_bounded(service, store):
    with serving(service, store=str(store), responses_size=5000) as url, client_of(url) as client:
        ids = [client.responses.create(**ASK).id for _ in range(7)]
        kept = [id for id in ids if httpx.get(f"{url}/v1/responses/{id}").status_code == 200]
        assert kept == ids[-len(kept) :]
        assert 1 < len(kept) < 7
        made = client.responses.create(model="scripted", input="x" * 9000)
        assert made.model_extra["store"] is False
        assert "could not be stored" in made.model_extra["warnings"][0]
    with serving(service, store=str(store), responses_max_age=0.01) as url, client_of(url) as client:
        time.sleep(0.02)
        client.responses.create(**ASK)
        assert httpx.get(f"{url}/v1/responses/{kept[-1]}").status_code == 404


def test_one_that_runs_is_kept_though_others_are_too_many(service, store):
    with serving(service, store=str(store), responses_size=5000) as url, client_of(url) as client:
        service.hang_after = 1
        running = client.responses.create(**ASK, background=True)
        waited(client, running.id, until=("in_progress",))
        service.hang_after = None
        for _ in range(7):
            client.responses.create(**ASK)
        assert client.responses.retrieve(running.id).status == "in_progress"
        with closing(sqlite3.connect(store)) as connection:
            assert connection.execute("SELECT runner FROM responses WHERE id = ?", (running.id,)).fetchone()[0]


def test_without_a_store_answers_say_so(service):
    with serving(service) as url, client_of(url) as client:
        made = client.responses.create(**ASK)
        assert (made.output_text, made.model_extra["store"]) == ("Hello 🦙", False)
        assert "stores no responses" in made.model_extra["warnings"][0]
        assert "warnings" not in client.responses.create(**ASK, store=False).model_extra
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(made.id)
        refused = httpx.post(f"{url}/v1/responses", json={**ASK, "background": True})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "background")


def test_a_full_disk_loses_no_answer(service, store):
    with serving(service, store=str(store)) as url, client_of(url) as client:
        assert client.responses.create(**ASK).model_extra["store"] is True
        fill(store)
        for is_stream in (False, True):
            made = client.responses.create(**ASK, stream=is_stream)
            made = list(made)[-1].response if is_stream else made
            assert (made.status, made.output_text, made.model_extra["store"]) == ("completed", "Hello 🦙", False)
            assert "could not be stored: the server's store cannot be used" in made.model_extra["warnings"][0]
        assert httpx.post(f"{url}/v1/responses", json={**ASK, "background": True}).status_code == 503


def test_nor_does_it_lose_one_in_the_background(client, service, store):
    service.delay = 0.1
    made = client.responses.create(**ASK, background=True)
    fill(store)
    done = waited(client, made.id, until=("completed",))
    assert (done.output_text, done.model_extra["store"]) == ("Hello 🦙", False)
    change(store, "DROP TRIGGER no_insert", "DROP TRIGGER no_update")
    assert client.responses.retrieve(made.id).model_extra["store"] is True


def test_one_that_fits_neither_disk_nor_memory_has_failed(client, service, store, monkeypatch):
    monkeypatch.setattr(responses_background, "MAX_KEPT_BYTES", 1)
    service.delay = 0.1
    made = client.responses.create(**ASK, background=True)
    fill(store)
    failed = waited(client, made.id, until=("failed", "completed"))
    assert "could not store this response" in failed.error.message
    change(store, "DROP TRIGGER no_insert", "DROP TRIGGER no_update")
    assert client.responses.retrieve(made.id).status == "failed"
    with closing(sqlite3.connect(store)) as connection:
        assert connection.execute("SELECT runner FROM responses").fetchall() == [(None,)]


def fill(store: Path) -> None:
    """Nothing can be written to the table any more."""
    says = "ON responses BEGIN SELECT raise(abort, 'disk is full'); END"
    change(store, f"CREATE TRIGGER no_insert BEFORE INSERT {says}", f"CREATE TRIGGER no_update BEFORE UPDATE {says}")


def change(store: Path, *statements: str) -> None:
    with closing(sqlite3.connect(store)) as connection:
        for statement in statements:
            connection.execute(statement)
