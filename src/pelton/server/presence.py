"""Which of the processes that share the server's store are alive: each holds a lock on a file of its own beside it,
which ends with the process, however it ends."""

from __future__ import annotations

import fcntl
import secrets
from contextlib import suppress
from pathlib import Path
from typing import IO

from pelton.errors import Unavailable


class Presence:
    """This process among those of one store."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self._name = secrets.token_hex(8)
        self._held: IO[bytes] | None = None

    @property
    def name(self) -> str:
        """Of this process; alive from the first time that somebody asks for it. Raises `Unavailable` where that cannot
        be told."""
        if self._held is None:
            try:
                self._held = self._path(self._name).open("wb")
                fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise Unavailable(f"the server's store cannot be used: {error}") from error
        return self._name

    def is_mine(self, name: str) -> bool:
        """Is it this process's?"""
        return name == self._name

    def is_alive(self, name: str) -> bool:
        """Is the process of this name alive? What one that has died left behind is removed."""
        path = self._path(name)
        try:
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        with suppress(OSError):
            path.unlink()
        return False

    def close(self) -> None:
        """It ends."""
        if self._held is not None:
            with suppress(OSError):
                self._path(self._name).unlink()
            self._held.close()
            self._held = None

    def _path(self, name: str) -> Path:
        return self._store.with_name(f"{self._store.name}.{name}.alive")
