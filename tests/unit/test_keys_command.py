"""`pelton keys`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pelton.cli.main import main
from pelton.server.keys import KeyRing, KeyStore
from pelton.server.ledger import Ledger
from pelton.server.store import Store


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PELTON_HOME", str(tmp_path))
    return tmp_path


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["keys", *args])


def lines(*args: str) -> list[dict]:
    return [json.loads(line) for line in run(*args, "--json").stdout.splitlines()]


def test_the_life_of_a_key(home):
    made = run("create", "--name", "ada", "--scopes", "inference,models", "--models", "a,b", "--rpm", "60",
               "--tpm", "9000", "--expires", "30d")  # fmt: skip
    assert made.exit_code == 0, made.output
    text = made.stdout.strip()
    store = Store(home / "server.sqlite")
    key = KeyRing([], KeyStore(store)).authenticate([text])
    assert (key.name, key.models, key.rpm, key.tpm) == ("ada", ("a", "b"), 60, 9000)
    assert key.expires_at == pytest.approx(key.created_at + 30 * 86400, abs=5)
    [listed] = lines("list")
    assert (listed["id"], sorted(listed["scopes"])) == (key.id, ["inference", "models"])
    assert text not in run("list").stdout
    assert " ada " in run("list").stdout
    again = run("create", "--name", "ada")
    assert (again.exit_code, "already" in again.stderr) == (1, True)
    assert run("revoke", key.id).exit_code == 0
    assert run("revoke", key.id).exit_code == 1
    assert "revoked" in run("list").stdout
    store.close()


def test_usage(home):
    run("create", "--name", "ada")
    run("create", "--name", "bob")
    store = Store(home / "server.sqlite")
    ledger = Ledger(store)
    for key in KeyStore(store).all():
        ledger._counts[key.id, "2026-02-03", "m"] = [1, 0, 7, 2, 5]
    ledger._counts["api-key", "2026-02-01", "m"] = [3, 1, 1, 1, 1]
    ledger.flush()
    store.close()
    rows = lines("usage")
    assert rows[0]["name"] == "api-key"
    assert sorted((row["name"], row["requests"]) for row in rows) == [("ada", 1), ("api-key", 3), ("bob", 1)]
    assert [row["prompt_tokens"] for row in lines("usage", "--name", "bob")] == [7]
    assert len(lines("usage", "--since", "2026-02-02")) == len(lines("usage", "--since", "2026-2-2")) == 2
    assert "completion" in run("usage").stdout


@pytest.mark.parametrize("expires", ["tomorrow", "3y", "2001-01-01", "2027-13-01", "0d"])
def test_times_that_are_none(expires):
    assert run("create", "--name", "ada", "--expires", expires).exit_code != 0
    assert lines("list") == []
