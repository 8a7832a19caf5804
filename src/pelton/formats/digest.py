"""What tells model files apart: size, time and inode at a glance, SHA-256 for certain.

A digest is taken once and kept with the file's stamp: while the stamp stands, so does the digest.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec

Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
"""SHA-256 as 64 hex digits."""

SETTLED = 2.0
"""Seconds after which a change of a file shows in its time, on any file system."""
_SPLIT_NAME = re.compile(r"(?P<stem>.+)-00001-of-(?P<count>\d{5})\.gguf")


class FileStamp(msgspec.Struct, frozen=True):
    """A file's size, time and inode at one moment."""

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, stat: os.stat_result) -> FileStamp:
        """The stamp in what the system says of a file."""
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ino)

    @property
    def is_settled(self) -> bool:
        """Was the file left alone for a while? If not, it could be changed again without its stamp."""
        return abs(time.time() - self.mtime_ns / 1e9) > SETTLED


class ModelFile(msgspec.Struct, frozen=True):
    """A file as it was when it was opened."""

    path: str
    stamp: FileStamp


def is_changed(files: Sequence[ModelFile]) -> bool:
    """Does one of the files hold something else than when it was opened, as far as its stamp shows? One that is gone
    does not: what was read of it stands."""
    for file in files:
        with suppress(OSError):
            if FileStamp.of(Path(file.path).stat()) != file.stamp:
                return True
    return False


class FileDigest(msgspec.Struct, frozen=True):
    """A file as it was when its digest was taken."""

    file: ModelFile
    sha256: Digest


def part_paths(path: Path) -> tuple[Path, ...]:
    """All files of the model whose (first) file that is, by its name: it is not opened."""
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None:
        return (path,)
    count = int(match["count"])
    return tuple(path.with_name(f"{match['stem']}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1))


def of_model(digests: Sequence[str]) -> str:
    """A model's digest: its file's, or for a split model that of its parts' digests in their order."""
    return digests[0] if len(digests) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest()
