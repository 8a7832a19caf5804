"""Opening the store of a server that starts, also where there is none yet, and none can be made."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pelton.errors import ConfigError
from pelton.server.store import Store

log = logging.getLogger("pelton.server")


def open_store(path: str) -> Store | None:
    """None where there is none and none can be made: what a key needs is there, or there is no key."""
    if not path:
        return None
    with _alone(Path(path).parent) as is_alone:
        is_new = not os.path.lexists(path) or (Path(path).is_file() and not Path(path).stat().st_size)
        try:
            return Store(Path(path))
        except ConfigError as error:
            if not is_new:
                raise
            if is_alone:
                _remove(path)
            log.warning(
                "keys, the ledger of what they use, and all that is stored (responses, files) are off: %s", error
            )
            return None


@contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Wait until no other server is about to open a store in this folder, and let none until the end. False: that
    cannot be had there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        yield _locked(descriptor)
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:  # some file systems have no locks
        return False
    return True


def _remove(path: str) -> None:
    """What is left of a store on a disk that was full halfway: the next start would not take it for new."""
    for left in (path, f"{path}-wal", f"{path}-shm", f"{path}-journal"):
        with suppress(OSError):
            Path(left).unlink()
