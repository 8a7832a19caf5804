"""The answers of a batch as they come: lines behind each other in two files, which are the record of what is done.

Each line is on the disk before it counts. Whoever opens the files again, after whatever end, finds the lines that are
whole, cuts off a last one that is not, and goes on with the others: so each request has one line, in one of the files.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import TypeVar

import msgspec

from pelton.server.batch_types import BatchUsage, OutputLine, plus
from pelton.server.file_store import sync_folder

T = TypeVar("T")
_decoder = msgspec.json.Decoder(OutputLine)
_encoder = msgspec.json.Encoder()


class BatchLog:
    """The two files. All that is done to them is done in one thread, in order, also when nobody waits for it."""

    def __init__(self, output: Path, errors: Path) -> None:
        self._paths = (output, errors)
        self._files: list[FileIO] = []
        """Nothing is held back: what could not be written is not written later."""
        self._is_open = self._is_used = False
        self._to_add: deque[OutputLine] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pelton batch")
        self.done: set[str] = set()
        """The `custom_id` of each line."""
        self.num_completed = self.num_failed = 0
        self.usage = BatchUsage()

    async def open(self) -> None:
        """Find out what is done. May be called again."""
        await self._do(self._open)

    def _open(self) -> None:
        if self._is_open:
            return
        self._let_go()  # of what was opened by one that failed
        self.done.clear()
        self.num_completed, self.num_failed, self.usage = 0, 0, BatchUsage()
        self._paths[0].parent.mkdir(mode=0o700, exist_ok=True)
        for path in self._paths:
            descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            file = os.fdopen(descriptor, "r+b", buffering=0)
            self._files.append(file)
            _cut(file, self._counted(path))
        sync_folder(self._paths[0].parent)
        self._is_open = True

    def _counted(self, path: Path) -> int:
        """Count the lines that are whole; how many bytes those are."""
        end = 0
        with path.open("rb") as lines:
            for line in lines:
                try:
                    if not line.endswith(b"\n"):
                        break
                    self._count(_decoder.decode(line))
                except msgspec.DecodeError:
                    break
                end += len(line)
        return end

    async def add(self, lines: Sequence[OutputLine]) -> None:
        """Write lines down. They are safe when this returns, and are written even where it is cancelled."""
        self._to_add.extend(lines)
        await self._do(self._add)

    def _add(self) -> None:
        """Write all that is to be written: what came while the last lines were synced is synced at once."""
        lines = [self._to_add.popleft() for _ in range(len(self._to_add))]
        for file, is_failed in zip(self._files, (False, True), strict=True):
            mine = [line for line in lines if is_failure(line) is is_failed]
            if mine:
                _append(file, b"".join(_encoder.encode(line) + b"\n" for line in mine))
                for line in mine:
                    self._count(line)

    def _count(self, line: OutputLine) -> None:
        self.done.add(line.custom_id)
        if is_failure(line):
            self.num_failed += 1
        else:
            self.num_completed += 1
            assert line.response is not None
            self.usage = plus(self.usage, line.response.body)

    async def close(self) -> tuple[int, int]:
        """How many bytes the files have; those that have none are removed."""
        return await self._do(self._close)

    def _close(self) -> tuple[int, int]:
        sizes = (self._files[0].tell(), self._files[1].tell())
        self._let_go()
        for path, size in zip(self._paths, sizes, strict=True):
            if not size:
                path.unlink()
        return sizes

    def _let_go(self) -> None:
        for file in self._files:
            file.close()
        self._files.clear()

    async def _do(self, work: Callable[..., T], *values: object) -> T:
        self._is_used = True
        return await asyncio.shield(asyncio.wrap_future(self._thread.submit(work, *values)))

    def end(self) -> None:
        """Finish what is being written, and leave the files as they are."""
        if self._is_used:
            self._thread.submit(self._let_go)
        self._thread.shutdown(wait=True)


def _append(file: FileIO, data: bytes) -> None:
    """All of it is on the disk, or nothing."""
    end = file.tell()
    try:
        left = memoryview(data)
        while left:
            left = left[file.write(left) :]
        os.fsync(file.fileno())
    except OSError:
        _cut(file, end)
        raise


def _cut(file: FileIO, end: int) -> None:
    file.seek(end)
    file.truncate()


def is_failure(line: OutputLine) -> bool:
    """Does a line belong among the errors?"""
    return line.response is None or line.response.status_code != 200
