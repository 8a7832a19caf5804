"""A bounded folder of files that are only kept to save time: packed weights, cached prefixes. Their names are
<model's SHA-256>-<key>.<kind>

Any number of processes use it at once. A file gets its name when it is whole and on the disk; until then it is
`.partial`, and whoever writes it holds its lock, so that what a killed writer left is known as such. A file's time is
that of its last use: the one that was not used for longest goes first. Nothing that fails here is an error: without
the folder things only take longer.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec

log = logging.getLogger(__name__)

SPARE_DISK = 1 << 30
"""Bytes of the disk that are left free."""


Kind = Literal["packed", "prefix"]
_WHAT: dict[Kind, str] = {"packed": "packed weights", "prefix": "cached prefixes"}
_MODE: dict[Kind, int] = {"packed": 0o644, "prefix": 0o600}
"""Prefixes hold what was asked: nobody else is to read them."""


class BoundedFolder(msgspec.Struct, frozen=True):
    """The folder, the bytes that it may hold, and the kind of its files."""

    folder: str
    limit: int
    kind: Kind = "packed"

    def open(self, name: str, *, is_use: bool = True) -> BinaryIO | None:
        """A file that is there, now the one used last, unless this is no use."""
        path = self._path(name)
        try:
            if not path.is_file():  # to open a pipe would wait for its writer
                return None
            file = path.open("rb")
        except OSError:
            return None
        with suppress(OSError):
            if is_use:
                os.utime(path)
        return file

    def names(self, start: str) -> list[str]:
        """The files whose names begin so."""
        return [path.stem for path in Path(self.folder).glob(f"{start}*.{self.kind}")]

    def discard(self, name: str) -> None:
        """Remove a file, if it is there."""
        with suppress(OSError):
            self._path(name).unlink()

    def write(self, name: str, num_bytes: int, fill: Callable[[BinaryIO], bool]) -> bool:
        """Make a file of so many bytes with what `fill` writes, unless it is there, or being made, or has no room.
        `fill` may give up by returning False. Is it there now, by this call?"""
        if num_bytes > self.limit or self._path(name).exists():
            return False
        try:
            Path(self.folder).mkdir(parents=True, exist_ok=True)
            with self._partial(name) as file:
                return file is not None and self._fill(name, file, num_bytes, fill)
        except OSError as error:
            log.warning("%s are not kept, so that starts take longer: %s", _WHAT[self.kind], error)
            return False

    def remove_model(self, digest: str) -> None:
        """Remove all files of a model."""
        for name in self.names(f"{digest}-"):
            self.discard(name)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(stat.st_size for _, stat in self._files(self.kind))

    def model_bytes(self, digest: str) -> int:
        """Bytes of all files of a model."""
        return sum(stat.st_size for path, stat in self._files(self.kind) if path.name.startswith(f"{digest}-"))

    def _path(self, name: str) -> Path:
        return Path(self.folder, f"{name}.{self.kind}")

    def _partial_path(self, name: str) -> Path:
        return Path(self.folder, f"{name}.partial")

    def _files(self, kind: str) -> list[tuple[Path, os.stat_result]]:
        found = []
        for path in Path(self.folder).glob(f"*.{kind}"):
            with suppress(OSError):  # removed just now
                found.append((path, path.stat()))
        return found

    @contextmanager
    def _partial(self, name: str) -> Iterator[BinaryIO | None]:
        """The unfinished file, empty, its lock held; None where another process holds it."""
        path = self._partial_path(name)
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, _MODE[self.kind]), "wb") as file:
            if not _lock(file, path):
                yield None
                return
            try:
                file.truncate(0)
                yield file
            finally:
                if _is_at(file, path):  # else it has its name by now
                    path.unlink()

    def _fill(self, name: str, file: BinaryIO, num_bytes: int, fill: Callable[[BinaryIO], bool]) -> bool:
        self._make_room(num_bytes)
        disk = os.statvfs(self.folder)
        if disk.f_bavail * disk.f_frsize < num_bytes + SPARE_DISK:
            log.warning("%s are not kept: %s has no room for %.1f GB", _WHAT[self.kind], self.folder, num_bytes / 1e9)
            return False
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        if not fill(file):
            return False
        file.flush()
        os.fsync(file.fileno())
        self._partial_path(name).replace(self._path(name))
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return True

    def _make_room(self, num_bytes: int) -> None:
        """Remove what killed writers left, and files until `num_bytes` more are within the limit."""
        for path, _ in self._files("partial"):
            with suppress(OSError), path.open("rb") as file:
                if _lock(file, path):
                    path.unlink()
        files = sorted(self._files(self.kind), key=lambda file: file[1].st_mtime_ns)
        total = sum(stat.st_size for _, stat in files)
        for path, stat in files:
            if total + num_bytes <= self.limit:
                return
            self.discard(path.stem)
            total -= stat.st_size


def _lock(file: BinaryIO, path: Path) -> bool:
    """Is the lock of that file ours now, and is it still the one of that name?"""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return _is_at(file, path)


def _is_at(file: BinaryIO, path: Path) -> bool:
    with suppress(OSError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False
