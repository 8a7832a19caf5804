"""/v1/files on the wire: the unmodified `openai` client, and raw HTTP where the client is too polite."""

from __future__ import annotations

import io
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import openai
import pytest

from pelton.server.keys import KeyStore
from pelton.server.store import Store
from tests.server.scripted import ScriptedService, client_of, serving

HOUR = {"anchor": "created_at", "seconds": 3600}


@pytest.fixture
def folder(store: Path) -> Path:
    return store.with_suffix(".files")


@pytest.fixture
def url(store: Path, service: ScriptedService) -> Iterator[str]:
    with serving(service, store=str(store), max_file=300_000, max_files=4, max_files_size=500_000) as address:
        yield address


def test_a_file_is_kept_shown_read_and_deleted(client, folder):
    data = os.urandom(200_000) + b"\r\n--x\r\n"
    made = client.files.create(file=("Tést.bin", data), purpose="user_data")
    assert (made.bytes, made.filename, made.purpose, made.object) == (len(data), "Tést.bin", "user_data", "file")
    assert made.expires_at is None
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).read() == data
    assert [path.name for path in folder.iterdir()] == [made.id]
    assert folder.stat().st_mode & 0o77 == (folder / made.id).stat().st_mode & 0o77 == 0
    deleted = client.files.delete(made.id)
    assert (deleted.id, deleted.deleted) == (made.id, True)
    assert list(folder.iterdir()) == []
    for ask in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            ask(made.id)


def test_files_are_listed_in_pages(client):
    ids = [client.files.create(file=io.BytesIO(b"x"), purpose=p).id for p in ("batch", "vision", "batch", "vision")]
    assert [file.id for file in client.files.list()] == ids[::-1]
    assert [file.id for file in client.files.list(order="asc", limit=3)] == ids
    assert [file.id for file in client.files.list(purpose="batch")] == [ids[2], ids[0]]
    page = client.files.list(limit=1, after=ids[2])
    assert ([file.id for file in page.data], page.has_more) == ([ids[1]], True)
    with pytest.raises(openai.NotFoundError):
        client.files.list(after="file-none")
    with pytest.raises(openai.BadRequestError, match="limit"):
        client.files.list(limit=0)


def test_files_end(client, store):
    lasting = client.files.create(file=b"a", purpose="batch")
    brief = client.files.create(file=b"b", purpose="assistants", expires_after=HOUR)
    assert lasting.expires_at - lasting.created_at == 30 * 24 * 3600
    assert brief.expires_at - brief.created_at == 3600
    with sqlite3.connect(store) as connection:
        connection.execute("UPDATE files SET expires_at = ? WHERE id = ?", (int(time.time()), brief.id))
    assert [file.id for file in client.files.list()] == [lasting.id]
    with pytest.raises(openai.NotFoundError):
        client.files.content(brief.id)


def test_files_are_bounded(client, folder):
    with pytest.raises(openai.APIStatusError, match="larger than the 300000 bytes") as error:
        client.files.create(file=b"x" * 300_001, purpose="batch")
    assert error.value.status_code == 413
    client.files.create(file=b"x" * 300_000, purpose="batch")
    with pytest.raises(openai.APIStatusError, match="larger than the 200000 bytes"):
        client.files.create(file=b"x" * 200_001, purpose="batch")
    for _ in range(3):
        client.files.create(file=b"x", purpose="batch")
    with pytest.raises(openai.APIStatusError, match="there are 4 files"):
        client.files.create(file=b"x", purpose="batch")
    assert len(list(folder.iterdir())) == 4


def test_files_that_come_at_once_are_bounded_too(store):
    with serving(ScriptedService(), store=str(store), max_files=1) as url:
        headers = {"content-type": "multipart/form-data; boundary=x"}
        begun = threading.Barrier(2)

        def slowly() -> Iterator[bytes]:
            yield FORM[:80]
            begun.wait(10)
            time.sleep(0.05)  # for the server to begin with both
            yield FORM[80:]

        with ThreadPoolExecutor(2) as threads:
            both = [threads.submit(httpx.post, f"{url}/v1/files", content=slowly(), headers=headers) for _ in range(2)]
            assert sorted(each.result().status_code for each in both) == [200, 413]
    assert len(list(store.with_suffix(".files").iterdir())) == 1


