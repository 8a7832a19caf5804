"""A file that a client sends -> the disk."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterable
from pathlib import Path

from pelton.errors import RequestTooLarge
from pelton.hub.pull import SPARE_DISK

PIECE = 4 << 20
"""Bytes that are written at once."""


async def gather(path: Path, chunks: AsyncIterable[bytes], size: int | None) -> None:
    """Write `chunks` to the file; `size`: bytes of all, where that is known. Raises `RequestTooLarge` where the disk
    has no room for them."""
    await asyncio.to_thread(_check_room, path, size or 0)
    piece = bytearray()
    with path.open("wb") as file:

        def write() -> None:
            _check_room(path, len(piece))
            file.write(piece)
            piece.clear()

        async for chunk in chunks:
            piece += chunk
            if len(piece) >= PIECE:
                await asyncio.to_thread(write)
        await asyncio.to_thread(write)


def _check_room(path: Path, size: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if size + SPARE_DISK > free:
        raise RequestTooLarge(f"a file of {size / 1e6:.0f} MB does not fit: {free / 1e6:.0f} MB of disk are free")
