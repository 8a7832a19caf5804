"""Files of packed weights: what a backend made of a model's weights, kept for the next start.

    magic, version, bytes per chunk, bytes of data, where they start, key       64 bytes
    BLAKE2b-256 of all other bytes before the data                              32
    a 64-bit checksum for each chunk of data                                     8 each
    zeros up to a multiple of 4096
    the data

The key names all that the data depend on; a file is as good as absent unless every byte before the data is as it
should be. The chunks are checked by whoever reads them.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

MAGIC = b"PELTONPW"
VERSION = 1
_FIELDS = struct.Struct("<8sIIQQ32s")
_CHECK_BYTES = 32
_ALIGN = 4096


@dataclass(frozen=True)
class PackedFile:
    """The file that belongs to `key`: so many bytes of data in chunks of `chunk_bytes`."""

    key: bytes
    data_bytes: int
    chunk_bytes: int

    @property
    def num_chunks(self) -> int:
        """Chunks, the last one perhaps not full."""
        return -(-self.data_bytes // self.chunk_bytes)

    @property
    def data_offset(self) -> int:
        """Where the data start: bytes of the header."""
        return -(-(_FIELDS.size + _CHECK_BYTES + 8 * self.num_chunks) // _ALIGN) * _ALIGN

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole file."""
        return self.data_offset + self.data_bytes

    def header(self, checksums: bytes) -> bytes:
        """All bytes before the data. `checksums`: eight bytes for each chunk, little-endian."""
        fields = self._fields()
        rest = checksums.ljust(self.data_offset - len(fields) - _CHECK_BYTES, b"\0")
        return fields + _check(fields + rest) + rest

    def checksums(self, header: bytes) -> bytes | None:
        """The checksums in a header; None unless it is the whole and sound header of this very file."""
        fields = self._fields()
        check, rest = header[len(fields) :][:_CHECK_BYTES], header[len(fields) + _CHECK_BYTES :]
        if len(header) != self.data_offset or header[: len(fields)] != fields or check != _check(fields + rest):
            return None
        return rest[: 8 * self.num_chunks]

    def _fields(self) -> bytes:
        return _FIELDS.pack(MAGIC, VERSION, self.chunk_bytes, self.data_bytes, self.data_offset, self.key)


def _check(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_CHECK_BYTES).digest()
