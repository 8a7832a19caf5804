"""API keys: those of the store, which are made, limited and revoked one by one, and those that a server was started
with.

A made key is "sk-pelton-ID-SECRET" with 256 random bits; the store has its id and a keyed BLAKE2b hash of the whole. So
many random bits need no slow hash, which is there for passwords.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, get_args

import msgspec

from pelton.errors import ConfigError, InvalidRequest, Unauthorized
from pelton.server.store import Connection, Store

Scope = Literal["inference", "models", "metrics", "admin"]
"""inference: use models; models: also change which there are; metrics: read them, no more; admin: everything."""
SCOPES: tuple[Scope, ...] = get_args(Scope)

_MADE = re.compile(r"sk-pelton-([0-9a-f]{12})-[A-Za-z0-9_-]{43}")
_NAME = re.compile(r"[\w][\w .@:/-]{0,99}")
_GIVEN = re.compile(r"[!-~]{1,500}")
MAX_LIMIT = 1 << 40


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a key; the key itself is not. Times are seconds since 1970."""

    id: str
    name: str
    scopes: frozenset[str]
    models: tuple[str, ...] | None = None
    """The names of the models that it may use; None: all."""
    rpm: int | None = None
    """Requests per minute; None: any number."""
    tpm: int | None = None
    """Tokens per minute, those of prompts and of answers; None: any number."""
    created_at: float = 0.0
    expires_at: float | None = None
    revoked_at: float | None = None

    def may(self, scope: Scope) -> bool:
        """May it do what needs this scope?"""
        return scope in self.scopes or "admin" in self.scopes or (scope == "inference" and "models" in self.scopes)

    def may_use(self, model: str) -> bool:
        """May it use the model of this name?"""
        return self.models is None or model in self.models


ANYONE = Key(id="", name="", scopes=frozenset(SCOPES))
"""Whoever asks a server without keys."""

_COLUMNS = "id, name, scopes, models, rpm, tpm, created_at, expires_at, revoked_at"


