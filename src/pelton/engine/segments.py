"""A file of the disk tier: the keys and values of consecutive blocks of one prefix.

    magic, length and BLAKE2b of the header; the header (msgpack); from `offset` on, block after block, the backend's
    bytes of each cache group that has them

A block's name is a digest of all tokens up to its end, and of all else that its keys and values depend on (`chain`),
so that blocks of equal names are equal. The header is written last; it has a checksum per block and group. What is not
as it was written is noticed, whatever happened to it.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO

import msgspec

from pelton.ops.data import BLOCK_TOKENS

_MAGIC = b"PELTONKV\x01"
_DIGEST = 16
_START = len(_MAGIC) + 4 + _DIGEST
_ALIGN = 4096
MAX_HEADER = 1 << 20


def _digest(*parts: bytes) -> bytes:
    state = hashlib.blake2b(digest_size=_DIGEST)
    for part in parts:
        state.update(part)
    return state.digest()


def chain(fingerprint: str, salt: str, tokens: Sequence[int]) -> Iterator[bytes]:
    """The names of the full blocks of a run of tokens."""
    name = _digest(*(len(part).to_bytes(8, "little") + part for part in (fingerprint.encode(), salt.encode())))
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        name = _digest(name, array("i", tokens[start : start + BLOCK_TOKENS]).tobytes())
        yield name


class Block(msgspec.Struct, frozen=True, array_like=True):
    """One block: its name, and per cache group the bytes (0: not there) and their checksum."""

    name: bytes
    sizes: tuple[int, ...]
    sums: tuple[bytes, ...]


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """A file's header. The data of the first block begin at `offset`."""

    offset: int
    blocks: tuple[Block, ...]

    @property
    def num_bytes(self) -> int:
        """Of the file."""
        return self.offset + sum(sum(block.sizes) for block in self.blocks)

    def place(self, index: int, group: int) -> tuple[int, int]:
        """Where a block's bytes of a group are, and how many there are."""
        before = sum(sum(block.sizes) for block in self.blocks[:index])
        sizes = self.blocks[index].sizes
        return self.offset + before + sum(sizes[:group]), sizes[group]


def planned_bytes(num_blocks: int, block_bytes: Sequence[int]) -> int:
    """Of a file of so many blocks, at the most."""
    return _data_offset(num_blocks, len(block_bytes)) + num_blocks * sum(block_bytes)


def _data_offset(num_blocks: int, num_groups: int) -> int:
    length = _START + 32 + num_blocks * (2 * _DIGEST + num_groups * (_DIGEST + 8))
    return -(-length // _ALIGN) * _ALIGN


def write(
    file: BinaryIO, names: Sequence[bytes], num_groups: int, data: Callable[[int], list[bytes] | None]
) -> Segment | None:
    """Write a file block by block. `data(index)` gives each group's bytes of a block, b"" where it has none, and None
    to end there. None: not even the first block was to be had."""
    offset = _data_offset(len(names), num_groups)
    file.seek(offset)
    blocks: list[Block] = []
    for index, name in enumerate(names):
        parts = data(index)
        if parts is None:
            break
        for part in parts:
            file.write(part)
        blocks.append(Block(name, tuple(map(len, parts)), tuple(map(_digest, parts))))
    if not blocks:
        return None
    segment = Segment(offset, tuple(blocks))
    header = msgspec.msgpack.encode(segment)
    file.truncate(segment.num_bytes)
    file.seek(0)
    file.write(_MAGIC + len(header).to_bytes(4, "little") + _digest(header) + header)
    return segment


def read_header(file: BinaryIO) -> Segment | None:
    """The header of a whole file; None for anything else."""
    start = file.read(_START)
    length = int.from_bytes(start[len(_MAGIC) : len(_MAGIC) + 4], "little")
    if not start.startswith(_MAGIC) or length > MAX_HEADER:
        return None
    header = file.read(length)
    if start[-_DIGEST:] != _digest(header):
        return None
    segment: Segment = msgspec.msgpack.decode(header, type=Segment)
    return segment if os.fstat(file.fileno()).st_size == segment.num_bytes else None


def read(file: BinaryIO, segment: Segment, index: int, group: int) -> bytes | None:
    """A block's bytes of a group; None where they are not what was written."""
    offset, size = segment.place(index, group)
    file.seek(offset)
    data = file.read(size)
    return data if _digest(data) == segment.blocks[index].sums[group] else None
