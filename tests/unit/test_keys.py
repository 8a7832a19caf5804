"""Keys, limits and the ledger, without a server."""

from __future__ import annotations

import asyncio
import re
import sqlite3
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pelton.errors import ConfigError, InvalidRequest, RateLimited, Unauthorized, Unavailable
from pelton.request import Usage
from pelton.server import ledger as ledger_module
from pelton.server import limits, store_opening
from pelton.server.keys import ANYONE, Key, KeyRing, KeyStore, given_keys
from pelton.server.ledger import Ledger, used
from pelton.server.limits import Limits, duration
from pelton.server.store import MIGRATIONS, Connection, Store


@pytest.fixture
def store(tmp_path: Path):
    opened = Store(tmp_path / "home" / "server.sqlite")
    yield opened
    opened.close()


def test_a_key_is_found_by_its_text_alone_and_the_file_has_no_text(store):
    keys = KeyStore(store)
    key, text = keys.create("ada", scopes=["models"], models=["a", "b", "a"], rpm=5, tpm=100)
    other, _ = keys.create("bob")
    assert (key.models, key.rpm, key.tpm, other.models) == (("a", "b"), 5, 100, None)
    assert keys.find(text) == key
    for wrong in (text[:-1] + ("A" if text[-1] != "A" else "B"), text.replace(key.id, other.id), text + "x", "", "ada"):
        assert keys.find(wrong) is None
    with sqlite3.connect(store.path) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    held = store.path.read_bytes()
    assert key.id.encode() in held
    assert text.rpartition("-")[2].encode() not in held
    assert stat.S_IMODE(store.path.stat().st_mode) == 0o600


def test_a_file_that_others_may_read_is_closed_to_them(tmp_path):
    path = tmp_path / "server.sqlite"
    path.touch(0o644)
    Store(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_processes_that_share_a_file_share_its_keys_at_once(store):
    keys, others = KeyStore(store), Store(store.path)
    ring = KeyRing([], KeyStore(others))
    assert ring.authenticate([]) is ANYONE
    _, text = keys.create("ada")
    assert ring.authenticate(["nothing", text]).name == "ada"
    with pytest.raises(Unauthorized, match="no API key"):
        ring.authenticate([])
    with pytest.raises(Unauthorized, match="not known"):
        ring.authenticate(["sk-other"])
    keys.revoke("ada")
    with pytest.raises(Unauthorized, match="revoked"):
        ring.authenticate([text])
    with pytest.raises(Unauthorized):  # the last one gone, nobody comes in
        ring.authenticate([])
    with pytest.raises(InvalidRequest, match="no key 'ada'"):
        keys.revoke("ada")
    keys.create("ada")  # the name is free again
    with pytest.raises(InvalidRequest, match="already"):
        keys.create("ada")
    assert [key.name for key in keys.all()] == ["ada", "ada"]
    others.close()


def test_a_key_ends_in_time(store):
    keys = KeyStore(store)
    _, text = keys.create("soon", expires_at=time.time() + 0.2)
    ring = KeyRing([], keys)
    assert ring.authenticate([text]).name == "soon"
    time.sleep(0.25)
    with pytest.raises(Unauthorized, match="expired"):
        ring.authenticate([text])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"name": ""}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"name": "a" * 101}, "name"),
        ({"scopes": ["root"]}, "scopes"),
        ({"scopes": []}, "scopes"),
        ({"rpm": 0}, "rpm"),
        ({"tpm": 1 << 62}, "tpm"),
        ({"expires_at": 1.0}, "expires"),
        ({"expires_at": float("nan")}, "expires"),
    ],
)
def test_what_a_key_cannot_be(store, fields, param):
    with pytest.raises(InvalidRequest) as caught:
        KeyStore(store).create(**{"name": "ok", **fields})
    assert caught.value.param == param
    assert KeyStore(store).all() == []


def test_scopes():
    def may(*scopes: str) -> list[bool]:
        key = KeyRing([("x", "y")], None).authenticate(["y"])
        key = type(key)(id="1", name="1", scopes=frozenset(scopes))
        return [key.may("inference"), key.may("models"), key.may("admin")]

    assert may("inference") == [True, False, False]
    assert may("models") == [True, True, False]
    assert may("admin") == [True, True, True]