class KeyStore:
    """The keys of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._secret = store.secret("keys")

    @property
    def is_empty(self) -> bool:
        """Was no key ever made? Revoked ones count: with the last one gone, nobody may come in."""
        return not self._store.read("SELECT 1 FROM keys LIMIT 1")

    def create(
        self,
        name: str,
        *,
        scopes: Iterable[str] = ("inference",),
        models: Iterable[str] = (),
        rpm: int | None = None,
        tpm: int | None = None,
        expires_at: float | None = None,
    ) -> tuple[Key, str]:
        """Make a key. Its text is in the result and nowhere else. Raises `InvalidRequest` that names the field."""
        key = Key(
            id=secrets.token_hex(6),
            name=name,
            scopes=frozenset(scopes),
            models=tuple(dict.fromkeys(models)) or None,
            rpm=rpm,
            tpm=tpm,
            created_at=time.time(),
            expires_at=expires_at,
        )
        _check(key)
        text = f"sk-pelton-{key.id}-{secrets.token_urlsafe(32)}"
        models_text = None if key.models is None else msgspec.json.encode(key.models).decode()
        row = (key.id, name, self.hash(text), " ".join(sorted(key.scopes)), models_text, rpm, tpm, key.created_at)

        def insert(connection: Connection) -> None:
            if connection.execute("SELECT 1 FROM keys WHERE name = ? AND revoked_at IS NULL", (name,)).fetchone():
                raise InvalidRequest(f"there is a key named {name!r} already", param="name")
            connection.execute("INSERT INTO keys VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, NULL)", (*row, expires_at))

        self._store.write(insert).result()
        return key, text

    def all(self) -> list[Key]:
        """All keys, the oldest first, revoked ones too."""
        return [_key(row) for row in self._store.read(f"SELECT {_COLUMNS} FROM keys ORDER BY created_at")]

    def revoke(self, name: str) -> Key:
        """End a key, by its name or its id. Raises `InvalidRequest` where there is none."""
        now = time.time()

        def update(connection: Connection) -> list[tuple[str, ...]]:
            return connection.execute(
                "UPDATE keys SET revoked_at = ? WHERE (name = ? OR id = ?) AND revoked_at IS NULL "
                f"RETURNING {_COLUMNS}",
                (now, name, name),
            ).fetchall()

        rows = self._store.write(update).result()
        if not rows:
            raise InvalidRequest(f"there is no key {name!r}, or it is revoked already", param="name")
        return _key(rows[0])

    def find(self, text: str) -> Key | None:
        """The key that has this text, whether it is valid now or not."""
        match = _MADE.fullmatch(text)
        if match is None:
            return None
        rows = self._store.read(f"SELECT hash, {_COLUMNS} FROM keys WHERE id = ?", (match[1],))
        if not rows or not secrets.compare_digest(rows[0][0], self.hash(text)):
            return None
        return _key(rows[0][1:])

    def of(self, id: str) -> Key | None:
        """The key of this id, whether it is valid now or not."""
        rows = self._store.read(f"SELECT {_COLUMNS} FROM keys WHERE id = ?", (id,))
        return _key(rows[0]) if rows else None

    def hash(self, text: str) -> bytes:
        """What is kept of a key: the same for all servers of the store."""
        return hashlib.blake2b(text.encode(), key=self._secret, digest_size=32).digest()


def _key(row: tuple[object, ...]) -> Key:
    id, name, scopes, models, *rest = row
    values = dict(zip(("rpm", "tpm", "created_at", "expires_at", "revoked_at"), rest, strict=True))
    allowed = None if models is None else msgspec.json.decode(str(models), type=tuple[str, ...])
    return msgspec.convert(
        {"id": id, "name": name, "scopes": str(scopes).split(), "models": allowed, **values}, Key, strict=False
    )


def _check(key: Key) -> None:
    if not _NAME.fullmatch(key.name):
        raise InvalidRequest(
            f"name: {key.name[:120]!r} must be 1 to 100 letters, digits, spaces or any of . @ : / - _", param="name"
        )
    if unknown := sorted(key.scopes - set(SCOPES)):
        raise InvalidRequest(f"scopes: {unknown[0]!r} is none of {', '.join(SCOPES)}", param="scopes")
    if not key.scopes:
        raise InvalidRequest("scopes: a key needs one at least", param="scopes")
    for name, limit in (("rpm", key.rpm), ("tpm", key.tpm)):
        if limit is not None and not 1 <= limit <= MAX_LIMIT:
            raise InvalidRequest(f"{name} is {limit}, must be from 1 to {MAX_LIMIT}", param=name)
    if key.expires_at is not None and not key.created_at < key.expires_at < 1e11:
        raise InvalidRequest("expires: the time has passed already, or is no time", param="expires")


class KeyRing:
    """All keys that a server takes."""

    def __init__(self, given: Iterable[tuple[str, str]], made: KeyStore | None) -> None:
        """`given`: (name, text) of keys that may do everything, "" the name of one that has none; `made`: those of the
        store."""
        self._secret = secrets.token_bytes(32)
        self._made = made
        self._given = [(self._hash(text), self._key(name, text)) for name, text in given]

    def _key(self, name: str, text: str) -> Key:
        """What a key has made belongs to its name. One without a name is called after itself: were it after its place
        in a file, another one that comes there would find what it has made."""
        name = name or f"api-key-{(self._hash if self._made is None else self._made.hash)(text).hex()[:12]}"
        return Key(id=name, name=name, scopes=frozenset(SCOPES))

    @property
    def is_empty(self) -> bool:
        """Are there no keys, so that anyone may come in? A key that is made later closes the door of a running
        server."""
        return not self._given and (self._made is None or self._made.is_empty)

    def authenticate(self, texts: list[str]) -> Key:
        """The key of a request, of the texts that it came with. Raises `Unauthorized`."""
        for text in texts:
            key = self._find(text)
            if key is not None:
                return _valid(key)
        if self.is_empty:
            return ANYONE
        if not texts:
            raise Unauthorized("no API key: send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`")
        raise Unauthorized("the API key is not known here")

    def of(self, id: str) -> Key:
        """The key of this id, for what goes on without its owner. Raises `Unauthorized` where it is not valid now."""
        if not id and self.is_empty:
            return ANYONE
        found = next((key for _, key in self._given if key.id == id), None)
        if found is None and self._made is not None:
            found = self._made.of(id)
        if found is None:
            raise Unauthorized(f"the API key {id!r} is not known here any more" if id else "this server has keys now")
        return _valid(found)

    def _find(self, text: str) -> Key | None:
        digest, found = self._hash(text), None
        for each, key in self._given:  # all of them, so that the time says nothing
            if secrets.compare_digest(each, digest):
                found = key
        if found is None and self._made is not None:
            found = self._made.find(text)
        return found

    def _hash(self, text: str) -> bytes:
        return hashlib.blake2b(text.encode(), key=self._secret, digest_size=32).digest()


def _valid(key: Key) -> Key:
    if key.revoked_at is not None:
        raise Unauthorized("the API key was revoked")
    if key.expires_at is not None and key.expires_at <= time.time():
        raise Unauthorized("the API key has expired")
    return key


def given_keys(api_key: str, api_key_file: str) -> list[tuple[str, str]]:
    """(name or "", text) of the keys that a server is started with. Raises `ConfigError`."""
    keys = [("api-key", _given(api_key, "api_key"))] if api_key else []
    if not api_key_file:
        return keys
    try:
        lines = Path(api_key_file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"api_key_file: {error}", param="api_key_file") from None
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 2:
            raise ConfigError(f"{api_key_file}, line {number}: must be KEY or NAME KEY", param="api_key_file")
        name = words[0] if len(words) == 2 else ""
        keys.append((name, _given(words[-1], f"{api_key_file}, line {number}")))
    if not keys:
        raise ConfigError(f"{api_key_file} has no key", param="api_key_file")
    return keys


def _given(text: str, source: str) -> str:
    if not _GIVEN.fullmatch(text):
        raise ConfigError(f"{source}: a key is 1 to 500 visible ASCII characters", param="api_key")
    return text
