"""Packed weights in the cache folder: read by all threads at a start, written in the background after the first."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from typing import BinaryIO

import numpy as np

from pelton import _core
from pelton.backends.base import Permit
from pelton.formats.bounded_folder import BoundedFolder
from pelton.formats.packed import PackedFile

log = logging.getLogger(__name__)

_CHUNK = _core.STORED_CHUNK
_GROUP = 32 * _CHUNK
"""Bytes between reports of progress, and between waits for the disk."""


class StoredWeights:
    """The packed weights of one layout, by the digest of the model that they are of."""

    def __init__(self, folder: BoundedFolder, layout_key: bytes, num_bytes: int) -> None:
        self._folder = folder
        self._layout_key = layout_key
        self._num_bytes = num_bytes

    def read(
        self, digest: str, machine: _core.Machine, progress: Callable[[float], None] | None
    ) -> _core.Memory | None:
        """The packed weights of that model; None where they are not there. What is there but not whole is removed."""
        name, shape = self._file(digest)
        file = self._folder.open(name)
        if file is None:
            return None
        with file:
            memory = _read(file, shape, machine, progress)
        if memory is None:
            log.warning("%s.packed was damaged; it is made anew", name)
            self._folder.discard(name)
        return memory

    def write(self, digest: str, memory: _core.Memory, permit: Permit) -> bool:
        """Keep the weights, if they are not there yet. False: they are not there by this call. Leaves them as they
        are; takes no memory to speak of. `permit` is called between pieces of a few milliseconds."""
        name, shape = self._file(digest)
        return self._folder.write(name, shape.num_bytes, lambda file: _write(file, shape, memory, permit))

    def _file(self, digest: str) -> tuple[str, PackedFile]:
        key = hashlib.blake2b(digest.encode() + self._layout_key, digest_size=32)
        return f"{digest}-{key.hexdigest()[:16]}", PackedFile(key.digest(), self._num_bytes, _CHUNK)


def _read(
    file: BinaryIO, shape: PackedFile, machine: _core.Machine, progress: Callable[[float], None] | None
) -> _core.Memory | None:
    try:
        checksums = shape.checksums(file.read(shape.data_offset))
        if checksums is None or os.fstat(file.fileno()).st_size != shape.num_bytes:
            return None
    except OSError:
        return None
    sums = np.frombuffer(checksums, "<u8").astype(np.uint64)
    memory = _core.Memory(shape.data_bytes)
    for start in range(0, shape.data_bytes, _GROUP):
        count = min(_GROUP, shape.data_bytes - start)
        at = shape.data_offset + start
        if not machine.read_stored(file.fileno(), at, memory, start, count, sums[start // _CHUNK :]):
            return None
        if progress is not None:
            progress((start + count) / shape.data_bytes)
    return memory


def _write(file: BinaryIO, shape: PackedFile, memory: _core.Memory, permit: Permit) -> bool:
    checksums = np.zeros(shape.num_chunks, "<u8")
    for i in range(shape.num_chunks):
        if not permit():
            return False
        start = i * _CHUNK
        chunk = memory.view(start, min(_CHUNK, shape.data_bytes - start))
        checksums[i] = _core.checksum(chunk)
        _write_at(file, shape.data_offset + start, chunk)
        if (start + _CHUNK) % _GROUP == 0:
            os.fsync(file.fileno())  # so that not all is left to the end, which would hold up everybody's disk
    _write_at(file, 0, np.frombuffer(shape.header(checksums.tobytes()), np.uint8))
    return True


def _write_at(file: BinaryIO, offset: int, data: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> None:
    done = 0
    while done < data.size:
        done += os.pwrite(file.fileno(), data[done:].data, offset + done)