def test_where_nothing_can_be_written_it_says_so(url, folder):
    folder.write_text("in the way")
    response = httpx.post(f"{url}/v1/files", content=FORM, headers={"content-type": "multipart/form-data; boundary=x"})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")
    assert "File exists" in response.json()["error"]["message"]


def test_a_key_sees_its_own_files(url, store):
    made = Store(store)
    keys = KeyStore(made)
    texts = [keys.create(name)[1] for name in ("ada", "bob")]
    made.close()
    with client_of(url, texts[0]) as ada, client_of(url, texts[1]) as bob:
        file = ada.files.create(file=b"mine", purpose="user_data")
        assert [each.id for each in ada.files.list()] == [file.id]
        assert list(bob.files.list()) == []
        for ask in (bob.files.retrieve, bob.files.content, bob.files.delete):
            with pytest.raises(openai.NotFoundError):
                ask(file.id)
        assert ada.files.content(file.id).read() == b"mine"


FORM = (
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nhello\r\n'
    b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x--\r\n'
)

FIELDS = b"".join(b'--x\r\nContent-Disposition: form-data; name="%d"\r\n\r\n1\r\n' % i for i in range(33))


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (b"{}", "application/json", "must be multipart/form-data"),
        (FORM, "multipart/form-data", "boundary"),
        (FORM, "multipart/form-data; boundary=y", "no valid multipart/form-data"),
        (FORM[:-12], "multipart/form-data; boundary=x", "ends before"),
        (FORM[:60], "multipart/form-data; boundary=x", "ends before"),
        (FORM.replace(b'"purpose"', b'"other"'), "multipart/form-data; boundary=x", "purpose"),
        (FORM.replace(b"batch", b"joy"), "multipart/form-data; boundary=x", "purpose"),
        (FORM.replace(b"batch", b"b" * 2000), "multipart/form-data; boundary=x", "purpose is longer than 1024"),
        (FORM.replace(b'"file"', b'"purpose"'), "multipart/form-data; boundary=x", "file is missing"),
        (FORM.replace(b'"purpose"', b'"file"'), "multipart/form-data; boundary=x", "more than one file"),
        (FORM.replace(b'"a"', b'"\xff"'), "multipart/form-data; boundary=x", "not UTF-8"),
        (
            FORM.replace(b'"purpose"', b'"expires_after[seconds]"'),
            "multipart/form-data; boundary=x",
            "expires_after.seconds",
        ),
        (FIELDS + FORM, "multipart/form-data; boundary=x", "more than 32 fields"),
        (b"", "multipart/form-data; boundary=x", "ends before"),
    ],
)
def test_what_is_no_such_form_is_refused_and_leaves_nothing(url, folder, body, kind, message):
    response = httpx.post(f"{url}/v1/files", content=body, headers={"content-type": kind})
    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]
    assert not folder.exists() or list(folder.iterdir()) == []


def test_bytes_that_come_one_by_one_are_a_file(url):
    pieces = [FORM[i : i + 1] for i in range(len(FORM))]
    headers = {"content-type": "multipart/form-data; boundary=x"}
    made = httpx.post(f"{url}/v1/files", content=iter(pieces), headers=headers).json()
    assert made["bytes"] == 5
    assert httpx.get(f"{url}/v1/files/{made['id']}/content").content == b"hello"


def test_what_a_dead_server_left_is_cleaned_up(tmp_path, store, folder):
    with serving(ScriptedService(), store=str(store)) as url, client_of(url) as client:
        kept, lost = (client.files.create(file=b"x", purpose="vision") for _ in range(2))
    (folder / lost.id).unlink()
    old, young = folder / "file-0", folder / "file-1.part"
    for path in (old, young):
        path.write_bytes(b"x")
    os.utime(old, (time.time() - 7200,) * 2)
    with serving(ScriptedService(), store=str(store)) as url, client_of(url) as client:
        deadline = time.monotonic() + 20
        while old.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert [file.id for file in client.files.list()] == [kept.id]
    assert {path.name for path in folder.iterdir()} == {kept.id, young.name}


def test_without_a_store_there_are_none():
    with serving(ScriptedService()) as url:
        for response in (httpx.get(f"{url}/v1/files"), httpx.get(f"{url}/v1/batches")):
            assert response.status_code == 404
            assert "without a store" in response.json()["error"]["message"]