def test_keys_that_a_server_is_started_with(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# ours\n\nada  secret-1\nsecret-2\n")
    keys = given_keys("secret-0", str(file))
    assert keys == [("api-key", "secret-0"), ("ada", "secret-1"), ("", "secret-2")]
    ring = KeyRing(keys, None)
    assert not ring.is_empty
    assert ring.authenticate(["secret-1"]).name == "ada"
    assert ring.authenticate(["secret-2"]).may("admin")
    for text, match in (("# none\n", "no key"), ("a b c\n", "line 1"), ("schlüssel\n", "visible ASCII")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=match):
            given_keys("", str(file))
    with pytest.raises(ConfigError, match="api_key_file"):
        given_keys("", str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="visible"):
        given_keys("two words", "")


def test_a_key_without_a_name_is_the_same_one_wherever_it_stands(tmp_path, store):
    file = tmp_path / "keys"
    file.write_text("secret-1\nsecret-2\n")
    before = KeyRing(given_keys("", str(file)), KeyStore(store))
    file.write_text("secret-2\n")
    after = KeyRing(given_keys("", str(file)), KeyStore(store))
    first, second = (before.authenticate([text]) for text in ("secret-1", "secret-2"))
    assert after.authenticate(["secret-2"]) == second == after.of(second.id)
    with pytest.raises(Unauthorized):
        after.of(first.id)


def test_a_store_that_is_none_is_refused(tmp_path):
    (tmp_path / "text").write_text("this is not a database, and long enough to be seen as none" * 100)
    with pytest.raises(ConfigError, match="text cannot be used"):
        Store(tmp_path / "text")
    with pytest.raises(ConfigError, match="cannot be used"):
        Store(tmp_path / "text" / "below")
    later = tmp_path / "later"
    with sqlite3.connect(later) as connection:
        connection.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    with pytest.raises(ConfigError, match="newer Pelton"):
        Store(later)


def test_a_server_that_cannot_make_a_store_takes_none_away_from_another_one(tmp_path, monkeypatch):
    path = tmp_path / "server.sqlite"
    begun, other_is_open = threading.Event(), threading.Event()

    class Failing(Store):
        def __init__(self, path: Path) -> None:
            path.touch()
            monkeypatch.setattr(store_opening, "Store", Store)
            begun.set()
            other_is_open.wait(0.2)  # which waits for this one
            raise ConfigError("the disk was full, and is no more")

    monkeypatch.setattr(store_opening, "Store", Failing)
    with ThreadPoolExecutor(2) as threads:
        failing = threads.submit(store_opening.open_store, str(path))
        assert begun.wait(10)
        opening = threads.submit(store_opening.open_store, str(path))
        opening.add_done_callback(lambda _: other_is_open.set())
        assert failing.result() is None
        opened = opening.result()
    assert path.stat().st_size
    KeyStore(opened).create("ada")
    opened.close()


def test_a_store_that_is_full_or_damaged_later_is_told_of_as_such(store):
    def fill(connection):
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages}")
        connection.execute("INSERT INTO settings VALUES ('large', zeroblob(1000000))")

    with pytest.raises(Unavailable, match="store cannot be used: database or disk is full"):
        store.write(fill).result()
    with pytest.raises(Unavailable, match="store cannot be used: no such table"):
        store.read("SELECT * FROM what_was_lost")


def test_a_piece_of_work_that_fails_leaves_nothing(store):
    def work(connection):
        connection.execute("INSERT INTO settings VALUES ('a', x'00')")
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        store.write(work).result()
    assert store.read("SELECT * FROM settings") == []
    assert store.secret("a") == store.secret("a") != store.secret("b")


