"""What every source of models offers, and what it says while it works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from pelton.formats.digest import Digest
from pelton.hub.store import FileName

Phase = Literal["connect", "wait", "download", "unpack", "verify", "failed", "done"]


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a pull. `done` and `total` are bytes of `file`; total None: not known."""

    source: str
    """Where from, for people: "huggingface.co/owner/repo"."""
    phase: Phase
    """wait: another process fetches the same file. failed: `detail` says why; the next source follows."""
    file: str = ""
    sha256: str = ""
    """That the file must have."""
    done: int = 0
    total: int | None = None
    detail: str = ""


Report = Callable[[Progress], None]


class FileInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A file that a source has. `size` None: the source does not say."""

    name: FileName
    sha256: Digest
    size: int | None


@dataclass(frozen=True)
class RemoteFile:
    """A file, and how to gather it at a path. `scratch` is the size of the archive that it comes out of, in bytes,
    where that is gathered beside it (`store.scratch_path`).

    `download` goes on from what is there already where it can, and raises HubError.
    """

    info: FileInfo
    download: Callable[[Path, Report], None]
    scratch: int = 0
