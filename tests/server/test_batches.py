"""/v1/batches on the wire, with the unmodified `openai` client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path

import httpx2 as httpx
import openai
import pytest
from openai.types import Batch

from pelton.errors import EngineDied, InsufficientMemory, Unavailable
from pelton.request import IDLE, Request, TextEvent
from pelton.server import batch_input, batch_store
from pelton.server.keys import KeyStore
from pelton.server.ledger import used
from pelton.server.store import Store
from tests.server.scripted import ScriptedPool, ScriptedService, client_of, serving, serving_pool

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
OVER = ("failed", "completed", "expired", "cancelled")


class GatedService(ScriptedService):
    """Answers chats while the gate is open; what they say is what they were asked."""

    is_shut = False
    num_answered = 0
    num_begun = num_given_up = 0
    failures: list[Exception]

    async def generate(self, request: Request) -> AsyncGenerator[TextEvent, None]:
        if getattr(self, "failures", None):
            raise self.failures.pop()
        self.num_begun += 1
        try:
            while self.is_shut:
                await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            self.num_given_up += 1
            raise
        self.num_answered += 1
        return await super().generate(request)


@pytest.fixture
def service() -> GatedService:
    return GatedService()


@pytest.fixture
def url(store: Path, service: GatedService) -> Iterator[str]:
    with serving(service, store=str(store), max_body=2000, max_batch_lines=20) as address:
        yield address


def line(id: str, url: str = CHAT, **body: object) -> bytes:
    body = {"model": "scripted", "messages": MESSAGES, **body}
    return json.dumps({"custom_id": id, "method": "POST", "url": url, "body": body}).encode()


def begin(client: openai.OpenAI, *lines: bytes, endpoint: str = CHAT, **more: object) -> Batch:
    file = client.files.create(file=b"\n".join(lines), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more,  # type: ignore[arg-type]
    )  # fmt: skip


def wait(client: openai.OpenAI, id: str, until: Callable[[Batch], bool] = lambda batch: batch.status in OVER) -> Batch:
    deadline = time.monotonic() + 20
    while not until(batch := client.batches.retrieve(id)):
        assert time.monotonic() < deadline, batch
        time.sleep(0.01)
    return batch


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def results(client: openai.OpenAI, id: str | None) -> dict[str, dict]:
    if id is None:
        return {}
    lines = [json.loads(text) for text in client.files.content(id).text.splitlines()]
    assert len({each["custom_id"] for each in lines}) == len(lines)
    return {each["custom_id"]: each for each in lines}


def test_a_batch_of_embeddings(client, service):
    lines = [line(f"{i}", "/v1/embeddings", messages=None, input=["a", "b"]) for i in range(3)]
    batch = wait(client, begin(client, *lines, endpoint="/v1/embeddings").id)
    assert (batch.status, batch.usage.input_tokens, batch.usage.output_tokens) == ("completed", 30, 0)
    first = results(client, batch.output_file_id)["0"]["response"]["body"]
    assert [each["embedding"] for each in first["data"]] == [[0.5, -0.5, 0.5, 0.5]] * 2
    assert {request.priority for request in service.requests} == {IDLE}


def test_its_input_is_read_beside_the_event_loop(client, monkeypatch):
    read, threads = batch_input.read, set()
    monkeypatch.setattr(batch_input, "read", lambda line: threads.add(threading.current_thread().name) or read(line))
    wait(client, begin(client, GOOD).id)
    assert threads
    assert {name.partition("_")[0] for name in threads} <= {"asyncio", "uvloop"}  # whose executors they are


def test_a_batch_is_answered(client, service, store):
    lines = [line(f"request {i}", seed=i) for i in range(12)]
    hour = {"anchor": "created_at", "seconds": 3600}
    made = begin(client, *lines, b"", metadata={"who": "ada"}, output_expires_after=hour)
    assert (made.status, made.object, made.endpoint, made.metadata) == ("validating", "batch", CHAT, {"who": "ada"})
    assert made.expires_at - made.created_at == 24 * 3600
    batch = wait(client, made.id)
    assert (batch.status, batch.model, batch.errors) == ("completed", "scripted", None)
    assert batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    assert batch.request_counts.model_dump() == {"total": 12, "completed": 12, "failed": 0}
    assert batch.usage.model_dump() == {
        "input_tokens": 60, "input_tokens_details": {"cached_tokens": 24}, "output_tokens": 36,
        "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 96,
    }  # fmt: skip
    answers = results(client, batch.output_file_id)
    assert set(answers) == {f"request {i}" for i in range(12)}
    first = answers["request 0"]
    assert first["error"] is None
    assert first["response"]["status_code"] == 200
    assert first["response"]["request_id"] == first["id"]
    assert first["response"]["body"]["choices"][0]["message"]["content"] == "Hello 🦙"
    assert first["response"]["body"]["object"] == "chat.completion"
    output = client.files.retrieve(batch.output_file_id)
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert output.expires_at - output.created_at == 3600
    assert batch.error_file_id is None
    assert sorted(request.sampling.seed for request in service.requests) == list(range(12))
    assert {request.priority for request in service.requests} == {IDLE}
    assert len(list(store.with_suffix(".files").iterdir())) == 2


def test_completions_too_and_what_fails_is_in_the_error_file(client, url):
    url_path = "/v1/completions"
    lines = [
        line("good", url_path, prompt="a", messages=None),
        line("streamed", url_path, prompt="a", messages=None, stream=True),
        line("wrong", url_path, prompt="a", messages=None, temperature=-1.5, n=0, top_p="x"),
    ]
    batch = wait(client, begin(client, *lines, endpoint=url_path).id)
    assert batch.request_counts.model_dump() == {"total": 3, "completed": 1, "failed": 2}
    assert set(results(client, batch.output_file_id)) == {"good"}
    errors = results(client, batch.error_file_id)
    assert {id: (each["response"]["status_code"], each["error"]) for id, each in errors.items()} == {
        "streamed": (400, None),
        "wrong": (400, None),
    }
    assert errors["streamed"]["response"]["body"]["error"]["param"] == "stream"
    text = httpx.get(f"{url}/metrics").text
    assert 'pelton_batches{status="completed"} 1.0' in text
    assert 'pelton_batch_requests_total{outcome="failed"} 2.0' in text
    assert 'pelton_requests_total{finish="stop",model="scripted"} 1.0' in text
    assert 'pelton_request_seconds_count{model="scripted"} 0.0' in text


def test_embeddings_and_responses_too(client, service):
    for endpoint, body in (
        ("/v1/embeddings", {"input": ["a", "b"], "messages": None}),
        ("/v1/responses", {"input": "Hi", "messages": None}),
    ):
        lines = [line("good", endpoint, **body), line("late", endpoint, **body, background=True)]
        batch = wait(client, begin(client, *lines, endpoint=endpoint).id)
        assert batch.usage.input_tokens > 0, endpoint
        assert results(client, batch.output_file_id)["good"]["response"]["status_code"] == 200
        error = results(client, batch.error_file_id)["late"]["response"]["body"]["error"]
        assert error["param"] == "background"
    assert {request.priority for request in service.requests} == {IDLE}


GOOD = line("a")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", [("empty_file", None, "input_file_id")]),
        (b"\n \n", [("empty_file", None, "input_file_id")]),
        (GOOD + b"\nnot json\n" + b"{}\n[1]", [
            ("invalid_json_line", 2, None), ("missing_required_parameter", 3, "custom_id"),
            ("invalid_request", 4, None)]),
        (GOOD + b"\n\n" + GOOD, [("duplicate_custom_id", 3, "custom_id")]),
        (line("a", "/v1/completions"), [("mismatched_url", 1, "url")]),
        (GOOD.replace(b"POST", b"GET"), [("invalid_request", 1, "method")]),
        (GOOD.replace(b'"a"', b'""'), [("invalid_custom_id", 1, "custom_id")]),
        (GOOD.replace(b'"a"', b"7"), [("invalid_request", 1, "custom_id")]),
        (GOOD.replace(b'"Hi"', b'"\xff"'), [("invalid_encoding", 1, None)]),
        (line("a", padding="x" * 2000) + b"\n" + line("b", "x"),
         [("line_too_long", 1, None), ("mismatched_url", 2, "url")]),
        (b"\n".join(line(str(i)) for i in range(21)), [("too_many_tasks", 21, None)]),
        (line("a", model="other"), [("model_not_found", None, "model")]),
        (GOOD + b"\n" + line("b", model="alias"), [("mismatched_model", 2, "body.model")]),
        (line("a", model=None), [("invalid_request", 1, "body.model")]),
        (b'{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": []}',
         [("invalid_request", 1, "body")]),
        (b'{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {}}',
         [("missing_required_parameter", 1, "body.model")]),
        (GOOD[:-1] + b', "x": ' + b"[" * 1500, [("invalid_json_line", 1, None)]),
    ],
)  # fmt: skip
def test_a_bad_input_fails_with_its_lines(client, service, data, expected):
    batch = wait(client, begin(client, data).id)
    assert batch.status == "failed"
    assert [(error.code, error.line, error.param) for error in batch.errors.data] == expected
    assert (batch.output_file_id, batch.error_file_id, batch.request_counts.total) == (None, None, 0)
    assert service.requests == []


def test_a_byte_order_mark_and_carriage_returns_are_no_matter(client):
    batch = wait(client, begin(client, b"\xef\xbb\xbf" + line("a") + b"\r", line("b") + b"\r\n").id)
    assert set(results(client, batch.output_file_id)) == {"a", "b"}


def test_what_cannot_be_a_batch_is_refused(client, url):
    file = client.files.create(file=GOOD, purpose="user_data").id
    asked = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
    for changes, status, param in (
        ({}, 400, "purpose"),
        ({"input_file_id": "file-none"}, 404, "file_id"),
        ({"endpoint": "/v1/images"}, 400, "endpoint"),
        ({"completion_window": "1h"}, 400, "completion_window"),
        ({"metadata": {"k" * 65: "v"}}, 400, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, 400, "output_expires_after"),
    ):
        response = httpx.post(f"{url}/v1/batches", json={**asked, **changes})
        assert (response.status_code, response.json()["error"]["param"]) == (status, param), response.text
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("batch_none")
    with pytest.raises(openai.NotFoundError):
        client.batches.cancel("batch_none")


def test_batches_are_listed_in_pages(client):
    ids = [begin(client, b"bad").id for _ in range(3)]
    assert [batch.id for batch in client.batches.list(limit=2)] == ids[::-1]
    page = client.batches.list(after=ids[1])
    assert ([batch.id for batch in page.data], page.has_more) == ([ids[0]], False)


def test_so_many_batches_are_known_and_no_more(client, service, monkeypatch):
    monkeypatch.setattr(batch_store, "MAX_KEPT", 2)
    service.is_shut = True
    running = begin(client, GOOD)
    wait(client, running.id, lambda batch: batch.status == "in_progress")
    ids = [wait(client, begin(client, b"bad").id).id for _ in range(4)]
    assert [batch.id for batch in client.batches.list()] == [*ids[:1:-1], running.id]
    service.is_shut = False
    assert wait(client, running.id).status == "completed"


def test_a_row_that_cannot_be_read_ends_not_all_batches_for_ever(client, store, caplog):
    def change(statement: str) -> None:
        with contextlib.closing(sqlite3.connect(store)) as connection, connection:
            connection.execute(statement)

    change(
        "INSERT INTO batches (id, owner, status, is_open, input_file_id, output_id, error_id, document)"
        " VALUES ('batch_0', '', 'validating', 1, 'i', 'o', 'e', CAST('{}' AS BLOB))"
    )
    made = begin(client, GOOD)
    until(lambda: any("cannot be looked after" in record.message for record in caplog.records))
    change("DELETE FROM batches WHERE id = 'batch_0'")
    assert wait(client, made.id).status == "completed"


def test_a_batch_is_cancelled_and_keeps_what_is_done(client, service):
    made = begin(client, *(line(str(i)) for i in range(8)))
    wait(client, made.id)
    service.num_answered, service.is_shut = 0, True
    other = begin(client, *(line(str(i)) for i in range(8)))
    wait(client, other.id, lambda batch: batch.status == "in_progress")
    with pytest.raises(openai.ConflictError, match="input of batch"):
        client.files.delete(other.input_file_id)
    assert client.batches.cancel(other.id).status in ("cancelling", "cancelled")
    batch = wait(client, other.id)
    assert (batch.status, batch.request_counts.total) == ("cancelled", 8)
    assert batch.cancelling_at <= batch.cancelled_at
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(other.id)
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(made.id)
    service.is_shut = False
    assert client.files.delete(other.input_file_id).deleted


def test_what_a_batch_writes_counts_among_its_keys_bytes(store, service):
    with serving(service, store=str(store), max_files_size=4000) as url, client_of(url) as client:
        lines = [line(str(i)) for i in range(16)]
        batch = wait(client, begin(client, *lines).id)
        assert (batch.status, batch.errors.data[0].code) == ("failed", "files_too_large")
        done = results(client, batch.output_file_id)
        assert 0 < len(done) == batch.request_counts.completed < 16
        with pytest.raises(openai.APIStatusError, match="bytes, and may have 4000") as error:
            client.files.create(file=b"x", purpose="batch")
        assert error.value.status_code == 413


def test_a_batch_expires_and_says_which_requests_were_lost(client, service, store):
    service.is_shut = True
    made = begin(client, *(line(str(i)) for i in range(6)))
    wait(client, made.id, lambda batch: batch.status == "in_progress")
    expire_all(store)
    batch = wait(client, made.id)
    assert batch.status == "expired"
    errors = results(client, batch.error_file_id)
    assert set(errors) == {str(i) for i in range(6)}
    assert {each["error"]["code"] for each in errors.values()} == {"batch_expired"}
    assert {each["response"] for each in errors.values()} == {None}


def test_a_batch_whose_requests_are_done_expires_no_more(service, store):
    with serving(service, store=str(store)) as url, client_of(url) as client:
        made = wait(client, begin(client, GOOD).id)
    with contextlib.closing(sqlite3.connect(store)) as connection, connection:  # as a server that died then leaves it
        connection.execute("DELETE FROM files WHERE purpose = 'batch_output'")
        connection.execute(
            "UPDATE batches SET is_open = 1, status = 'finalizing', document = CAST(json_set(CAST(document AS TEXT),"
            " '$.status', 'finalizing', '$.expires_at', 1) AS BLOB)"
        )
    with serving(service, store=str(store)) as url, client_of(url) as client:
        assert wait(client, made.id).status == "completed"


def test_a_batch_that_expires_ends_without_its_input_too(client, service, store):
    service.is_shut = True
    made = begin(client, GOOD)
    until(lambda: service.num_begun)  # the input is open by then
    (store.with_suffix(".files") / made.input_file_id).unlink()
    expire_all(store)
    assert wait(client, made.id).status == "expired"


def expire_all(store: Path) -> None:
    with contextlib.closing(sqlite3.connect(store)) as connection, connection:
        connection.execute(
            "UPDATE batches SET document = CAST(json_set(CAST(document AS TEXT), '$.expires_at', 1) AS BLOB)"
        )


def test_what_may_pass_is_tried_again_and_what_kills_engines_is_not_for_ever(client, service):
    service.failures = [EngineDied("it died"), Unavailable("not now")]
    batch = wait(client, begin(client, GOOD).id)
    assert batch.request_counts.completed == 1
    service.failures = [EngineDied("it died")] * 3 + [InsufficientMemory("too big")]
    batch = wait(client, begin(client, GOOD).id)
    assert results(client, batch.error_file_id)["a"]["response"]["status_code"] == 507
    batch = wait(client, begin(client, GOOD).id)
    assert results(client, batch.error_file_id)["a"]["response"]["body"]["error"]["code"] == "engine_died"


def test_a_batch_is_its_keys(store, url, service):
    made = Store(store)
    keys = KeyStore(made)
    ada, text = keys.create("ada", rpm=100)
    _, other = keys.create("bob", models=["else"])
    with client_of(url, text) as client, client_of(url, other) as bob:
        batch = wait(client, begin(client, GOOD).id)
        assert batch.request_counts.completed == 1
        assert service.requests[0].tenant == f"idle work of {ada.id}"
        for ask in (bob.batches.retrieve, bob.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                ask(batch.id)
        assert list(bob.batches.list()) == []
        with pytest.raises(openai.NotFoundError):
            bob.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")
        failed = wait(bob, begin(bob, GOOD).id)
        assert [error.code for error in failed.errors.data] == ["model_not_found"]
        service.is_shut = True
        stopped = begin(client, *(line(str(i)) for i in range(9)))
        wait(client, stopped.id, lambda batch: batch.status == "in_progress")
        keys.revoke("ada")
        service.is_shut = False
    deadline = time.monotonic() + 20
    while not (rows := made.read("SELECT document FROM batches WHERE id = ? AND NOT is_open", (stopped.id,))):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    ended = json.loads(rows[0][0])
    assert (ended["status"], ended["errors"]["data"][0]["message"]) == ("failed", "the API key was revoked")
    assert ended["request_counts"]["completed"] < 9
    while not (ledger := used(made)):
        time.sleep(0.01)
    assert ledger[0].key_id == ada.id
    made.close()


def test_lines_are_given_up_where_others_need_their_models_memory(service, store):
    pool = ScriptedPool(service)
    with serving_pool(pool, store=str(store)) as url, client_of(url) as client:
        service.is_shut = True
        made = begin(client, *(line(str(i)) for i in range(6)))
        wait(client, made.id, lambda batch: batch.status == "in_progress")
        until(lambda: service.num_begun)
        pool.unloaded.append("scripted")
        until(lambda: service.num_given_up)
        service.is_shut = False
        assert client.chat.completions.create(model="scripted", messages=MESSAGES).choices
        assert client.batches.retrieve(made.id).request_counts.completed == 0
        pool.unloaded.clear()
        assert wait(client, made.id).request_counts.completed == 6


def test_a_batch_goes_on_after_a_restart(store):
    first = GatedService()
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(serving(first, store=str(store)))
        client = stack.enter_context(client_of(url))
        wait(client, begin(client, line("warm")).id)  # the model is known to be there: several lines at once
        first.num_answered, first.is_shut = 0, False
        made = begin(client, *(line(str(i)) for i in range(30)))
        waiting = begin(client, *(line(str(i)) for i in range(3)))
        wait(client, made.id, lambda batch: batch.request_counts.completed > 3)
        first.is_shut = True
        done = client.batches.retrieve(made.id).request_counts.completed
    (job,) = [path for path in store.with_suffix(".files").iterdir() if b'"custom_id":"3"' in path.read_bytes()][:1]
    with job.open("ab") as file:
        file.write(b'{"id": "torn')
    second = GatedService()
    with serving(second, store=str(store)) as url, client_of(url) as client:
        batch = wait(client, made.id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 30)
        assert set(results(client, batch.output_file_id)) == {str(i) for i in range(30)}
        assert wait(client, waiting.id).request_counts.completed == 3
    assert len(second.requests) <= 30 - done + 3
    assert batch.usage.output_tokens == 90


def test_one_server_of_those_that_share_a_store_runs_the_batches(store):
    first, second = GatedService(), GatedService()
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(serving(first, store=str(store)))
        with client_of(url) as client:
            wait(client, begin(client, line("a")).id)
        other = stack.enter_context(serving(second, store=str(store)))
        with client_of(other) as client:
            assert wait(client, begin(client, line("a"), line("b")).id).request_counts.completed == 2
    assert (len(first.requests), len(second.requests)) == (3, 0)