def test_buckets_fill_steadily_and_are_shared(store, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(limits.time, "time", lambda: now[0])
    key, _ = KeyStore(store).create("ada", rpm=6, tpm=600)
    others = Store(store.path)

    async def main() -> None:
        here, there = Limits(store, key), Limits(others, key)
        for i in range(6):
            await (here, there)[i % 2].take("requests", 1)
        assert there.buckets["requests"] == limits.Bucket(6, 0, 60.0)
        with pytest.raises(RateLimited, match="6 requests per minute") as caught:
            await here.take("requests", 1)
        assert caught.value.retry_after == pytest.approx(10)
        now[0] += 10
        await here.take("requests", 1)
        with pytest.raises(RateLimited):
            await there.take("requests", 1)

        assert await here.take("tokens", 10_000) == 600  # all that there can be
        here.settle("tokens", 300)  # it took more: a debt
        with pytest.raises(RateLimited) as caught:
            await here.take("tokens", 100)
        assert caught.value.retry_after == pytest.approx(40)
        now[0] += 40
        assert await here.take("tokens", 100) == 100
        here.settle("tokens", -50)
        assert await here.take("tokens", 50) == 50
        now[0] -= 500  # the clock was put back
        with pytest.raises(RateLimited):
            await here.take("tokens", 1)
        assert dict(here.headers())[b"x-ratelimit-remaining-requests"] == b"0"
        assert await Limits(store, ANYONE).take("tokens", 10**9) == 0

    asyncio.run(main())
    others.close()


def test_durations():
    assert [duration(s) for s in (0, 0.25, 1, 12.5, 60, 90, 3600)] == [
        "0ms", "250ms", "1s", "12.5s", "1m0s", "1m30s", "60m0s",
    ]  # fmt: skip


def test_the_ledger_adds_up(store):
    async def main() -> None:
        ledger = Ledger(store)
        for usage, failed in ((Usage(prompt_tokens=5, completion_tokens=2, cached_tokens=3), False), (Usage(), True)):
            ledger.add("k", "m", usage, is_failed=failed)
            ledger.flush()
        ledger.add("k", "other", Usage(prompt_tokens=1), is_failed=False)
        ledger.flush()

    asyncio.run(main())
    store.write(lambda connection: None).result()
    rows = used(store)
    assert [(r.model, r.requests, r.failed, r.prompt_tokens, r.cached_tokens, r.completion_tokens) for r in rows] == [
        ("m", 2, 1, 5, 3, 2), ("other", 1, 0, 1, 0, 0),
    ]  # fmt: skip
    assert used(store, "2999-01-01") == []


def full(store: Store) -> None:
    """Let the store's disk be full."""
    store.write(lambda connection: connection.execute("PRAGMA max_page_count = 1")).result()


def freed(store: Store) -> None:
    store.write(lambda connection: connection.execute("PRAGMA max_page_count = 100000")).result()


def big(connection: Connection) -> None:
    connection.execute("INSERT INTO settings VALUES (hex(randomblob(8)), randomblob(100000))")


def test_the_ledger_keeps_what_a_full_disk_cannot_take(store, caplog, monkeypatch):
    insert = ledger_module._insert
    monkeypatch.setattr(ledger_module, "_insert", lambda connection, rows: (big(connection), insert(connection, rows)))
    monkeypatch.setattr(ledger_module, "FLUSH_SECONDS", 0.01)
    monkeypatch.setattr(ledger_module, "RETRY_SECONDS", 0.01)
    full(store)

    async def main() -> None:
        ledger = Ledger(store)
        for i in range(20):
            ledger.add("k", f"m{i % 2}", Usage(prompt_tokens=1), is_failed=False)
            await asyncio.sleep(0.01)
        freed(store)
        while not used(store):
            await asyncio.sleep(0.01)
        full(store)
        ledger.add("k", "lost", Usage(prompt_tokens=77), is_failed=False)
        ledger.close()

    asyncio.run(asyncio.wait_for(main(), 20))
    assert [(row.model, row.requests, row.prompt_tokens) for row in used(store)] == [("m0", 10, 10), ("m1", 10, 10)]
    assert len(re.findall("is kept until it can be: .* is full", caplog.text)) == 2  # once for each time
    assert re.search("not written of what keys have used: 1 entries, .*'lost'.*77", caplog.text)


def test_what_comes_after_the_end_of_the_store_fails_and_is_told(store, caplog):
    store.close()
    assert isinstance(store.write(lambda connection: None).exception(), Unavailable)
    assert "came to be written" in caplog.text
    with pytest.raises(Unavailable, match="shutting down"):
        store.read("SELECT 1")
    key = Key(id="k", name="k", scopes=frozenset(), tpm=9)
    Limits(store, key).settle("tokens", 3)  # at the end of a request that was cut off
    with pytest.raises(Unavailable, match="shutting down"):
        asyncio.run(Limits(store, key).take("tokens", 3))


def test_a_store_that_needs_no_change_opens_where_nothing_can_be_written(tmp_path, monkeypatch):
    Store(tmp_path / "s").close()
    first = Store(tmp_path / "s")
    _, text = KeyStore(first).create("ada")
    monkeypatch.setattr(Store, "_transact", lambda *_: pytest.fail("it was written"))
    second = Store(tmp_path / "s")
    assert KeyStore(second).find(text).name == "ada"
    monkeypatch.undo()
    first.close()
    second.close()
